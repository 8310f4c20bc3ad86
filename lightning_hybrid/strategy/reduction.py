"""What `Adasum` asks of the plan, of the nodes and of the optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.adasum.combine import refuse_odd_nodes
from lightning_hybrid.comm.plan import MAX_BYTES


def adasum_plan(plan: CommPlan, topology: Topology) -> CommPlan | None:
    """Return the plan that carries Adasum: node leaders combine uncut buckets; None, with a warning, on one node.

    Raises:
        ValueError: the nodes do not fit.

    >>> topology = Topology.from_ranks_per_node(rank=0, world_size=8, ranks_per_node=2)
    >>> found = adasum_plan(CommPlan(), topology)
    >>> found.bucket(index=0, numel=2**25, dtype="float16", num_bytes=2**26, topology=topology).describe()
    'bucket 0: 33554432 x float16 = 64 MiB, hierarchical'
    """
    refuse_odd_nodes(topology)
    if topology.num_nodes == 1:
        rank_zero_warn(
            "`between_nodes` (=Adasum()) combines the means of several nodes, and all ranks share one node: it is the "
            "mean of all ranks here. Leave `strategy.between_nodes` out, or say by `strategy.ranks_per_node` what a "
            "node is."
        )
        return None
    # Inner products are of whole parameters: no chunk may cut one.
    return replace(plan, algorithm="hierarchical", chunk_bytes=MAX_BYTES)


def warn_of_trust_ratios(optimizers: Iterable[Optimizer]) -> None:
    """Warn of optimizers that divide by the size of a gradient: of Adasum they keep the direction alone."""
    for optimizer in optimizers:
        # Groups may say `trust_ratio` to an optimizer that has none: those of `optim.param_groups` do.
        if "trust_ratio" in optimizer.defaults and any(group["trust_ratio"] for group in optimizer.param_groups):
            name = type(optimizer).__name__
            rank_zero_warn(
                f"`between_nodes` (=Adasum()) with {name}: its trust ratio divides by the size of each parameter's "
                "update, so that of Adasum, which is what tells gradients that agree from orthogonal ones, is lost and "
                f"only the direction is left. Use strategy/between_nodes=mean with {name}, or SGD or Adam with Adasum."
            )
