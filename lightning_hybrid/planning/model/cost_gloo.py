"""Seconds of messages over Gloo: its ring, and our direct messages.

Gloo asks for consent: a message leaves only when its receiver has said that it waits for it. The cost depends:

    direct (gloo_p2p.py)        receivers wait from the start, all messages are on their way at once:
                                consent and data, 2 latencies per round
    Gloo's ring                 every rank passes on 2 (P - 1) chunks in two or more segments; two segments may be
                                on their way, and an arrival gives the consent for the next. So a segment takes t,
                                its time on the wire, where that hides the consent, else latency + t / 2:

        segments * max(t, latency + t / 2)          = 4 (P - 1) latencies for few bytes
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from lightning_hybrid.checks import require_number, require_positive, require_share
from lightning_hybrid.comm.bucket_layout import between_nodes_form
from lightning_hybrid.planning.model.cost import Link, StageCost
from lightning_hybrid.planning.model.node_wire import NodeWire, bits_of

# Gloo cuts a chunk of its ring in two, and further where a segment would be larger than this (gloo/allreduce.cc).
SEGMENTS_OF_CHUNK = 2
MOST_SEGMENT_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Gloo:
    """The costs of Gloo and of our Python threads per rank, on hosts without accelerators.

    Args:
        stage_s: Processor time of one rank for one stage of an algorithm: waking its thread, finding the tensor.
        message_s: Processor time at either end of one of our messages.
        segment_s: Processor time at either end of one segment of Gloo's ring.
        ring_share: The part of a link that one ring fills; several rings at the same time fill it up.
        wire_share: The part of a link's rate that is payload; the rest are headers and acknowledgements.
        burst_bytes: Bytes that switches store before they pass them on: a message waits for its last burst twice.
        num_shared_cores: None, or the cores that all ranks of all nodes share, where one machine emulates them.
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
                "it is a cost of the host or the switch, 0 where there is none",
            )
        require_share("ring_share", self.ring_share, "it is how much of a link one ring fills")
        require_share("wire_share", self.wire_share, "it is how much of a link's rate is payload")
        if self.num_shared_cores is not None:
            require_positive(
                "num_shared_cores", self.num_shared_cores, "emulated ranks run on something"
            )

    def work_s(self, seconds: float, *, of_busiest: float, of_all: float) -> float:
        """Compute the time of work: `seconds` per unit, by units of the busiest rank and of all ranks together.

        >>> Gloo(stage_s=0, message_s=0, segment_s=0, num_shared_cores=2).work_s(1.0, of_busiest=3, of_all=10)
        5.0
        """
        # In an emulated cluster all ranks share few cores: the work of all of them over these cores is a lower limit.
        shared = 0.0 if self.num_shared_cores is None else of_all / self.num_shared_cores
        return seconds * max(of_busiest, shared)

    def latency_s(self, link: Link, num_bytes: float) -> float:
        """Compute the time of one message beyond its bytes on the wire."""
        # A switch stores a burst before it passes it on, so that a message waits for its last burst twice.
        return link.latency_s + min(num_bytes, self.burst_bytes) / link.bytes_per_s

    def wait_of_ring_s(self, num_bytes: float, num_ranks: int, link: Link) -> float:
        """Compute the time of a ring beyond its bytes at the link's rate: the consents that the wire does not hide.

        >>> gloo = Gloo(stage_s=0, message_s=0, segment_s=0)
        >>> gloo.wait_of_ring_s(0, 8, Link(latency_s=2e-3, bytes_per_s=1e8)) == 4 * 7 * 2e-3
        True
        """
        if num_ranks == 1:
            return 0.0
        num_segments = segments_of_ring(num_bytes, num_ranks)
        segment = 2 * (num_ranks - 1) / num_ranks * num_bytes / num_segments
        on_wire_s = segment / (link.bytes_per_s * self.wire_share)
        # segments * (max(t, latency + t / 2) - t): the wire's own time is counted elsewhere.
        return num_segments * max(0.0, self.latency_s(link, segment) - on_wire_s / 2)


def segments_of_ring(num_bytes: float, num_ranks: int) -> int:
    """Count the segments that each rank passes on in one all-reduce.

    >>> segments_of_ring(8 * 2**20, 4), segments_of_ring(64 * 2**20, 4)
    (12, 96)
    """
    in_chunk = max(SEGMENTS_OF_CHUNK, math.ceil(num_bytes / num_ranks / MOST_SEGMENT_BYTES))
    return 2 * (num_ranks - 1) * in_chunk


def gloo_stages(
    cluster: Any, gloo: Gloo, algorithm: str, num_bytes: float, wire: NodeWire | None
) -> tuple[StageCost, ...]:
    """Return the stages of a chunk over Gloo on a `ClusterCosts`, which imports this module. See its `stages`."""
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
            f"`algorithm` (={algorithm!r}) must be one that Gloo has: set flat, or an `Nccl` transport."
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
    # In a scatter-reduce every rank sends and receives k - 1 parts; in a reduce the leader alone has k - 1 messages.
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
    # The busiest rank has `ends` ends of messages, with `share` of the bytes each; consent and data are two latencies.
    ranks = cluster.ranks_per_node
    nodes = cluster.num_nodes
    delay_s = 2 * cluster.inside.latency_s
    delay_s += gloo.work_s(gloo.stage_s, of_busiest=1, of_all=cluster.world_size)
    delay_s += gloo.work_s(gloo.message_s, of_busiest=ends, of_all=nodes * all_ends)
    moved = (ranks - 1) * share * size
    work_s = gloo.work_s(
        1 / cluster.inside.bytes_per_s, of_busiest=moved, of_all=nodes * (ranks - 1) * size
    )
    return StageCost(name=name, place="inside", delay_s=delay_s, work_s=work_s)


def _across(
    cluster: Any, gloo: Gloo, name: str, size: float, *, num_groups: int, codec_s: float | None
) -> StageCost:
    # `between_nodes_form` is the rule of the engine itself: the same form is counted that a step would run. A codec,
    # which takes `codec_s` of a rank, has two of the three; the link is free while it encodes and decodes.
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
    return StageCost(name=name, place="across", delay_s=delay_s, work_s=work_s)


def _rings_across(
    cluster: Any, gloo: Gloo, name: str, size: float, *, num_groups: int
) -> StageCost:
    # Each ring has threads of its own: while one waits, for a consent or for processors, the others send.
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
        return StageCost(name=name, place="across", delay_s=delay_s, work_s=0.0)

    one_ring_s = wait_s + sent_s / gloo.ring_share
    share = min(1.0, work_s / one_ring_s)
    return StageCost(name=name, place="across", delay_s=delay_s, work_s=work_s, share=share)


def _ring_stage(name: str, delay_s: float, wait_s: float, work_s: float, share: float) -> StageCost:
    # While a ring waits for consents its link is free for others: the wait becomes a smaller share of the link.
    if not work_s:
        return StageCost(name=name, place="across", delay_s=delay_s + wait_s, work_s=0.0)
    share = work_s / (wait_s + work_s / share)
    return StageCost(name=name, place="across", delay_s=delay_s, work_s=work_s, share=share)


def _flat_ring(cluster: Any, gloo: Gloo, size: float, *, is_ours: bool) -> StageCost:
    ranks = cluster.world_size
    nodes = cluster.num_nodes
    # Edges of the ring that leave a node: one, or one per rank where neighbours in the ring are on different nodes.
    edges = 0 if nodes == 1 else cluster.ranks_per_node if cluster.is_interleaved else 1
    ends = 2 * segments_of_ring(size, ranks)
    # Through our engine a ring costs a stage more than DistributedDataParallel's own call.
    delay_s = gloo.work_s(gloo.stage_s, of_busiest=1, of_all=ranks) if is_ours else 0.0
    work_s = gloo.work_s(gloo.segment_s, of_busiest=ends, of_all=ranks * ends)
    passed = 2 * (ranks - 1) / ranks * size
    moved_s = gloo.work_s(1 / cluster.inside.bytes_per_s, of_busiest=passed, of_all=ranks * passed)
    if nodes == 1:
        return StageCost(
            name="all_reduce", place="inside", delay_s=delay_s + work_s, work_s=moved_s
        )
    flow = replace(cluster.across, bytes_per_s=cluster.node_bytes_per_s / edges)
    # Processors work during the wait.
    wait_s = max(0.0, gloo.wait_of_ring_s(size, ranks, flow) - work_s)
    wire_s = edges * passed / (cluster.node_bytes_per_s * gloo.wire_share)
    share = min(1.0, edges * gloo.ring_share)
    return _ring_stage("all_reduce", delay_s + work_s, wait_s, max(wire_s, moved_s), share)
