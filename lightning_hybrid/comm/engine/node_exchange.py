"""Collectives of a sharded optimizer update, for reductions, weights and optimizer state.

    add_up_           flat <- sum of flat over the ranks                        sums of blocks, on every rank
    gather_           shard r of flat <- shard of sharer r, on every rank       weights after the update
    gather_across_    as `gather_`, for this rank's shard of the node           if all ranks share, before `gather_`
    collect_          shard r of flat <- shard of sharer r, on the first rank   state for a checkpoint

`flat` holds one shard for each rank, in the order of `Topology.sharers`. Shards have equal lengths. All functions work
in place.

Collective: every rank of the group must call them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.engine import gloo_p2p
from lightning_hybrid.comm.engine.job import Job

# torch 2.13 has new names for both functions, and warns at every call of the old names. torch 2.11 and 2.12 have only
# the old names.
all_gather: Callable[..., Any]
reduce_scatter: Callable[..., Any]
if hasattr(dist, "all_gather_single"):
    all_gather = dist.all_gather_single
    reduce_scatter = dist.reduce_scatter_single
else:
    all_gather = dist.all_gather_into_tensor
    reduce_scatter = dist.reduce_scatter_tensor

PART_ALIGNMENT = 128
"""Alignment of the shards of `flat`, in elements, as required by the backend and by `gloo_p2p`."""


def add_up_(job: Job, group: dist.ProcessGroup) -> None:
    """All-reduce the job's tensor over the group, with bit-identical results on all ranks."""
    dist.all_reduce(job.flat, group=group)


def gather_(job: Job, group: dist.ProcessGroup) -> None:
    """All-gather the job's tensor within the node, with one shard from each rank."""
    _gather(job.flat, job, group)


def gather_across_(job: Job, group: dist.ProcessGroup) -> None:
    """All-gather this rank's shard of the node over the ranks with the same local rank."""
    topology = job.topology
    shards = job.flat.chunk(len(topology.node))
    own_shard = shards[topology.local_rank]
    _gather(own_shard, job, group)


def _gather(flat: Tensor, job: Job, group: dist.ProcessGroup) -> None:
    if not job.by_backend:
        gloo_p2p.gather_parts_(flat, group)
        return
    own_part = _part_of_this_rank(flat, group)
    all_gather(flat, own_part, group=group)


def scatter_across_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Reduce-scatter a tensor in place with a collective of the backend.

    Each rank then holds the sum of its own shard. Other shards are unchanged.
    """
    own_part = _part_of_this_rank(flat, group)
    total = own_part.new_empty(own_part.numel())
    reduce_scatter(total, flat, group=group)
    own_part.copy_(total)


def _part_of_this_rank(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    num_ranks = dist.get_world_size(group)
    parts = flat.chunk(num_ranks)
    return parts[dist.get_rank(group)]


def collect_(job: Job, group: dist.ProcessGroup) -> None:
    """Gather the shards of all ranks into the job's tensor on the group's first rank."""
    rank = dist.get_rank(group)
    num_ranks = dist.get_world_size(group)
    topology = job.topology
    if num_ranks == len(topology.node):
        sharers = topology.sharers("node")
    else:
        sharers = topology.sharers("world")

    # The tensor holds the shards in the order of the sharers. The group numbers its ranks in ascending order.
    shards = job.flat.chunk(num_ranks)
    shard_by_sharer = dict(zip(sharers, shards, strict=True))
    parts = [shard_by_sharer[sharer] for sharer in sorted(sharers)]
    if not job.by_backend:
        gloo_p2p.collect_parts_(parts, group)
        return

    gathered_parts = None
    if rank == 0:
        gathered_parts = parts
    # The ranks of the topology count within a set of ranks, such as one stage of several pipelines.
    first_rank = dist.get_global_rank(group, 0)
    dist.gather(parts[rank], gathered_parts, dst=first_rank, group=group)
