"""Communication plans for codecs between nodes and for sharded updates, which both need sums within nodes."""

from __future__ import annotations

from dataclasses import replace

from lightning_hybrid.comm.plan import CommPlan, NodeShape


def plan_for_codec(plan: CommPlan, topology: NodeShape, *, bits: int, on_cuda: bool) -> CommPlan:
    """Return a plan in which the ranks of a node add up before their sum is rounded, based on `plan`.

    Raises:
        ValueError: The plan names an algorithm that would round the gradient of each rank.

    >>> from lightning_hybrid.comm.topology import Topology
    >>> topology = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=2)
    >>> plan_for_codec(CommPlan(), topology, bits=8, on_cuda=True).algorithm
    'two_level'
    """
    if topology.num_nodes == 1 or topology.ranks_per_node == 1:
        return plan
    if plan.algorithm == "auto" and on_cuda:
        # With `auto` on CUDA, NCCL chooses the hierarchy, and NCCL has no codec.
        has_equal_nodes = topology.ranks_per_node is not None
        if has_equal_nodes:
            return replace(plan, algorithm="two_level")
        return replace(plan, algorithm="hierarchical")
    if adds_up_in_nodes(plan, topology):
        return plan

    reason = "has no stage between nodes"
    if plan.algorithm == "two_level":
        reason = "needs nodes of equal size"
    raise ValueError(
        f"`algorithm` (={plan.algorithm!r}) {reason}, and `between_nodes.dtype` (='int{bits}') is for the sums that "
        "nodes send each other: the gradient of every rank would be rounded, and as often as a node has ranks it would "
        "send as many bytes. Leave `comm.algorithm` and such a `comm.plan` out, or write "
        "comm=Comm(algorithm='hierarchical')."
    )


def plan_for_owners(plan: CommPlan, *, is_flat: bool) -> CommPlan:
    """Return a plan that can skip the gather of gradients when the update is sharded over ranks.

    If `auto` means flat (`is_flat`), it averages all gradients on all ranks, and the gather of weights would be added
    to that. Such a plan becomes two-level.

    >>> plan_for_owners(CommPlan(), is_flat=True).algorithm, plan_for_owners(CommPlan(), is_flat=False).algorithm
    ('two_level', 'auto')
    """
    if is_flat and plan.algorithm == "auto":
        return replace(plan, algorithm="two_level")
    return plan


def adds_up_in_nodes(plan: CommPlan, topology: NodeShape) -> bool:
    """Return whether nodes exchange sums over their ranks, for every bucket.

    >>> from lightning_hybrid.comm.topology import Topology
    >>> two_by_two = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=2)
    >>> adds_up_in_nodes(CommPlan(algorithm="flat"), two_by_two)
    False
    >>> four_nodes = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=1)
    >>> adds_up_in_nodes(CommPlan(algorithm="flat"), four_nodes)
    True
    """
    if topology.ranks_per_node == 1 or topology.num_nodes == 1:
        return True
    if plan.algorithm in ("auto", "hierarchical"):
        return True
    return plan.algorithm == "two_level" and topology.ranks_per_node is not None
