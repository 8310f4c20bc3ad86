"""Exchanges among ranks that share an update: small sums, weights and optimizer state.

    add_up_           flat <- sum over the ranks of flat                    a table of block sums, by every rank
    gather_           part r of flat <- that of sharer r, on every rank     weights after the update
    gather_across_    the same for the own shard of the node alone          where all share: before `gather_`
    collect_          part r of flat <- that of sharer r, on the first      state for a checkpoint

`flat` holds one part for each rank, of equal length, in the order of `Topology.sharers`. As the stages of an all-reduce
they are collective: every rank of the group must call them, in the same order; in place.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.engine import gloo_p2p
from lightning_hybrid.comm.engine.job import Job

# torch 2.13 renames both and warns at every call by the old names; 2.11 and 2.12 know only those.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PART_ALIGNMENT = 128
"""Elements: parts of a `flat` begin at multiples of it, as messages of the backend and of `gloo_p2p` ask."""


def add_up_(job: Job, group: dist.ProcessGroup) -> None:
    """Sum over the group. All its ranks get the same bits."""
    dist.all_reduce(job.flat, group=group)


def gather_(job: Job, group: dist.ProcessGroup) -> None:
    """Give every rank of the node all parts."""
    _gather(job.flat, job, group)


def gather_across_(job: Job, group: dist.ProcessGroup) -> None:
    """Give ranks of equal local rank all parts of their shard."""
    _gather(job.flat.chunk(len(job.topology.node))[job.topology.local_rank], job, group)


def _gather(flat: Tensor, job: Job, group: dist.ProcessGroup) -> None:
    if not job.by_backend:
        gloo_p2p.gather_parts_(flat, group)
        return
    all_gather(flat, flat.chunk(dist.get_world_size(group))[dist.get_rank(group)], group=group)


def scatter_across_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sum this rank's part of `flat` over the group, by the backend. Other parts stay."""
    part = flat.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    total = part.new_empty(part.numel())
    reduce_scatter(total, flat, group=group)
    part.copy_(total)


def collect_(job: Job, group: dist.ProcessGroup) -> None:
    """Give the first rank all parts."""
    me = dist.get_rank(group)
    size = dist.get_world_size(group)
    topology = job.topology
    sharers = topology.sharers("node" if size == len(topology.node) else "world")
    chunks = job.flat.chunk(size)
    parts = [chunks[sharers.index(rank)] for rank in sorted(sharers)]
    if not job.by_backend:
        gloo_p2p.collect_parts_(parts, group)
        return
    dist.gather(parts[me], None if me else parts, dst=sharers[0], group=group)
