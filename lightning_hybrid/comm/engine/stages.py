"""All-reduce algorithms for flat tensors, each implemented as a sequence of stages.

    flat            all_reduce
    parallel_flat   parallel_all_reduce, of chunks in several groups at the same time
    hierarchical    reduce to the node's leader -> ring of the leaders -> broadcast to the node's other ranks
    two_level       scatter_reduce, one shard per rank of a node -> shard_all_reduce over equal local ranks -> gather

`hierarchical` is the algorithm of Jia et al. 2018 (arXiv:1807.11205). With k ranks per node and P ranks in total, it
takes 4 (k - 1) + 2 (P / k - 1) hops, compared with 2 (P - 1) in a ring. However, all bytes leave a node through its
leader. `two_level` sends equally few bytes between nodes, and every rank's link carries 1 / k of them.

`flat` is the backend's own all-reduce. On CUDA, the other stages are also collectives of the backend, which add in the
tensor's dtype, both inside the node and between nodes. On the CPU, the other stages are our own messages over Gloo
(gloo_p2p.py), which add 16-bit tensors in fp32. Therefore the accuracy of sums on CPUs does not apply to CUDA. The
message pattern between nodes depends on the size of a chunk (`message_pattern.between_nodes_form`). With a codec,
messages are encoded (coded_sum.py).

Stages share only the `Job`, which each stage passes to the next, so that an engine can run stages of successive tensors
at the same time. Each stage is collective: every rank of its group must call it, in the same order. It works in place.
After the last stage, the tensor is bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.adasum.combine import adasum_
from lightning_hybrid.comm.collective_names import Exchange
from lightning_hybrid.comm.engine import gloo_p2p, node_exchange
from lightning_hybrid.comm.engine.coded_sum import sum_coded_
from lightning_hybrid.comm.engine.job import Job
from lightning_hybrid.comm.message_pattern import between_nodes_form
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.topology import Scope


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of an all-reduce algorithm, such as the reduction inside a node.

    Args:
        name: Name, which is unique over all algorithms. A stage therefore has only one predecessor, and the same order
            of jobs on every rank.
        scope: Ranks that communicate with each other.
        run: Function that processes a job over a group.
    """

    name: str
    scope: Scope
    run: Callable[[Job, dist.ProcessGroup], None]


def _all_reduce(job: Job, group: dist.ProcessGroup) -> None:
    _sum_across_(job.flat, job, group, _ring)


def _all_reduce_chunk(job: Job, group: dist.ProcessGroup) -> None:
    # Only groups with one rank per node choose by size. With several ranks per node, links inside and between nodes
    # would be mixed.
    all_reduce = _ring
    if job.topology.ranks_per_node == 1:
        all_reduce = _all_reduce_by_bytes
    _sum_across_(job.flat, job, group, all_reduce)


def _all_reduce_leaders(job: Job, group: dist.ProcessGroup) -> None:
    if not job.adasum_numels:
        _sum_across_(job.flat, job, group, _all_reduce_by_bytes)
        return
    sum_ = _all_reduce_by_bytes
    if job.by_backend:
        sum_ = _ring
    adasum_(job.flat, job.adasum_numels, group, sum_=sum_)


def _sum_across_(
    flat: Tensor,
    job: Job,
    group: dist.ProcessGroup,
    all_reduce: Callable[[Tensor, dist.ProcessGroup], None],
) -> None:
    """Reduce a tensor, or this rank's shard of it, over a group with ranks on several nodes.

    The codec or the dtype between nodes applies, if there is one.

    Args:
        flat: Tensor to reduce in place.
        job: Job that the tensor belongs to.
        group: Process group of the reduction.
        all_reduce: All-reduce to use if the stages are our own messages.
    """
    if job.blocks is not None:
        blocks = job.blocks.since(job.shard_begin)
        sender = _noise_sender(job, group)
        sum_coded_(flat, blocks, group, sender=sender, by_backend=job.by_backend)
        return

    if job.by_backend:
        all_reduce = _ring  # NCCL chooses its own message pattern
    is_sub_sharded = job.num_owners > len(job.topology.node)
    if is_sub_sharded:
        # Each rank of the group keeps only a sub-shard of the shard.
        all_reduce = gloo_p2p.scatter_reduce_
        if job.by_backend:
            all_reduce = node_exchange.scatter_across_

    wire_dtype = job.dtype_across
    stays_in_node = job.topology.num_nodes == 1
    if wire_dtype is None or wire_dtype.itemsize >= flat.dtype.itemsize or stays_in_node:
        all_reduce(flat, group)
        return
    wire = flat.to(wire_dtype)  # a copy, because the tensor keeps its dtype inside the node
    all_reduce(wire, group)
    flat.copy_(wire)


def _noise_sender(job: Job, group: dist.ProcessGroup) -> int:
    """Return the number that the rounding noise of this rank's messages depends on."""
    nodes = job.topology.nodes
    if dist.get_world_size(group) == len(nodes):
        # The noise depends only on the node, so it is equal for all algorithms in which a node sends one message.
        return nodes.index(job.topology.node)
    return dist.get_rank(group)


def _ring(flat: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(flat, group=group)


def _all_reduce_by_bytes(flat: Tensor, group: dist.ProcessGroup) -> None:
    num_bytes = flat.numel() * flat.element_size()
    form = between_nodes_form(dist.get_world_size(group), num_bytes)
    if form == "exchange":
        gloo_p2p.exchange_(flat, group)
    elif form == "scatter_gather":
        gloo_p2p.scatter_reduce_(flat, group)
        gloo_p2p.gather_parts_(flat, group)
    else:
        _ring(flat, group)


def _reduce_to_leader(job: Job, group: dist.ProcessGroup) -> None:
    if job.by_backend:
        leader = dist.get_global_rank(group, 0)
        dist.reduce(job.flat, dst=leader, group=group)
    else:
        gloo_p2p.reduce_to_first_(job.flat, group)


def _broadcast_from_leader(job: Job, group: dist.ProcessGroup) -> None:
    if job.by_backend:
        leader = dist.get_global_rank(group, 0)
        dist.broadcast(job.flat, src=leader, group=group)
    else:
        gloo_p2p.broadcast_(job.flat, group)


def _scatter_reduce(job: Job, group: dist.ProcessGroup) -> None:
    """Reduce-scatter the tensor within the node, so that local rank r holds the sum of shard r.

    On the CPU the shard is a view of `flat`, and on CUDA it is a new tensor.
    """
    if job.by_backend:
        _scatter_reduce_by_backend(job, group)
        return
    flat = job.flat
    alignment = job.shard_alignment
    gloo_p2p.scatter_reduce_(flat, group, alignment)
    shard = gloo_p2p.part_of(flat, group, alignment)
    job.shard = shard
    job.shard_begin = int(shard.storage_offset() - flat.storage_offset())


def _scatter_reduce_by_backend(job: Job, group: dist.ProcessGroup) -> None:
    flat = job.flat
    alignment = job.shard_alignment
    num_shards = dist.get_world_size(group)
    units_per_shard = -(-flat.numel() // (num_shards * alignment))
    numel_shard = units_per_shard * alignment
    job.shard_begin = dist.get_rank(group) * numel_shard

    padded = flat
    numel_missing = num_shards * numel_shard - flat.numel()
    if numel_missing > 0:
        # The backend requires shards of equal size. Only a bucket's last chunk is copied here, because the engine
        # splits buckets so that all other chunks have a suitable size.
        padded = torch.nn.functional.pad(flat, (0, numel_missing))
    job.shard = flat.new_empty(numel_shard)
    node_exchange.reduce_scatter(job.shard, padded, group=group)


def _all_reduce_shard(job: Job, group: dist.ProcessGroup) -> None:
    shard = job.shard
    if shard is None:
        shard = job.flat
    if shard.numel() > 0:  # a small tensor may have no shard for this rank
        _sum_across_(shard, job, group, _all_reduce_by_bytes)


def _gather_shards(job: Job, group: dist.ProcessGroup) -> None:
    shard = job.shard
    job.shard = None  # frees the memory after this stage
    if shard is None:
        raise RuntimeError(
            "The gather stage ran before the scatter stage. This is a bug in lightning_hybrid. Please report it."
        )
    is_kept_by_owners = job.num_owners > 0
    if job.by_backend and is_kept_by_owners:
        _write_shard_back(job, shard, group)
    elif job.by_backend:
        _gather_shards_by_backend(job, shard, group)
    elif not is_kept_by_owners:
        gloo_p2p.gather_parts_(job.flat, group, job.shard_alignment)


def _write_shard_back(job: Job, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Copy this rank's shard into the tensor. On the CPU a shard is a view and needs no copy."""
    num_shards = dist.get_world_size(group)
    shards_in_tensor = job.flat.chunk(num_shards)
    shards_in_tensor[dist.get_rank(group)].copy_(shard)


def _gather_shards_by_backend(job: Job, shard: Tensor, group: dist.ProcessGroup) -> None:
    numel = job.flat.numel()
    padded_numel = shard.numel() * dist.get_world_size(group)
    if padded_numel == numel:
        node_exchange.all_gather(job.flat, shard, group=group)
        return
    padded = shard.new_empty(padded_numel)
    node_exchange.all_gather(padded, shard, group=group)
    job.flat.copy_(padded[:numel])


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

# Collectives of a sharded update, between the ranks of a node or between all ranks.
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
    """Return the stages of the all-reduce algorithm or the sharded-update collective with this name."""
    if name in EXCHANGES:
        return EXCHANGES[name]
    return STAGES[name]


def group_name(stage: Stage, column: int = 0) -> str:
    """Return the name of a stage's process group in one of several independent sets of groups."""
    if column == 0:
        return stage.name
    return f"{stage.name}.{column}"


def stage_scopes(columns: Mapping[Any, int]) -> dict[str, Scope]:
    """Map the process groups of several algorithms, by name, to the scopes of their ranks.

    Args:
        columns: Number of independent sets of process groups for each algorithm.

    >>> stage_scopes({"flat": 1, "hierarchical": 1})
    {'all_reduce': 'world', 'reduce': 'node', 'ring': 'leaders', 'broadcast': 'node'}
    >>> list(stage_scopes({"flat": 1, "parallel_flat": 2}))
    ['all_reduce', 'parallel_all_reduce', 'parallel_all_reduce.1']
    """
    scopes = {}
    for algorithm, num_columns in columns.items():
        for column in range(num_columns):
            for stage in stages_by_name(algorithm):
                scopes[group_name(stage, column)] = stage.scope
    return scopes


def run_stage(stage: Stage, job: Job, group: dist.ProcessGroup | None) -> None:
    """Run one all-reduce stage of a job, unless this rank is in no group or the tensor is empty."""
    if group is not None and job.flat.numel() > 0:
        stage.run(job, group)
