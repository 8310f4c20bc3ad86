"""A cluster that chooses plans: what users describe, and give to the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.comm.plan import CommPlan, NodeShape
from lightning_hybrid.planning.cluster_costs import ClusterCosts
from lightning_hybrid.planning.node_wire import NodeWire
from lightning_hybrid.planning.plan_search import choose_plan


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
