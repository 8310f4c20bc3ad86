"""Adjustment of communication plans for compressed reductions and for sharded updates."""

from __future__ import annotations

from dataclasses import replace

from lightning_hybrid.comm.plan import CommPlan, NodeShape


def plan_for_codec(plan: CommPlan, topology: NodeShape, *, bits: int, on_cuda: bool) -> CommPlan:
    """Return a plan in which gradients are summed within each node before a codec compresses them.

    Raises:
        ValueError: The plan uses an algorithm that would round the gradient of each rank.

    >>> from lightning_hybrid.comm.topology import Topology
    >>> topology = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=2)
    >>> plan_for_codec(CommPlan(), topology, bits=8, on_cuda=True).algorithm
    'two_level'
    """
    if topology.num_nodes == 1 or topology.ranks_per_node == 1:
        return plan
    if plan.algorithm == "auto" and on_cuda:
        # On CUDA, `auto` would leave the hierarchy to NCCL, which has no codec.
        has_equal_nodes = topology.ranks_per_node is not None
        if has_equal_nodes:
            return replace(plan, algorithm="two_level")
        return replace(plan, algorithm="hierarchical")
    if adds_up_in_nodes(plan, topology):
        return plan

    reason = "has no stage between nodes"
    if plan.algorithm == "two_level":
        reason = "requires the same number of ranks on every node"
    raise ValueError(
        f"`algorithm` (={plan.algorithm!r}) {reason}, so it cannot be combined with `between_nodes.dtype` "
        f"(='int{bits}'), which quantizes the per-node sums. Without per-node sums, every rank's gradient would be "
        "quantized, and a node would send one message per rank. Leave `comm.algorithm` and `comm.plan` out, or set "
        "comm=Comm(algorithm='hierarchical')."
    )


def plan_for_owners(plan: CommPlan, *, is_flat: bool) -> CommPlan:
    """Return a plan that can skip the all-gather of gradients when the optimizer update is sharded.

    If `auto` means `flat`, all ranks average all gradients, and the all-gather of weights would be an additional cost.
    Therefore `auto` is replaced with `two_level` in this case.

    Args:
        plan: Communication plan.
        is_flat: Whether `auto` means `flat`.

    >>> plan_for_owners(CommPlan(), is_flat=True).algorithm, plan_for_owners(CommPlan(), is_flat=False).algorithm
    ('two_level', 'auto')
    """
    if is_flat and plan.algorithm == "auto":
        return replace(plan, algorithm="two_level")
    return plan


def adds_up_in_nodes(plan: CommPlan, topology: NodeShape) -> bool:
    """Return whether the plan sums every bucket within each node before nodes communicate.

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
