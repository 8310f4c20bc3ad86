"""What the ranks of a node send one another where they share the update: small sums, weights, optimizer state.

    add_up_     flat <- sum over the node of flat                          a table of block sums, by every rank
    gather_     part r of flat <- that of local rank r, on every rank      weights after the update
    collect_    part r of flat <- that of local rank r, on the leader      state for a checkpoint

`flat` holds one part for each rank of the node, of equal length. As the stages of an all-reduce they are collective:
every rank of the node must call them, in the same order; in place.
"""

from __future__ import annotations

import torch.distributed as dist

from lightning_hybrid.comm.engine import gloo_p2p
from lightning_hybrid.comm.engine.job import Job

# torch 2.13 renames both and warns at every call by the old names; 2.11 and 2.12 know only those.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PART_ALIGNMENT = 128
"""Elements: parts of a `flat` begin at multiples of it, as messages of the backend and of `gloo_p2p` ask."""


def add_up_(job: Job, group: dist.ProcessGroup) -> None:
    """Sum over the node; all its ranks get the same bits."""
    dist.all_reduce(job.flat, group=group)


def gather_(job: Job, group: dist.ProcessGroup) -> None:
    """Give every rank all parts."""
    if not job.by_backend:
        gloo_p2p.gather_parts_(job.flat, group)
        return
    parts = job.flat.chunk(dist.get_world_size(group))
    all_gather(job.flat, parts[dist.get_rank(group)], group=group)


def collect_(job: Job, group: dist.ProcessGroup) -> None:
    """Give the node's leader all parts."""
    if not job.by_backend:
        gloo_p2p.collect_parts_(job.flat, group)
        return
    me, parts = dist.get_rank(group), list(job.flat.chunk(dist.get_world_size(group)))
    dist.gather(parts[me], None if me else parts, dst=job.topology.leader, group=group)
