"""A cluster as communication sees it, and the stages of each algorithm on it.

A stage is first a delay, in which it uses nothing that others might want, and then work: the seconds that its bytes
take of a node's inside or of its links, alone at full rate. All nodes are equal: one node stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np

from lightning_hybrid.checks import require_positive, require_whole
from lightning_hybrid.comm.bucket_layout import between_nodes_form
from lightning_hybrid.comm.codec.coded_plan import plan_for_codec
from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.planning.cost import Cost, Link, double_tree, halving_doubling, least_s, levels
from lightning_hybrid.planning.cost_gloo import Gloo, segments_of_ring
from lightning_hybrid.planning.cost_nccl import Nccl
from lightning_hybrid.planning.node_wire import CodecRates, NodeWire, bits_of

Place = Literal["inside", "across"]

OURS = ("flat", "parallel_flat", "hierarchical", "two_level")
# Algorithms of others: NCCL's own choice, its ring, its tree; Gloo's ring as DistributedDataParallel calls it; two
# textbook forms and the 2D torus, with the links' latencies and no software.
PEERS = ("nccl", "nccl_ring", "nccl_tree", "gloo_ring", "halving_doubling", "double_tree", "torus")


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage of one chunk. `share` is the part of the place's rate that it can fill by itself.

    >>> StageCost(name="ring", place="across", delay_s=1.0, work_s=3.0, share=0.5).alone_s
    7.0
    """

    name: str
    place: Place
    delay_s: float
    work_s: float
    share: float = 1.0

    @property
    def alone_s(self) -> float:
        """Seconds with no other stage at the same place."""
        return self.delay_s + self.work_s / self.share


@dataclass(frozen=True, kw_only=True)
class ClusterCosts:
    """Equal nodes with equal ranks, and what stages take on them.

    Args:
        num_nodes: Number of nodes.
        ranks_per_node: Ranks on each node.
        inside: The link from a rank to others of its node; over Gloo its rate is what a core copies or adds.
        across: The link of one network card.
        nics_per_node: Network cards that the ranks of a node use at the same time (rails).
        transport: The software that carries messages: `Nccl` or `Gloo`.
        is_interleaved: Consecutive ranks are on different nodes, so that every edge of a flat ring leaves its node.
        curves: Measured over modelled time, by algorithm and by the bytes of a sum (`recipes/tune.py`); 1 for others.
            `two_level_int8` is that of sums through a codec; without it, that of `two_level`.
        measured_nodes: How many nodes were measured.
        codec: What rounding takes where sums between nodes go through a codec.
        ends: Of an interval: actual over modelled time of stages between nodes, by the bytes from which on it holds.

    Raises:
        ValueError: A count is below one.

    >>> link = Link(latency_s=1e-6, bytes_per_s=1e9)
    >>> gloo = Gloo(stage_s=0, message_s=0, segment_s=0)
    >>> ClusterCosts(num_nodes=2, ranks_per_node=4, inside=link, across=link, transport=gloo).world_size
    8
    """

    num_nodes: int
    ranks_per_node: int
    inside: Link
    across: Link
    transport: Gloo | Nccl
    nics_per_node: int = 1
    is_interleaved: bool = False
    curves: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    measured_nodes: int | None = None
    codec: CodecRates = field(default_factory=CodecRates)
    ends: Mapping[float, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, curve in self.curves.items():
            for num_bytes, ratio in curve.items():
                require_positive(f"curves.{name}.{num_bytes}", ratio, "it is measured over modelled time of such a sum")
        require_whole("num_nodes", self.num_nodes, "nodes are counted")
        require_whole("ranks_per_node", self.ranks_per_node, "ranks of a node are counted, one per accelerator")
        require_whole("nics_per_node", self.nics_per_node, "network cards of a node are counted")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def node_bytes_per_s(self) -> float:
        """Bytes per second that a node can send to others."""
        return self.nics_per_node * self.across.bytes_per_s

    def least_s(self, num_bytes: float) -> float:
        """Compute the time that no all-reduce can beat; see `cost.least_s`."""
        return least_s(num_bytes, num_nodes=self.num_nodes, across=self.across, nics_per_node=self.nics_per_node)

    def of(self, num_nodes: int) -> Self:
        """Return the same cluster with another number of nodes."""
        return replace(self, num_nodes=num_nodes)

    def stages(
        self, algorithm: str, num_bytes: float, wire: NodeWire | None = None, *, of_bytes: float | None = None
    ) -> tuple[StageCost, ...]:
        """Return the stages of a chunk of `num_bytes`; none for one rank.

        `wire`: the form of sums between nodes; None: that of the chunk. `of_bytes`: of the whole sum; None: it is all.

        Raises:
            ValueError: The algorithm is unknown, this transport does not have it, or it has no such form.
        """
        if algorithm not in (*OURS, *PEERS):
            raise ValueError(f"`algorithm` (={algorithm!r}) must be one of {', '.join((*OURS, *PEERS))}.")
        if self.world_size == 1:
            return ()
        if wire is not None and self.num_nodes > 1 and algorithm in PEERS:
            raise ValueError(
                f"`algorithm` (={algorithm!r}) must be one of {', '.join(OURS)} with `comm_dtype_across_nodes` "
                f"(={wire.name!r}): others send what the buckets hold. Leave one of them out."
            )
        wire = wire if self.num_nodes > 1 else None
        curve = self.curves.get(algorithm, {})
        if (bits := bits_of(wire)) is not None:
            plan_for_codec(CommPlan(algorithm=algorithm), self, bits=bits, on_cuda=False)  # type: ignore[arg-type]
            curve = self.curves.get(f"{algorithm}_int{bits}", curve)
        if algorithm in ("halving_doubling", "double_tree", "torus"):
            stages: tuple[StageCost, ...] = (self._textbook(algorithm, num_bytes),)
        elif isinstance(self.transport, Gloo):
            stages = _over_gloo(self, self.transport, algorithm, num_bytes, wire)
        else:
            stages = _over_nccl(self, self.transport, algorithm, num_bytes, wire)
        factor = curve_at(curve, of_bytes or num_bytes)
        end = self.ends.get(max((n for n in self.ends if n <= (of_bytes or num_bytes)), default=0.0), 1.0)
        by = {"inside": factor, "across": factor * end}
        return tuple(replace(s, delay_s=by[s.place] * s.delay_s, work_s=by[s.place] * s.work_s) for s in stages)

    def codec_s(self, algorithm: str, num_bytes: float, wire: NodeWire | None) -> float:
        """Compute what rounding adds to the stage between nodes, of a chunk of `num_bytes`; 0 without a codec."""
        if wire is None:
            return 0.0
        num_groups = self.ranks_per_node if algorithm == "two_level" else 1
        alone_s = self.codec.seconds(wire, num_bytes / wire.itemsize / num_groups, self.num_nodes)
        if isinstance(self.transport, Nccl):
            return alone_s
        return self.transport.work_s(alone_s, of_busiest=1, of_all=num_groups * self.num_nodes)

    def alone_s(self, algorithm: str, num_bytes: float, wire: NodeWire | None = None) -> float:
        """Compute the time of one all-reduce in one chunk, with nothing else at the same time."""
        return sum(stage.alone_s for stage in self.stages(algorithm, num_bytes, wire))

    def _textbook(self, algorithm: str, num_bytes: float) -> StageCost:
        # A rail: a rank's share of its node's network cards.
        rail = replace(self.across, bytes_per_s=self.node_bytes_per_s / self.ranks_per_node)
        if algorithm == "torus":
            cost = levels(num_bytes, [(self.ranks_per_node, self.inside), (self.num_nodes, rail)])
        elif self.num_nodes == 1:
            cost = (halving_doubling if algorithm == "halving_doubling" else double_tree)(
                num_bytes, self.ranks_per_node, self.inside
            )
        elif algorithm == "halving_doubling":
            # In the far rounds all ranks of a node use its links at once, each with its part of the bytes.
            near = halving_doubling(num_bytes, self.ranks_per_node, self.inside)
            cost = near + halving_doubling(num_bytes / self.ranks_per_node, self.num_nodes, rail)
        else:
            near = Cost(latency_s=2 * (self.ranks_per_node - 1) * self.inside.latency_s)
            # Inside a node the tree is a chain through all ranks, as NCCL's.
            whole = replace(self.across, bytes_per_s=self.node_bytes_per_s)
            cost = near + double_tree(num_bytes, self.num_nodes, whole)
        place: Place = "inside" if self.num_nodes == 1 else "across"
        return StageCost(name=algorithm, place=place, delay_s=cost.latency_s, work_s=cost.transfer_s)


def curve_at(curve: Mapping[float, float], num_bytes: float) -> float:
    """Interpolate a curve in the logarithms of both; it is level beyond its ends, and 1 where it has no points.

    >>> curve_at({1: 1.0, 4: 4.0}, 2), curve_at({1: 1.0, 4: 4.0}, 9), curve_at({}, 2)
    (2.0, 4.0, 1.0)
    """
    if not curve:
        return 1.0
    sizes = sorted(curve)
    return float(2 ** np.interp(math.log2(max(1.0, num_bytes)), np.log2(sizes), np.log2([curve[n] for n in sizes])))


def _over_nccl(
    cluster: ClusterCosts, nccl: Nccl, algorithm: str, num_bytes: float, wire: NodeWire | None
) -> tuple[StageCost, ...]:
    nodes, k = cluster.num_nodes, cluster.ranks_per_node
    place: Place = "inside" if nodes == 1 else "across"
    across_bytes = num_bytes if wire is None else wire.num_bytes(num_bytes)
    codec_s = None if bits_of(wire) is None else cluster.codec_s(algorithm, num_bytes, wire)
    card = nccl.payload_bytes_per_s(cluster.across.bytes_per_s)
    if algorithm in ("flat", "parallel_flat", "nccl", "nccl_ring", "nccl_tree") and codec_s is None:
        cost = nccl.all_reduce(
            across_bytes,
            num_nodes=nodes,
            ranks_per_node=k,
            inside=cluster.inside,
            across=replace(cluster.across, bytes_per_s=cluster.nics_per_node * card),
            num_nics=cluster.nics_per_node,
            algorithm={"nccl_ring": "ring", "nccl_tree": "tree"}.get(algorithm),  # type: ignore[arg-type]
        )
        return (_stage("all_reduce", place, cost),)
    if algorithm == "gloo_ring":
        raise ValueError("`algorithm` (='gloo_ring') must be one that NCCL has: set nccl_ring, or a `Gloo` transport.")
    # two_level: each rank sums its part between nodes, on its own rail; hierarchical: a leader sums all, on one card.
    is_sharded = algorithm == "two_level"
    if is_sharded:
        before = after = nccl.scatter_reduce(num_bytes, k, cluster.inside)
        rate, size = cluster.nics_per_node * card / k, across_bytes / k
    else:
        before = after = nccl.reduce(num_bytes, k, cluster.inside)
        rate, size = card, across_bytes
    rail = replace(cluster.across, bytes_per_s=rate)
    if codec_s is not None:
        between = nccl.coded_sum(size, nodes, rail) + Cost(latency_s=codec_s)
    else:
        between = nccl.all_reduce(size, num_nodes=nodes, ranks_per_node=1, inside=cluster.inside, across=rail)
    names = ("scatter_reduce", "shard_all_reduce", "gather") if is_sharded else ("reduce", "ring", "broadcast")
    # One rank per node, or one node, leaves out a stage.
    found = [_stage(names[0], "inside", before), _stage(names[1], "across", between), _stage(names[2], "inside", after)]
    return tuple(stage for stage in found if stage.alone_s > 0)


def _stage(name: str, place: Place, cost: Cost) -> StageCost:
    return StageCost(name=name, place=place, delay_s=cost.latency_s, work_s=cost.transfer_s)


def _over_gloo(
    cluster: ClusterCosts, gloo: Gloo, algorithm: str, num_bytes: float, wire: NodeWire | None
) -> tuple[StageCost, ...]:
    nodes, k, size = cluster.num_nodes, cluster.ranks_per_node, num_bytes
    across_bytes = size if wire is None else wire.num_bytes(size)
    codec_s = None if bits_of(wire) is None else cluster.codec_s(algorithm, size, wire)
    if algorithm.startswith("nccl"):
        raise ValueError(f"`algorithm` (={algorithm!r}) must be one that Gloo has: set flat, or an `Nccl` transport.")
    if codec_s is None and (algorithm in ("flat", "gloo_ring") or (algorithm == "parallel_flat" and k > 1)):
        return (_flat_ring(cluster, gloo, across_bytes, is_ours=algorithm != "gloo_ring"),)
    if algorithm in ("flat", "parallel_flat"):
        name = "all_reduce" if algorithm == "flat" else "parallel_all_reduce"
        return (_across(cluster, gloo, name, across_bytes, num_groups=1, codec_s=codec_s),)
    # In a scatter-reduce every rank sends and receives k - 1 parts; in a reduce the leader alone has k - 1 messages.
    if algorithm == "two_level":
        before = _inside(
            cluster, gloo, "scatter_reduce", ends=2 * (k - 1), all_ends=2 * k * (k - 1), share=1 / k, size=size
        )
        between = _across(cluster, gloo, "shard_all_reduce", across_bytes / k, num_groups=k, codec_s=codec_s)
        after = replace(before, name="gather")
    else:
        before = _inside(cluster, gloo, "reduce", ends=k - 1, all_ends=2 * (k - 1), share=1, size=size)
        between = _across(cluster, gloo, "ring", across_bytes, num_groups=1, codec_s=codec_s)
        after = replace(before, name="broadcast")
    found = ([before] if k > 1 else []) + ([between] if nodes > 1 else []) + ([after] if k > 1 else [])
    return tuple(found)


def _inside(
    cluster: ClusterCosts, gloo: Gloo, name: str, *, ends: int, all_ends: int, share: float, size: float
) -> StageCost:
    # The busiest rank has `ends` ends of messages, with `share` of the bytes each; consent and data are two latencies.
    ranks, nodes = cluster.ranks_per_node, cluster.num_nodes
    delay_s = 2 * cluster.inside.latency_s
    delay_s += gloo.work_s(gloo.stage_s, of_busiest=1, of_all=cluster.world_size)
    delay_s += gloo.work_s(gloo.message_s, of_busiest=ends, of_all=nodes * all_ends)
    moved = (ranks - 1) * share * size
    work_s = gloo.work_s(1 / cluster.inside.bytes_per_s, of_busiest=moved, of_all=nodes * (ranks - 1) * size)
    return StageCost(name=name, place="inside", delay_s=delay_s, work_s=work_s)


def _across(
    cluster: ClusterCosts, gloo: Gloo, name: str, size: float, *, num_groups: int, codec_s: float | None
) -> StageCost:
    # `between_nodes_form` is the rule of the engine itself: the same form is counted that a step would run. A codec,
    # which takes `codec_s` of a rank, has two of the three; the link is free while it encodes and decodes.
    nodes = cluster.num_nodes
    rate = cluster.node_bytes_per_s * gloo.wire_share
    delay_s = gloo.work_s(gloo.stage_s, of_busiest=1, of_all=num_groups * nodes)
    wait_s = 0.0
    form = between_nodes_form(nodes, size)
    if codec_s is not None:
        form, delay_s = "exchange" if nodes == 2 else "scatter_gather", delay_s + codec_s
    if form == "exchange":
        rounds, sent, ends, end_s, share = 1, (nodes - 1) * size, 2 * (nodes - 1), gloo.message_s, 1.0
    elif form == "scatter_gather":
        rounds, sent, ends, end_s, share = 2, 2 * (nodes - 1) / nodes * size, 4 * (nodes - 1), gloo.message_s, 1.0
    else:
        rounds, sent, ends, end_s = 0, 2 * (nodes - 1) / nodes * size, 2 * segments_of_ring(size, nodes), gloo.segment_s
        share = min(1.0, num_groups * gloo.ring_share)
        flow = replace(cluster.across, bytes_per_s=cluster.node_bytes_per_s / num_groups)  # next to the other rings
        wait_s = gloo.wait_of_ring_s(size, nodes, flow)
    if rounds:
        delay_s += rounds * (cluster.across.latency_s + gloo.latency_s(cluster.across, size))
    delay_s += gloo.work_s(end_s, of_busiest=ends, of_all=num_groups * nodes * ends)
    return _ring_stage(name, delay_s, wait_s, num_groups * sent / rate, share)


def _ring_stage(name: str, delay_s: float, wait_s: float, work_s: float, share: float) -> StageCost:
    # While a ring waits for consents its link is free for others: the wait becomes a smaller share of the link.
    if not work_s:
        return StageCost(name=name, place="across", delay_s=delay_s + wait_s, work_s=0.0)
    return StageCost(
        name=name, place="across", delay_s=delay_s, work_s=work_s, share=work_s / (wait_s + work_s / share)
    )


def _flat_ring(cluster: ClusterCosts, gloo: Gloo, size: float, *, is_ours: bool) -> StageCost:
    ranks, nodes = cluster.world_size, cluster.num_nodes
    # Edges of the ring that leave a node: one, or one per rank where neighbours in the ring are on different nodes.
    edges = 0 if nodes == 1 else cluster.ranks_per_node if cluster.is_interleaved else 1
    ends = 2 * segments_of_ring(size, ranks)
    # Through our engine a ring costs a stage more than DistributedDataParallel's own call.
    delay_s = gloo.work_s(gloo.stage_s, of_busiest=1, of_all=ranks) if is_ours else 0.0
    work_s = gloo.work_s(gloo.segment_s, of_busiest=ends, of_all=ranks * ends)
    passed = 2 * (ranks - 1) / ranks * size
    moved_s = gloo.work_s(1 / cluster.inside.bytes_per_s, of_busiest=passed, of_all=ranks * passed)
    if nodes == 1:
        return StageCost(name="all_reduce", place="inside", delay_s=delay_s + work_s, work_s=moved_s)
    flow = replace(cluster.across, bytes_per_s=cluster.node_bytes_per_s / edges)
    # Processors work during the wait.
    wait_s = max(0.0, gloo.wait_of_ring_s(size, ranks, flow) - work_s)
    wire_s = edges * passed / (cluster.node_bytes_per_s * gloo.wire_share)
    share = min(1.0, edges * gloo.ring_share)
    return _ring_stage("all_reduce", delay_s + work_s, wait_s, max(wire_s, moved_s), share)
