"""The plans of what needs sums within nodes: codecs between them, and a shared update."""

from __future__ import annotations

from dataclasses import replace

from lightning_hybrid.comm.plan import CommPlan, NodeShape


def plan_for_codec(plan: CommPlan, topology: NodeShape, *, bits: int, on_cuda: bool) -> CommPlan:
    """Return a plan in which the ranks of a node add up before their sum is rounded; `plan` itself where it is one.

    Raises:
        ValueError: the algorithm was asked for by name, and rounds the gradient of each rank.

    >>> from lightning_hybrid.comm.topology import Topology
    >>> topology = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=2)
    >>> plan_for_codec(CommPlan(), topology, bits=8, on_cuda=True).algorithm
    'two_level'
    """
    if topology.num_nodes == 1 or topology.ranks_per_node == 1:
        return plan
    has_shards = topology.ranks_per_node is not None
    if plan.algorithm == "auto":
        # On CUDA `auto` leaves the hierarchy to NCCL, which knows no codec.
        return (
            replace(plan, algorithm="two_level" if has_shards else "hierarchical")
            if on_cuda
            else plan
        )
    if adds_up_in_nodes(plan, topology):
        return plan
    what = (
        "needs nodes of equal size"
        if plan.algorithm == "two_level"
        else "has no stage between nodes"
    )
    raise ValueError(
        f"`algorithm` (={plan.algorithm!r}) {what}, and `between_nodes.dtype` (='int{bits}') is for the sums that "
        "nodes send each other: the gradient of every rank would be rounded, and as often as a node has ranks it would "
        "send as many bytes. Leave `comm.algorithm` and such a `comm.plan` out, or write "
        "comm=Comm(algorithm='hierarchical')."
    )


def plan_for_owners(plan: CommPlan, *, is_flat: bool) -> CommPlan:
    """Return a plan that can leave out the gather of gradients where ranks share the update.

    Where `auto` is flat (`is_flat`) it averages everything on all ranks: gathering the weights would come on top.

    >>> plan_for_owners(CommPlan(), is_flat=True).algorithm, plan_for_owners(CommPlan(), is_flat=False).algorithm
    ('two_level', 'auto')
    """
    return replace(plan, algorithm="two_level") if is_flat and plan.algorithm == "auto" else plan


def adds_up_in_nodes(plan: CommPlan, topology: NodeShape) -> bool:
    """Return whether what nodes send each other is a sum over each node, whichever bucket it is.

    >>> from lightning_hybrid.comm.topology import Topology
    >>> two, one = (Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=k) for k in (2, 1))
    >>> [adds_up_in_nodes(CommPlan(algorithm="flat"), topology) for topology in (two, one)]
    [False, True]
    """
    if (
        topology.ranks_per_node == 1
        or topology.num_nodes == 1
        or plan.algorithm in ("auto", "hierarchical")
    ):
        return True
    return plan.algorithm == "two_level" and topology.ranks_per_node is not None
