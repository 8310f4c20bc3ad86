"""Cluster description that chooses communication plans, with the uncertainty of its predictions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.comm.plan import MIB, CommPlan, NodeShape
from lightning_hybrid.planning.model.cluster_costs import ClusterCosts
from lightning_hybrid.planning.model.cost_nccl import Nccl
from lightning_hybrid.planning.model.node_wire import NodeWire
from lightning_hybrid.planning.model.plan_search import choose_plan

# Uncertainty of predicted all-reduces between nodes: 80 % of measured times lie between these multiples of the
# prediction. The multiples are listed by fabric and bytes, as computed by `tests.evidence.planner.between_nodes`.
# They are the 10 and 90 % quantiles of measured over predicted time with equal weight for each source, widened by
# half in the logarithm. Widening grew in steps of a quarter until the intervals of one half of the sources held 70 %
# of a source left out. They hold 92 % of the other half. InfiniBand, RoCE and EFA are one class. All measurements are
# of A100 and H100 with NVLink, on nodes of up to 8 GPUs.
FROM_BYTES = (0, MIB, 64 * MIB + 1)
WIDENED = 1.5
VERBS = ((0.58, 2.0), (0.75, 2.17), (0.76, 1.2))
ERRORS = {
    **dict.fromkeys(("ib", "roce", "efa"), VERBS),
    "slingshot": ((1.06, 6.45), (0.85, 8.67), (0.87, 2.06)),
    "tcp": ((0.84, 2.24), (0.51, 2.18), (0.72, 2.1)),
}
# The same for clusters measured on 4 nodes or more, up to `HOLDS_TO` times as many nodes, as computed by
# `tests.evidence.planner.from_few_nodes`. Beyond that, the intervals widen in the logarithm by a quarter with each
# doubling (fitted to Alps).
MEASURED_VERBS = ((0.73, 1.28), (0.73, 1.28), (0.8, 1.16))
MEASURED = ((0.9, 1.99), (0.5, 2.66), (0.87, 1.85))
MEASURED_FROM = 4
HOLDS_TO = 8
WIDER_BY_DOUBLING = 0.25
# Over Gloo, with costs fitted to all-reduces: the quantiles of 70 steps of `tests.evidence.planner.emulated`, widened
# by as much.
EMULATED = ((0.85, 1.07),) * 3


@dataclass(frozen=True, kw_only=True)
class Cluster(ClusterCosts):
    """Cluster description that also serves as the strategy's planner.

    Pass it as `comm=Comm(plan=cluster)`.
    """

    def plan_for(
        self,
        numels: Sequence[int],
        topology: NodeShape,
        *,
        itemsize: int,
        on_cuda: bool,
        codec_bits: int | None = None,
    ) -> CommPlan:
        """Choose a communication plan for a job by simulation, or keep the default on unmeasured links.

        `codec_bits` is 8 for `between_nodes.dtype="int8"`, 4 for `"int4"` and None without a codec.
        On CUDA with several nodes, the result is the default plan, with a warning, unless
        `is_known` is true of the links.

        Raises:
            ValueError: The nodes of the job have another number of ranks than the nodes of the description.
        """
        if topology.ranks_per_node != self.ranks_per_node:
            raise ValueError(
                f"`plan` (=a cluster with {self.ranks_per_node} ranks per node) cannot be used for this job, "
                f"whose nodes have {topology.ranks_per_node or 'unequal numbers of'} ranks. Run `lightning-hybrid "
                "tune` to describe these nodes, or leave `comm.plan` out."
            )
        if on_cuda and topology.num_nodes > 1 and not is_known(self.of(topology.num_nodes)):
            if getattr(topology, "rank", 0) == 0:
                warnings.warn(
                    "`plan` (=a cluster with unmeasured links) is ignored, and the default plan is used, because "
                    "plans chosen for unmeasured links can be slower than the default. Measure 4 nodes with "
                    "`lightning-hybrid tune`.",
                    stacklevel=2,
                )
            return CommPlan()
        wire = (
            None
            if codec_bits is None
            else NodeWire(name="int8" if codec_bits == 8 else "int4", itemsize=itemsize)
        )
        return choose_plan(
            numels, self.of(topology.num_nodes), itemsize=itemsize, on_cuda=on_cuda, wire=wire
        )


def is_known(cluster: Cluster) -> bool:
    """Return whether, on the cluster's links, plans chosen by the model are known to beat the default.

    This is the case on one node, over Gloo, on clusters measured on `MEASURED_FROM` nodes or more, and over
    InfiniBand, RoCE and EFA according to published measurements.
    """
    errors = _errors(cluster)
    return cluster.num_nodes == 1 or (
        errors is not None and errors not in (ERRORS["slingshot"], ERRORS["tcp"])
    )


def bounds(cluster: Cluster) -> tuple[Cluster, Cluster] | None:
    """Return cluster descriptions that give the lower and upper bounds of all-reduce times, or None if unknown.

    80 % of measured times lie between the bounds. One node has no all-reduce between nodes, so both
    bounds are the cluster itself.
    """
    if cluster.num_nodes == 1:
        return cluster, cluster
    if (errors := _errors(cluster)) is None:
        return None
    further = max(0.0, math.log2(times_measured(cluster) / HOLDS_TO)) * WIDER_BY_DOUBLING
    low, high = zip(
        *((low ** (1 + further), high ** (1 + further)) for low, high in errors), strict=True
    )
    return _with(cluster, low), _with(cluster, high)


def times_measured(cluster: Cluster) -> float:
    """Return the ratio of all nodes to measured nodes, or 1 if no nodes were measured."""
    return cluster.num_nodes / (cluster.measured_nodes or cluster.num_nodes)


def _errors(cluster: Cluster) -> Sequence[tuple[float, float]] | None:
    nccl = cluster.transport
    if not isinstance(nccl, Nccl):
        return EMULATED
    if (cluster.measured_nodes or 0) >= MEASURED_FROM:
        return MEASURED_VERBS if nccl.fabric in ("ib", "roce", "efa") else MEASURED
    if (
        cluster.ranks_per_node > 8
        or nccl.inside != "nvlink"
        or nccl.generation not in ("ampere", "hopper")
    ):
        return None
    return None if nccl.fabric is None else ERRORS.get(nccl.fabric)


def _with(cluster: Cluster, factors: Sequence[float]) -> Cluster:
    return replace(cluster, ends=dict(zip(FROM_BYTES, factors, strict=True)))
