"""Four ways to sum a flat tensor over all ranks, each a sequence of stages.

    flat            all_reduce
    parallel_flat   parallel_all_reduce: of chunks, in several groups at once
    hierarchical    reduce to the node's leader -> ring of the leaders -> broadcast to the node's other ranks
    two_level       scatter_reduce, each rank of a node a shard -> shard_all_reduce, equal local ranks -> gather

`hierarchical` is that of Jia et al. 2018 (arXiv:1807.11205): with k ranks per node and P ranks it takes
4 (k - 1) + 2 (P / k - 1) hops where a ring takes 2 (P - 1), but all bytes leave a node through its leader.
`two_level` moves as few bytes between nodes and lets every rank's link carry 1 / k of them.

`flat` is the backend's own all-reduce. On CUDA the other stages are the backend's own collectives too, which add in
the tensor's own dtype, inside the node as between nodes. On the CPU they are messages of our own over Gloo
(gloo_p2p.py), which add 16-bit tensors in fp32: how near a sum comes to the exact one there says nothing of CUDA.
Between nodes they depend on the bytes of a chunk (`bucket_layout.between_nodes_form`), or are those of a codec
(coded_sum.py).

A stage knows nothing of the other stages but the `Job` they pass on, so that an engine can run stages of successive
tensors at the same time. Each is collective: every rank of its group must call it, in the same order; in place;
after the last one all ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.adasum.combine import adasum_
from lightning_hybrid.comm.bucket_layout import Exchange, between_nodes_form
from lightning_hybrid.comm.engine import gloo_p2p, node_exchange
from lightning_hybrid.comm.engine.coded_sum import sum_coded_
from lightning_hybrid.comm.engine.job import Job
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.topology import Scope


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A named step of an algorithm: which ranks talk in it, and what they do on a job."""

    # Unique over all algorithms: a stage has one predecessor, hence one order of jobs on every rank.
    name: str
    scope: Scope
    run: Callable[[Job, dist.ProcessGroup], None]


def _all_reduce(job: Job, group: dist.ProcessGroup) -> None:
    _sum_across_(job.flat, job, group, _ring)


def _all_reduce_chunk(job: Job, group: dist.ProcessGroup) -> None:
    # With several ranks on a node the group mixes links: the forms by bytes are for one rank on each node.
    _sum_across_(
        job.flat, job, group, _all_reduce_by_bytes if job.topology.ranks_per_node == 1 else _ring
    )


def _all_reduce_leaders(job: Job, group: dist.ProcessGroup) -> None:
    if job.adasum_numels:
        adasum_(
            job.flat,
            job.adasum_numels,
            group,
            sum_=_ring if job.by_backend else _all_reduce_by_bytes,
        )
        return
    _sum_across_(job.flat, job, group, _all_reduce_by_bytes)


def _sum_across_(
    flat: Tensor,
    job: Job,
    group: dist.ProcessGroup,
    all_reduce: Callable[[Tensor, dist.ProcessGroup], None],
) -> None:
    if job.blocks is not None:
        nodes = job.topology.nodes
        node = job.topology.node
        # Noise that depends on the node alone is the same in every algorithm in which nodes send one message.
        sender = (
            nodes.index(node) if dist.get_world_size(group) == len(nodes) else dist.get_rank(group)
        )
        blocks = job.blocks.since(job.shard_begin)
        sum_coded_(flat, blocks, group, sender=sender, by_backend=job.by_backend)
        return
    dtype = job.dtype_across
    # The choice by bytes is between messages of Gloo; NCCL has its own.
    all_reduce = _ring if job.by_backend else all_reduce
    if job.num_owners > len(job.topology.node):  # each rank across has a part of the shard
        all_reduce = node_exchange.scatter_across_ if job.by_backend else gloo_p2p.scatter_reduce_
    if dtype is None or dtype.itemsize >= flat.dtype.itemsize or job.topology.num_nodes == 1:
        all_reduce(flat, group)
        return
    wire = flat.to(dtype)  # a copy: the tensor keeps its dtype inside the node
    all_reduce(wire, group)
    flat.copy_(wire)


def _ring(flat: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(flat, group=group)


def _all_reduce_by_bytes(flat: Tensor, group: dist.ProcessGroup) -> None:
    form = between_nodes_form(dist.get_world_size(group), flat.numel() * flat.element_size())
    if form == "exchange":
        gloo_p2p.exchange_(flat, group)
    elif form == "scatter_gather":
        gloo_p2p.scatter_reduce_(flat, group)
        gloo_p2p.gather_parts_(flat, group)
    else:
        _ring(flat, group)


def _reduce_to_leader(job: Job, group: dist.ProcessGroup) -> None:
    if job.by_backend:
        dist.reduce(
            job.flat, dst=dist.get_global_rank(group, 0), group=group
        )  # the node's leader is its first
    else:
        gloo_p2p.reduce_to_first_(job.flat, group)


def _broadcast_from_leader(job: Job, group: dist.ProcessGroup) -> None:
    if job.by_backend:
        dist.broadcast(job.flat, src=dist.get_global_rank(group, 0), group=group)
    else:
        gloo_p2p.broadcast_(job.flat, group)


def _scatter_reduce(job: Job, group: dist.ProcessGroup) -> None:
    """Sum shard r of the node's tensors on local rank r: on the CPU in its place in `flat`, on CUDA in a new tensor."""
    alignment = job.shard_alignment
    if not job.by_backend:
        gloo_p2p.scatter_reduce_(job.flat, group, alignment)
        job.shard = gloo_p2p.part_of(job.flat, group, alignment)
        job.shard_begin = int(job.shard.storage_offset() - job.flat.storage_offset())
        return
    num_shards = dist.get_world_size(group)
    numel_shard = -(-job.flat.numel() // (num_shards * alignment)) * alignment
    job.shard_begin = dist.get_rank(group) * numel_shard
    numel_missing = num_shards * numel_shard - job.flat.numel()
    # The backend asks for shards of equal size. A copy, but of the last chunk only: an engine cuts the others to fit.
    padded = torch.nn.functional.pad(job.flat, (0, numel_missing)) if numel_missing else job.flat
    job.shard = job.flat.new_empty(numel_shard)  # of equal size on all ranks, as the backend asks
    node_exchange.reduce_scatter(job.shard, padded, group=group)


def _all_reduce_shard(job: Job, group: dist.ProcessGroup) -> None:
    shard = job.flat if job.shard is None else job.shard
    if shard.numel() > 0:  # small tensors may leave no part for this rank
        _sum_across_(shard, job, group, _all_reduce_by_bytes)


def _gather_shards(job: Job, group: dist.ProcessGroup) -> None:
    shard, job.shard = job.shard, None  # its memory is free after this stage
    if shard is None:  # a fault of the engine: stages out of order
        raise RuntimeError("the gather stage was given a job whose shard was never scattered")
    if job.num_owners:
        if job.by_backend:
            job.flat.chunk(dist.get_world_size(group))[dist.get_rank(group)].copy_(shard)
        return
    if not job.by_backend:
        gloo_p2p.gather_parts_(job.flat, group, job.shard_alignment)
        return
    whole = shard.numel() * dist.get_world_size(group)
    if whole == job.flat.numel():
        node_exchange.all_gather(job.flat, shard, group=group)
        return
    padded = shard.new_empty(whole)
    node_exchange.all_gather(padded, shard, group=group)
    job.flat.copy_(padded[: job.flat.numel()])


STAGES: dict[Algorithm, tuple[Stage, ...]] = {
    "flat": (Stage(name="all_reduce", scope="world", run=_all_reduce),),
    "parallel_flat": (Stage(name="parallel_all_reduce", scope="world", run=_all_reduce_chunk),),
    "hierarchical": (
        Stage(name="reduce", scope="node", run=_reduce_to_leader),
        Stage(name="ring", scope="leaders", run=_all_reduce_leaders),
        Stage(name="broadcast", scope="node", run=_broadcast_from_leader),
    ),
    "two_level": (
        Stage(name="scatter_reduce", scope="node", run=_scatter_reduce),
        Stage(name="shard_all_reduce", scope="across", run=_all_reduce_shard),
        Stage(name="gather", scope="node", run=_gather_shards),
    ),
}

# Not of all-reduces: what the ranks of a node, or all, send one another where they share the update.
EXCHANGES: dict[Exchange, tuple[Stage, ...]] = {
    "node_sum": (Stage(name="add_up", scope="node", run=node_exchange.add_up_),),
    "node_gather": (Stage(name="gather_weights", scope="node", run=node_exchange.gather_),),
    "node_collect": (Stage(name="collect_state", scope="node", run=node_exchange.collect_),),
    "world_sum": (Stage(name="add_up_all", scope="world", run=node_exchange.add_up_),),
    "world_gather": (
        Stage(name="gather_weights_across", scope="across", run=node_exchange.gather_across_),
        Stage(name="gather_weights_inside", scope="node", run=node_exchange.gather_),
    ),
    "world_collect": (
        Stage(name="collect_state_of_all", scope="world", run=node_exchange.collect_),
    ),
}


def stages_by_name(name: Any) -> tuple[Stage, ...]:
    """Return the stages of an algorithm, or of an exchange in the update."""
    return EXCHANGES[name] if name in EXCHANGES else STAGES[name]


def group_name(stage: Stage, column: int = 0) -> str:
    """Return the name of a stage's groups in a column. In the first column it is the name of the stage."""
    return f"{stage.name}.{column}" if column else stage.name


def stage_scopes(columns: Mapping[Any, int]) -> dict[str, Scope]:
    """Return the scope of every stage of these algorithms by group name, from which `CommGroups` is built.

    `columns`: how many independent sets of groups each has.

    >>> stage_scopes({"flat": 1, "hierarchical": 1})
    {'all_reduce': 'world', 'reduce': 'node', 'ring': 'leaders', 'broadcast': 'node'}
    >>> list(stage_scopes({"flat": 1, "parallel_flat": 2}))
    ['all_reduce', 'parallel_all_reduce', 'parallel_all_reduce.1']
    """
    return {
        group_name(stage, column): stage.scope
        for algorithm, num_columns in columns.items()
        for column in range(num_columns)
        for stage in stages_by_name(algorithm)
    }


def run_stage(stage: Stage, job: Job, group: dist.ProcessGroup | None) -> None:
    """Run one stage of a job. Do nothing without a group, or if there is nothing to add."""
    if group is not None and job.flat.numel() > 0:
        stage.run(job, group)
