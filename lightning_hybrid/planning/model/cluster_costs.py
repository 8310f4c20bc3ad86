"""Description of a cluster's links and transport, with the cost of each stage of an all-reduce.

A stage begins with a delay, during which it uses no shared resource. Its work follows, which is the
time in seconds that its bytes need inside a node or on its links, alone at full rate. One node with
the slowest links represents all nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from lightning_hybrid.checks import require_positive, require_whole
from lightning_hybrid.comm.codec.coded_plan import plan_for_codec
from lightning_hybrid.comm.plan import Algorithm, CommPlan
from lightning_hybrid.planning.model.cost import (
    Cost,
    Level,
    Link,
    NodeGroup,
    StageCost,
    curve_at,
    double_tree,
    halving_doubling,
    least_s,
    levels,
)
from lightning_hybrid.planning.model.cost_gloo import Gloo, gloo_stages
from lightning_hybrid.planning.model.cost_nccl import Nccl
from lightning_hybrid.planning.model.node_wire import CodecRates, NodeWire, bits_of

OURS: tuple[Algorithm, ...] = ("flat", "parallel_flat", "hierarchical", "two_level")
# Algorithms for comparison: NCCL's own choice, its ring and its tree, Gloo's ring as DistributedDataParallel calls it,
# and two textbook algorithms and the 2D torus, with the latencies of the links and no software costs.
PEERS = ("nccl", "nccl_ring", "nccl_tree", "gloo_ring", "halving_doubling", "double_tree", "torus")


@dataclass(frozen=True, kw_only=True)
class ClusterCosts:
    """Cluster of nodes with equal numbers of ranks, which calculates the cost of all-reduce stages.

    Args:
        num_nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        inside: Link between two ranks of a node. Over Gloo, its bandwidth is the rate at which a core copies or
            adds.
        across: Link of one network card.
        nics_per_node: Number of network cards that the ranks of a node use at the same time (rails).
        transport: Software that carries messages: `Nccl` or `Gloo`.
        is_interleaved: Whether consecutive ranks are on different nodes, so that every edge of a flat ring leaves its
            node.
        curves: Measured over modeled time, by algorithm and by bytes of an all-reduce (`recipes/tune.py`). 1 for other
            algorithms. `two_level_int8` is the curve with a codec, which defaults to that of `two_level`.
        measured_nodes: Number of nodes on which the curves were measured.
        codec: Throughput of a codec's rounding between nodes.
        groups: Nodes that differ from the rest of the cluster. Every all-reduce runs at the rate of the slowest link,
            and every step at the speed of the slowest ranks. They are ignored for a job on one node.
        ends: Factors on the time of stages between nodes for a bound of an interval, by the bytes from which they
            apply.

    Raises:
        ValueError: A count is below one.
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
    groups: Sequence[NodeGroup] = ()
    ends: Mapping[float, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, curve in self.curves.items():
            for num_bytes, ratio in curve.items():
                require_positive(
                    f"curves.{name}.{num_bytes}",
                    ratio,
                    "modeled times are multiplied by this ratio of measured to modeled time",
                )
        require_whole("num_nodes", self.num_nodes, "a cluster has at least one node")
        require_whole(
            "ranks_per_node",
            self.ranks_per_node,
            "a node has at least one rank, usually one per accelerator",
        )
        require_whole("nics_per_node", self.nics_per_node, "a node has at least one network card")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def slowdown(self) -> float:
        """Compute time of the slowest ranks relative to the other ranks."""
        return max([1.0, *(group.slowdown for group in self.groups if self.num_nodes > 1)])

    def at_slowest(self) -> Self:
        """Return a copy of the cluster in which all nodes have the slowest links of any node."""
        inside = self.inside
        across = self.across
        for group in self.groups if self.num_nodes > 1 else ():
            inside = inside.or_slower(group.inside)
            across = across.or_slower(group.across)
        return replace(self, groups=(), inside=inside, across=across)

    @property
    def node_bytes_per_s(self) -> float:
        """Bandwidth of a node to other nodes, in bytes/s."""
        return self.nics_per_node * self.across.bytes_per_s

    def least_s(self, num_bytes: float) -> float:
        """Return a lower bound for the time of an all-reduce, in seconds.

        See `cost.least_s`.
        """
        return least_s(
            num_bytes,
            num_nodes=self.num_nodes,
            across=self.across,
            nics_per_node=self.nics_per_node,
        )

    def of(self, num_nodes: int) -> Self:
        """Return a copy of the cluster with another number of nodes."""
        return replace(self, num_nodes=num_nodes)

    def stages(
        self,
        algorithm: str,
        num_bytes: float,
        wire: NodeWire | None = None,
        *,
        of_bytes: float | None = None,
    ) -> tuple[StageCost, ...]:
        """Return the cost of each stage of a chunk's all-reduce.

        The result is empty for a single rank.

        `wire` is the data type or codec between nodes. None: that of the chunk. `of_bytes` is the
        size of the whole all-reduce. None: the chunk is all of it.

        Raises:
            ValueError: The algorithm is unknown, this transport does not have it, or it does not support `wire`.
        """
        if algorithm not in (*OURS, *PEERS):
            raise ValueError(
                f"`algorithm` (={algorithm!r}) must be one of {', '.join((*OURS, *PEERS))}. Set one of them."
            )
        if self.world_size == 1:
            return ()
        if self.groups:
            return self.at_slowest().stages(algorithm, num_bytes, wire, of_bytes=of_bytes)
        if wire is not None and self.num_nodes > 1 and algorithm in PEERS:
            raise ValueError(
                f"`algorithm` (={algorithm!r}) must be one of {', '.join(OURS)} with `comm_dtype_across_nodes` "
                f"(={wire.name!r}), because other algorithms send gradients in the dtype of the buckets. Leave one of "
                "them out."
            )
        wire = wire if self.num_nodes > 1 else None
        curve = self.curves.get(algorithm, {})
        if (bits := bits_of(wire)) is not None:
            plan_for_codec(CommPlan(algorithm=algorithm), self, bits=bits, on_cuda=False)  # type: ignore[arg-type]
            curve = self.curves.get(f"{algorithm}_int{bits}", curve)
        if algorithm in ("halving_doubling", "double_tree", "torus"):
            stages: tuple[StageCost, ...] = (self._textbook(algorithm, num_bytes),)
        elif isinstance(self.transport, Gloo):
            stages = gloo_stages(self, self.transport, algorithm, num_bytes, wire)
        else:
            stages = _over_nccl(self, self.transport, algorithm, num_bytes, wire)
        factor = curve_at(curve, of_bytes or num_bytes)
        end = self.ends.get(
            max((n for n in self.ends if n <= (of_bytes or num_bytes)), default=0.0), 1.0
        )
        by = {"inside": factor, "across": factor * end}
        return tuple(
            replace(s, delay_s=by[s.level] * s.delay_s, work_s=by[s.level] * s.work_s)
            for s in stages
        )

    def codec_s(self, algorithm: str, num_bytes: float, wire: NodeWire | None) -> float:
        """Return the time that a codec adds to the inter-node stage of an all-reduce, in seconds.

        `num_bytes` is the size of the chunk. The time is 0 without a codec.
        """
        if wire is None:
            return 0.0
        num_groups = self.ranks_per_node if algorithm == "two_level" else 1
        alone_s = self.codec.seconds(wire, num_bytes / wire.itemsize / num_groups, self.num_nodes)
        if isinstance(self.transport, Nccl):
            return alone_s
        return self.transport.work_s(alone_s, of_busiest=1, of_all=num_groups * self.num_nodes)

    def alone_s(self, algorithm: str, num_bytes: float, wire: NodeWire | None = None) -> float:
        """Return the time in seconds of an all-reduce in one chunk while nothing else communicates."""
        return sum(stage.alone_s for stage in self.stages(algorithm, num_bytes, wire))

    def _textbook(self, algorithm: str, num_bytes: float) -> StageCost:
        # A rail is the bandwidth of a node's network cards divided by its ranks.
        rail = replace(self.across, bytes_per_s=self.node_bytes_per_s / self.ranks_per_node)
        if algorithm == "torus":
            cost = levels(num_bytes, [(self.ranks_per_node, self.inside), (self.num_nodes, rail)])
        elif self.num_nodes == 1:
            cost = (halving_doubling if algorithm == "halving_doubling" else double_tree)(
                num_bytes, self.ranks_per_node, self.inside
            )
        elif algorithm == "halving_doubling":
            # In the rounds between nodes, all ranks of a node use its links at once, each with its shard of the bytes.
            near = halving_doubling(num_bytes, self.ranks_per_node, self.inside)
            cost = near + halving_doubling(num_bytes / self.ranks_per_node, self.num_nodes, rail)
        else:
            near = Cost(latency_s=2 * (self.ranks_per_node - 1) * self.inside.latency_s)
            # Inside a node the tree is a chain through all ranks, as in NCCL.
            whole = replace(self.across, bytes_per_s=self.node_bytes_per_s)
            cost = near + double_tree(num_bytes, self.num_nodes, whole)
        level: Level = "inside" if self.num_nodes == 1 else "across"
        return StageCost(
            name=algorithm, level=level, delay_s=cost.latency_s, work_s=cost.transfer_s
        )


def _over_nccl(
    cluster: ClusterCosts, nccl: Nccl, algorithm: str, num_bytes: float, wire: NodeWire | None
) -> tuple[StageCost, ...]:
    nodes = cluster.num_nodes
    k = cluster.ranks_per_node
    level: Level = "inside" if nodes == 1 else "across"
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
        return (_stage("all_reduce", level, cost),)
    if algorithm == "gloo_ring":
        raise ValueError(
            "`algorithm` (='gloo_ring') must be an NCCL algorithm. Set nccl_ring, or use a `Gloo` transport."
        )
    # With two_level each rank reduces its shard between nodes on its own rail. With hierarchical a leader reduces all
    # bytes on one card.
    is_sharded = algorithm == "two_level"
    before = after = nccl.reduce(num_bytes, k, cluster.inside, is_sharded=is_sharded)
    rate, size = (
        (cluster.nics_per_node * card / k, across_bytes / k) if is_sharded else (card, across_bytes)
    )
    rail = replace(cluster.across, bytes_per_s=rate)
    if codec_s is not None:
        between = nccl.coded_sum(size, nodes, rail) + Cost(latency_s=codec_s)
    else:
        between = nccl.all_reduce(
            size, num_nodes=nodes, ranks_per_node=1, inside=cluster.inside, across=rail
        )
    names = (
        ("scatter_reduce", "shard_all_reduce", "gather")
        if is_sharded
        else ("reduce", "ring", "broadcast")
    )
    # With one rank per node, or one node, some stages take no time.
    stages = [
        _stage(names[0], "inside", before),
        _stage(names[1], "across", between),
        _stage(names[2], "inside", after),
    ]
    return tuple(stage for stage in stages if stage.alone_s > 0)


def _stage(name: str, level: Level, cost: Cost) -> StageCost:
    return StageCost(name=name, level=level, delay_s=cost.latency_s, work_s=cost.transfer_s)
