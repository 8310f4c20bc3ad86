"""A cluster that chooses plans: what users describe, and give to the strategy; and how sure its sums are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.comm.plan import MIB, CommPlan, NodeShape
from lightning_hybrid.planning.cluster_costs import ClusterCosts
from lightning_hybrid.planning.cost_nccl import Nccl
from lightning_hybrid.planning.node_wire import NodeWire
from lightning_hybrid.planning.plan_search import choose_plan

# How far predicted sums between nodes are off: 80 % of measured times lie within these times the predicted.
# By fabric and bytes, as `tests.evidence.planner.between_nodes` prints them: the 10 and 90 % quantiles of measured over
# predicted time, each source of equal weight, widened by a quarter (in the logarithm), as sources are few: of a source
# that was left out they hold 74 % of the rows. InfiniBand, RoCE and EFA are one class; all rows are of A100 and H100
# with NVLink, on nodes of up to 8. What is of no such class is not known.
HOLDS_TO = 8  # times the nodes that were measured: as far as their curve holds
FROM_BYTES = (0, MIB, 64 * MIB + 1)
WIDENED = 1.25
VERBS = ((0.64, 1.81), (0.82, 1.99), (0.79, 1.15))
ERRORS = {
    **dict.fromkeys(("ib", "roce", "efa"), VERBS),
    "slingshot": ((1.24, 5.55), (1.03, 7.14), (0.94, 1.92)),
    "tcp": ((0.91, 2.07), (0.58, 1.94), (0.79, 1.92)),
}


@dataclass(frozen=True, kw_only=True)
class Cluster(ClusterCosts):
    """`ClusterCosts` as a planner: `HybridAllReduceStrategy(plan=cluster)`."""

    def plan_for(
        self, numels: Sequence[int], topology: NodeShape, *, itemsize: int, on_cuda: bool, codec_bits: int | None = None
    ) -> CommPlan:
        """Choose the plan of a job: see `plan_search.choose_plan`.

        `codec_bits`: of `between_nodes.dtype="int8"` or `"int4"`.

        Raises:
            ValueError: nodes of the job have other numbers of ranks than those of the description.
        """
        if topology.ranks_per_node != self.ranks_per_node:
            raise ValueError(
                f"`plan` (=a cluster with {self.ranks_per_node} ranks per node) must be of nodes as this job's, which "
                f"have {topology.ranks_per_node or 'unequal numbers of'} ranks. Describe them by "
                "`lightning-hybrid tune`, or leave `strategy.comm.plan` out."
            )
        wire = None if codec_bits is None else NodeWire(name="int8" if codec_bits == 8 else "int4", itemsize=itemsize)
        return choose_plan(numels, self.of(topology.num_nodes), itemsize=itemsize, on_cuda=on_cuda, wire=wire)


def bounds(cluster: Cluster) -> tuple[Cluster, Cluster] | None:
    """Return the cluster with the shortest and the longest sums that are as likely; None: nothing is known.

    One node has no sums between nodes: twice itself.
    """
    if cluster.num_nodes == 1:
        return cluster, cluster
    nccl = cluster.transport
    if not isinstance(nccl, Nccl) or nccl.fabric not in ERRORS or cluster.ranks_per_node > 8:
        return None
    if nccl.inside != "nvlink" or nccl.generation not in ("ampere", "hopper"):
        return None
    low, high = zip(*ERRORS[nccl.fabric], strict=True)
    return _with(cluster, low), _with(cluster, high)


def _with(cluster: Cluster, factors: Sequence[float]) -> Cluster:
    return replace(cluster, ends=dict(zip(FROM_BYTES, factors, strict=True)))
