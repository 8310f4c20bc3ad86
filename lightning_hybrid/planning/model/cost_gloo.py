"""Time model of Gloo's ring all-reduce, and of this library's direct messages over Gloo.

Gloo sends a message only after its receiver has announced that it is ready. The cost of this
handshake depends on the algorithm:

    direct (gloo_p2p.py)        receivers are ready from the start, and all messages are in flight at once:
                                handshake and data, 2 latencies per round
    Gloo's ring                 every rank forwards 2 (P - 1) chunks in two or more segments; two segments may be in
                                flight, and an arrival permits the next one. A segment takes t, its time on the wire,
                                if that hides the handshake, else latency + t / 2:

        segments * max(t, latency + t / 2)          = 4 (P - 1) latencies for few bytes
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from lightning_hybrid.checks import require_number, require_positive, require_share
from lightning_hybrid.comm.message_pattern import between_nodes_form
from lightning_hybrid.planning.model.cost import Link, StageCost
from lightning_hybrid.planning.model.node_wire import NodeWire, bits_of

# Gloo splits a chunk of its ring in two, and further if a segment would be larger than this (gloo/allreduce.cc).
SEGMENTS_OF_CHUNK = 2
MOST_SEGMENT_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Gloo:
    """Cost model of Gloo and of this library's Python threads, on hosts without accelerators.

    Args:
        stage_s: Processor time of one rank for one stage of an algorithm, for example to wake its thread.
        message_s: Processor time at either end of one of our messages.
        segment_s: Processor time at either end of one segment of Gloo's ring.
        ring_share: Fraction of a link's bandwidth that one ring uses. Several simultaneous rings use all of it.
        wire_share: Fraction of a link's bandwidth that is payload. The rest are headers and acknowledgements.
        burst_bytes: Bytes that switches store before they forward them. A message waits for its last burst twice.
        num_shared_cores: Number of cores that all ranks of all nodes share if one machine emulates them. None: each
            rank has its own core.
    """

    stage_s: float
    message_s: float
    segment_s: float
    ring_share: float = 1.0
    wire_share: float = 1.0
    burst_bytes: float = 0.0
    num_shared_cores: int | None = None

    def __post_init__(self) -> None:
        for name in ("stage_s", "message_s", "segment_s", "burst_bytes"):
            require_number(
                name,
                getattr(self, name),
                "a cost of the host or the switch cannot be negative. Set 0 for none",
            )
        require_share(
            "ring_share",
            self.ring_share,
            "a single ring uses this fraction of a link's bandwidth. Set 1 if it uses all of it",
        )
        require_share(
            "wire_share",
            self.wire_share,
            "payload uses this fraction of a link's bandwidth. Set 1 to ignore headers",
        )
        if self.num_shared_cores is not None:
            require_positive(
                "num_shared_cores",
                self.num_shared_cores,
                "the emulated ranks share this number of cores. Set None if each rank has its own core",
            )

    def work_s(self, seconds: float, *, of_busiest: float, of_all: float) -> float:
        """Return the processor time in seconds, given the time per item of work and the numbers of items.

        `of_busiest` is the number of items of the busiest rank, and `of_all` that of all ranks
        together.

        >>> Gloo(stage_s=0, message_s=0, segment_s=0, num_shared_cores=2).work_s(1.0, of_busiest=3, of_all=10)
        5.0
        """
        # In an emulated cluster all ranks share few cores. Their total work over these cores is a lower limit.
        shared = 0.0 if self.num_shared_cores is None else of_all / self.num_shared_cores
        return seconds * max(of_busiest, shared)

    def latency_s(self, link: Link, num_bytes: float) -> float:
        """Return the latency of one message in seconds, including the delay of buffers in switches."""
        # A switch stores a burst before it forwards it, so a message waits for its last burst twice.
        return link.latency_s + min(num_bytes, self.burst_bytes) / link.bytes_per_s

    def wait_of_ring_s(self, num_bytes: float, num_ranks: int, link: Link) -> float:
        """Return the time in seconds that a ring all-reduce spends waiting for handshakes.

        Only waits that the transfer does not hide count.

        >>> gloo = Gloo(stage_s=0, message_s=0, segment_s=0)
        >>> gloo.wait_of_ring_s(0, 8, Link(latency_s=2e-3, bytes_per_s=1e8)) == 4 * 7 * 2e-3
        True
        """
        if num_ranks == 1:
            return 0.0
        num_segments = segments_of_ring(num_bytes, num_ranks)
        segment = 2 * (num_ranks - 1) / num_ranks * num_bytes / num_segments
        on_wire_s = segment / (link.bytes_per_s * self.wire_share)
        # segments * (max(t, latency + t / 2) - t). The time on the wire is counted elsewhere.
        return num_segments * max(0.0, self.latency_s(link, segment) - on_wire_s / 2)


def segments_of_ring(num_bytes: float, num_ranks: int) -> int:
    """Return the number of segments that each rank forwards in one ring all-reduce.

    >>> segments_of_ring(8 * 2**20, 4), segments_of_ring(64 * 2**20, 4)
    (12, 96)
    """
    in_chunk = max(SEGMENTS_OF_CHUNK, math.ceil(num_bytes / num_ranks / MOST_SEGMENT_BYTES))
    return 2 * (num_ranks - 1) * in_chunk


def gloo_stages(
    cluster: Any, gloo: Gloo, algorithm: str, num_bytes: float, wire: NodeWire | None
) -> tuple[StageCost, ...]:
    """Return the cost of each stage of a chunk's all-reduce over Gloo.

    `cluster` is a `ClusterCosts`, whose module imports this one. See `ClusterCosts.stages`.
    """
    nodes = cluster.num_nodes
    k = cluster.ranks_per_node
    size = num_bytes
    across_bytes = size
    if wire is not None:
        across_bytes = wire.num_bytes(size)
    codec_s = None
    if bits_of(wire) is not None:
        codec_s = cluster.codec_s(algorithm, size, wire)
    if algorithm.startswith("nccl"):
        raise ValueError(
            f"`algorithm` (={algorithm!r}) must be a Gloo algorithm. Set flat, or use an `Nccl` transport."
        )
    if codec_s is None and (
        algorithm in ("flat", "gloo_ring") or (algorithm == "parallel_flat" and k > 1)
    ):
        return (_flat_ring(cluster, gloo, across_bytes, is_ours=algorithm != "gloo_ring"),)
    if algorithm in ("flat", "parallel_flat"):
        name = "all_reduce"
        if algorithm == "parallel_flat":
            name = "parallel_all_reduce"
        return (_across(cluster, gloo, name, across_bytes, num_groups=1, codec_s=codec_s),)
    # In a reduce-scatter every rank sends and receives k - 1 shards. In a reduce the leader handles k - 1 messages.
    if algorithm == "two_level":
        before = _inside(
            cluster,
            gloo,
            "scatter_reduce",
            ends=2 * (k - 1),
            all_ends=2 * k * (k - 1),
            share=1 / k,
            size=size,
        )
        between = _across(
            cluster, gloo, "shard_all_reduce", across_bytes / k, num_groups=k, codec_s=codec_s
        )
        after = replace(before, name="gather")
    else:
        before = _inside(
            cluster, gloo, "reduce", ends=k - 1, all_ends=2 * (k - 1), share=1, size=size
        )
        between = _across(cluster, gloo, "ring", across_bytes, num_groups=1, codec_s=codec_s)
        after = replace(before, name="broadcast")
    stages = list[StageCost]()
    if k > 1:
        stages.append(before)
    if nodes > 1:
        stages.append(between)
    if k > 1:
        stages.append(after)
    return tuple(stages)


def _inside(
    cluster: Any, gloo: Gloo, name: str, *, ends: int, all_ends: int, share: float, size: float
) -> StageCost:
    # The busiest rank sends or receives `ends` messages, each with the fraction `share` of the bytes. Handshake and
    # data take two latencies.
    ranks = cluster.ranks_per_node
    nodes = cluster.num_nodes
    delay_s = 2 * cluster.inside.latency_s
    delay_s += gloo.work_s(gloo.stage_s, of_busiest=1, of_all=cluster.world_size)
    delay_s += gloo.work_s(gloo.message_s, of_busiest=ends, of_all=nodes * all_ends)
    moved = (ranks - 1) * share * size
    work_s = gloo.work_s(
        1 / cluster.inside.bytes_per_s, of_busiest=moved, of_all=nodes * (ranks - 1) * size
    )
    return StageCost(name=name, level="inside", delay_s=delay_s, work_s=work_s)


def _across(
    cluster: Any, gloo: Gloo, name: str, size: float, *, num_groups: int, codec_s: float | None
) -> StageCost:
    # `between_nodes_form` is the rule of the engine, so the cost is that of the form that a step would run. A codec
    # takes `codec_s` of a rank and has two of the three forms. The link is free while the rank encodes and decodes.
    nodes = cluster.num_nodes
    rate = cluster.node_bytes_per_s * gloo.wire_share
    delay_s = gloo.work_s(gloo.stage_s, of_busiest=1, of_all=num_groups * nodes)
    form = between_nodes_form(nodes, size)
    if codec_s is not None:
        form = "exchange" if nodes == 2 else "scatter_gather"
        delay_s = delay_s + codec_s
    if form == "ring":
        return _rings_across(cluster, gloo, name, size, num_groups=num_groups)
    if form == "exchange":
        rounds = 1
        sent = (nodes - 1) * size
        ends = 2 * (nodes - 1)
    else:
        rounds = 2
        sent = 2 * (nodes - 1) / nodes * size
        ends = 4 * (nodes - 1)
    round_s = cluster.across.latency_s + gloo.latency_s(cluster.across, size)
    delay_s += rounds * round_s
    all_ends = num_groups * nodes * ends
    delay_s += gloo.work_s(gloo.message_s, of_busiest=ends, of_all=all_ends)
    work_s = num_groups * sent / rate
    return StageCost(name=name, level="across", delay_s=delay_s, work_s=work_s)


def _rings_across(
    cluster: Any, gloo: Gloo, name: str, size: float, *, num_groups: int
) -> StageCost:
    # Each ring has its own threads. While one waits for a handshake or for processors, the others send.
    nodes = cluster.num_nodes
    link = replace(cluster.across, bytes_per_s=cluster.node_bytes_per_s)

    ends = 2 * segments_of_ring(size, nodes)
    all_ends = num_groups * nodes * ends
    ends_s = gloo.work_s(gloo.segment_s, of_busiest=ends, of_all=all_ends)
    ends_of_one_ring_s = ends_s / num_groups
    delay_s = gloo.work_s(gloo.stage_s, of_busiest=1, of_all=num_groups * nodes)
    delay_s += ends_of_one_ring_s

    sent = 2 * (nodes - 1) / nodes * size
    sent_s = sent / (link.bytes_per_s * gloo.wire_share)
    work_s = max(num_groups * sent_s, ends_s - ends_of_one_ring_s)
    wait_s = gloo.wait_of_ring_s(size, nodes, link)
    if not work_s:
        delay_s += wait_s
        return StageCost(name=name, level="across", delay_s=delay_s, work_s=0.0)

    one_ring_s = wait_s + sent_s / gloo.ring_share
    share = min(1.0, work_s / one_ring_s)
    return StageCost(name=name, level="across", delay_s=delay_s, work_s=work_s, share=share)


def _ring_stage(name: str, delay_s: float, wait_s: float, work_s: float, share: float) -> StageCost:
    # While a ring waits for handshakes its link is free for others, so the ring uses a smaller fraction of the link.
    if not work_s:
        return StageCost(name=name, level="across", delay_s=delay_s + wait_s, work_s=0.0)
    share = work_s / (wait_s + work_s / share)
    return StageCost(name=name, level="across", delay_s=delay_s, work_s=work_s, share=share)


def _flat_ring(cluster: Any, gloo: Gloo, size: float, *, is_ours: bool) -> StageCost:
    ranks = cluster.world_size
    nodes = cluster.num_nodes
    # Edges of the ring that leave a node: one, or one per rank if neighbors in the ring are on different nodes.
    edges = 0 if nodes == 1 else cluster.ranks_per_node if cluster.is_interleaved else 1
    ends = 2 * segments_of_ring(size, ranks)
    # Through our engine a ring costs one stage more than DistributedDataParallel's own call.
    delay_s = gloo.work_s(gloo.stage_s, of_busiest=1, of_all=ranks) if is_ours else 0.0
    work_s = gloo.work_s(gloo.segment_s, of_busiest=ends, of_all=ranks * ends)
    passed = 2 * (ranks - 1) / ranks * size
    moved_s = gloo.work_s(1 / cluster.inside.bytes_per_s, of_busiest=passed, of_all=ranks * passed)
    if nodes == 1:
        return StageCost(
            name="all_reduce", level="inside", delay_s=delay_s + work_s, work_s=moved_s
        )
    flow = replace(cluster.across, bytes_per_s=cluster.node_bytes_per_s / edges)
    # Processors work during the wait.
    wait_s = max(0.0, gloo.wait_of_ring_s(size, ranks, flow) - work_s)
    wire_s = edges * passed / (cluster.node_bytes_per_s * gloo.wire_share)
    share = min(1.0, edges * gloo.ring_share)
    return _ring_stage("all_reduce", delay_s + work_s, wait_s, max(wire_s, moved_s), share)
