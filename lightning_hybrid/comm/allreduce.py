"""Four ways to sum a flat tensor over all ranks, each a sequence of stages.

    flat            all_reduce
                      everywhere
    parallel_flat   parallel_all_reduce
                      flat, of pieces in several groups at once
    hierarchical    reduce            -> ring                -> broadcast
                      to the node's        all-reduce of the      to the node's
                      leader               leaders                other ranks
    two_level       scatter_reduce    -> shard_all_reduce    -> gather
                      each rank of a       over the ranks of      of the shards
                      node sums a shard    equal local rank       inside the node

``hierarchical`` is that of Jia et al. 2018 (arXiv:1807.11205): with k ranks per node and P ranks it takes
4 (k - 1) + 2 (P / k - 1) hops where a ring takes 2 (P - 1), but all bytes leave a node through its leader.
``two_level`` moves as few bytes between nodes and lets every rank's link carry 1 / k of them.

A stage knows nothing of the other stages but the ``Job`` they pass on, so that an engine can run stages of successive
tensors at the same time. Run one after the other they are the in-place functions at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.topology import CommGroups, Scope, Topology

# torch 2.13 renames `all_gather_into_tensor` and warns at every call by the old name; 2.11 and 2.12 know only that one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Job:
    """One tensor on its way through the stages of an algorithm.

    ``flat``: 1-D, contiguous; summed in place. ``shard``: this rank's part of it between two-level stages.
    """

    flat: Tensor
    topology: Topology
    shard: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A named step of an algorithm: which ranks talk in it, and what they do on a job.

    Names are unique over all algorithms: a stage has one predecessor, hence one order of jobs on every rank.
    """

    name: str
    scope: Scope
    run: Callable[[Job, dist.ProcessGroup], None]


def _all_reduce(job: Job, group: dist.ProcessGroup) -> None:
    dist.all_reduce(job.flat, group=group)


def _reduce_to_leader(job: Job, group: dist.ProcessGroup) -> None:
    # Gloo leaves partial sums in the other ranks' tensors; the broadcast overwrites them.
    dist.reduce(job.flat, dst=job.topology.leader, group=group)


def _broadcast_from_leader(job: Job, group: dist.ProcessGroup) -> None:
    dist.broadcast(job.flat, src=job.topology.leader, group=group)


def _scatter_reduce(job: Job, group: dist.ProcessGroup) -> None:
    """Sum shard r of the node's tensors on local rank r; a tail that does not divide is padded with zeros."""
    num_shards = dist.get_world_size(group)
    numel_shard = -(-job.flat.numel() // num_shards)
    numel_missing = num_shards * numel_shard - job.flat.numel()
    padded = torch.nn.functional.pad(job.flat, (0, numel_missing)) if numel_missing else job.flat
    if job.flat.is_cuda:
        job.shard = job.flat.new_empty(numel_shard)
        _reduce_scatter(job.shard, padded, group=group)
        return
    # Gloo's reduce_scatter moves the bytes of an all-reduce. This moves half of them, and adds in fp32: one rounding
    # to 16 bits inside the node, where Gloo's sums round at every hop.
    arrived = torch.empty_like(padded)
    dist.all_to_all_single(arrived, padded, group=group)
    job.shard = arrived.view(num_shards, numel_shard).sum(0, dtype=_sum_dtype(padded.dtype)).to(padded.dtype)


def _all_reduce_shard(job: Job, group: dist.ProcessGroup) -> None:
    dist.all_reduce(job.flat if job.shard is None else job.shard, group=group)


def _gather_shards(job: Job, group: dist.ProcessGroup) -> None:
    shard, job.shard = job.shard, None
    if shard is None:  # a fault of the engine: stages out of order
        raise RuntimeError("the gather stage was given a job whose shard was never scattered")
    whole = shard.numel() * dist.get_world_size(group)
    if whole == job.flat.numel():
        _all_gather(job.flat, shard, group=group)
        return
    padded = shard.new_empty(whole)
    _all_gather(padded, shard, group=group)
    job.flat.copy_(padded[: job.flat.numel()])


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


STAGES: dict[Algorithm, tuple[Stage, ...]] = {
    "flat": (Stage(name="all_reduce", scope="world", run=_all_reduce),),
    "parallel_flat": (Stage(name="parallel_all_reduce", scope="world", run=_all_reduce),),
    "hierarchical": (
        Stage(name="reduce", scope="node", run=_reduce_to_leader),
        Stage(name="ring", scope="leaders", run=_all_reduce),
        Stage(name="broadcast", scope="node", run=_broadcast_from_leader),
    ),
    "two_level": (
        Stage(name="scatter_reduce", scope="node", run=_scatter_reduce),
        Stage(name="shard_all_reduce", scope="across", run=_all_reduce_shard),
        Stage(name="gather", scope="node", run=_gather_shards),
    ),
}


def columns_of(algorithm: Algorithm, num_parallel_groups: int) -> int:
    """How many independent sets of groups an algorithm uses: ``flat`` is one collective and uses one."""
    return 1 if algorithm == "flat" else num_parallel_groups


def group_name(stage: Stage, column: int = 0) -> str:
    """Name of a stage's groups in a column: that of the stage in the first one."""
    return f"{stage.name}.{column}" if column else stage.name


def stage_scopes(algorithms: Iterable[Algorithm], *, num_parallel_groups: int = 1) -> dict[str, Scope]:
    """The scope of every stage of these algorithms, by group name: what ``CommGroups`` is built from.

    >>> stage_scopes(["flat", "hierarchical"])
    {'all_reduce': 'world', 'reduce': 'node', 'ring': 'leaders', 'broadcast': 'node'}
    >>> list(stage_scopes(["flat", "parallel_flat"], num_parallel_groups=2))
    ['all_reduce', 'parallel_all_reduce', 'parallel_all_reduce.1']
    """
    return {
        group_name(stage, column): stage.scope
        for algorithm in algorithms
        for column in range(columns_of(algorithm, num_parallel_groups))
        for stage in STAGES[algorithm]
    }


def run_stage(stage: Stage, job: Job, groups: CommGroups, *, column: int = 0) -> None:
    """Do one stage of a job; nothing where this rank has nobody to talk to, or there is nothing to add."""
    group = groups.of(group_name(stage, column))
    if group is not None and job.flat.numel() > 0:
        stage.run(job, group)


def flat_sum_(flat: Tensor, groups: CommGroups) -> Tensor:
    """Sum over all ranks by the backend's own all-reduce.

    Collective: every rank of the world must call it, in the same order. In place. Afterwards all ranks hold the same
    bits. ``flat``: 1-D, contiguous, any number of elements, fp16, bf16, fp32 or fp64, summed in its own dtype.
    ``groups`` must hold the stages of the algorithm. Raises ``ValueError`` for a tensor of another shape.
    """
    return _sum_(flat, groups, "flat")


def hierarchical_sum_(flat: Tensor, groups: CommGroups) -> Tensor:
    """Sum over all ranks: reduce to node leaders, ring of the leaders, broadcast (Jia et al. 2018, arXiv:1807.11205).

    Works for nodes of different size. Everything else as ``flat_sum_``.
    """
    return _sum_(flat, groups, "hierarchical")


def two_level_sum_(flat: Tensor, groups: CommGroups) -> Tensor:
    """Sum over all ranks: scatter-reduce in the node, all-reduce of the shards across nodes, gather in the node.

    Needs nodes of equal size. On CPU fp16 and bf16 are added in fp32 inside the node and rounded once; between nodes,
    and on NCCL everywhere, the backend adds in the tensor's own dtype. Everything else as ``flat_sum_``.
    """
    return _sum_(flat, groups, "two_level")


def _sum_(flat: Tensor, groups: CommGroups, algorithm: Algorithm) -> Tensor:
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"`flat` (of shape {tuple(flat.shape)}, strides {flat.stride()}) must be one-dimensional and contiguous: "
            "it is summed in place. Pass a bucket's buffer or `tensor.view(-1)`."
        )
    job = Job(flat=flat, topology=groups.topology)
    for stage in STAGES[algorithm]:
        run_stage(stage, job, groups)
    return flat
