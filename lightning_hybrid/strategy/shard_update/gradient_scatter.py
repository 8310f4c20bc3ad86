"""Gradients that are averaged for their owners alone: `two_level` without its gather.

    bucket      | a: rank 0's elements | a: rank 1's | b: rank 0's | b: rank 1's | small |       as DDP has it
    packed      | a: rank 0's | b: rank 0's | a: rank 1's | b: rank 1's |                        what is scattered
    rest        | small |                                                                       averaged on all ranks

Where all ranks share, the shards of a node are scattered once more, over the nodes, in place of their all-reduce.
After it a rank has the averages of the elements that it updates; of all others its `p.grad` holds what was there. The
gather of the weights after the update takes the place of that of the gradients, so that both together move the bytes of
`two_level`. Only where nothing looks at gradients, and for buckets that the plan gives to `two_level`; the last bucket,
which carries the checksum of the step, is averaged whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.bucket_layout import chunk_numels
from lightning_hybrid.comm.engine.job import SHARD_ALIGNMENT
from lightning_hybrid.comm.hook import split_divisor
from lightning_hybrid.strategy.shard_update.shard_pairs import ParameterShard

Range = tuple[int, int]  # elements from begin to end


@dataclass(frozen=True)
class Packing:
    """Where the elements of a bucket are in what is sent."""

    numel: int  # of the packed tensor
    moves: list[
        list[tuple[int, Range]]
    ]  # by sharer: a place in the packed tensor, and what of the bucket is there
    rest: list[Range]  # of the bucket


def packing_of(
    owned: Sequence[Sequence[Range]], rest: list[Range], chunks: Sequence[int]
) -> Packing:
    """Lay out the elements that each rank owns (`owned`, by sharer), in chunks of equal shards of the ranks.

    >>> packing_of([[(0, 3)], [(3, 4), (6, 8)]], [], chunks=[2, 4]).moves
    [[(0, (0, 1)), (2, (1, 3))], [(1, (3, 4)), (4, (6, 8))]]
    """
    moves: list[list[tuple[int, Range]]] = []
    for rank, ranges in enumerate(owned):
        found: list[tuple[int, Range]] = []
        left = [list(one) for one in ranges]
        begin = 0
        for numel in chunks:
            shard = numel // len(owned)
            at = begin + rank * shard
            room = shard
            while room and left:
                step = min(room, left[0][1] - left[0][0])
                found.append((at, (left[0][0], left[0][0] + step)))
                at = at + step
                room = room - step
                left[0][0] = left[0][0] + step
                if left[0][0] == left[0][1]:
                    left.pop(0)
            begin += numel
        moves.append(found)
    return Packing(numel=sum(chunks), moves=moves, rest=rest)


class GradientScatter:
    """The way of a bucket to its owners, while `is_on`; `shard_of` returns the shard of a parameter that is cut."""

    def __init__(
        self,
        engine: CommEngine,
        shard_of: Callable[[Tensor], ParameterShard | None],
        *,
        is_possible: bool,
    ) -> None:
        self._engine = engine
        self._shard_of = shard_of
        self._is_possible = is_possible
        sharers = engine.topology.sharers(engine.update_scope)
        self._rank = sharers.index(engine.topology.rank)
        self._num_ranks = len(sharers)
        self._packings: dict[tuple[int, ...], Packing | None] = {}
        self._plan = engine.plan
        self.is_on = False

    def turn(self, is_unobserved: bool) -> None:
        """Say for the next step whether nothing looks at gradients."""
        self.is_on = self._is_possible and is_unobserved

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor] | None:
        """Average a bucket for its owners; None where it has to be averaged whole."""
        if not self.is_on or bucket.is_last():
            return None
        packing = self._packing_of(bucket)
        buffer = bucket.buffer()
        if packing is None:
            return None
        engine = self._engine
        index = bucket.index()
        dtypes = (buffer.dtype, engine.dtype_across_nodes)
        before, after = split_divisor(engine.num_terms, is_fp16=torch.float16 in dtypes)
        packed = buffer.new_zeros(
            packing.numel
        )  # and not kept: between steps memory is what is to be saved
        for moves in packing.moves:
            _copy_(
                [packed[at : at + end - begin] for at, (begin, end) in moves],
                [buffer[b:e] for _, (b, e) in moves],
            )
        finish = partial(_put_own, buffer=buffer, moves=packing.moves[self._rank], after=after)
        packed = packed.div_(before) if before > 1 else packed
        scattered = engine.submit(packed, bucket_index=index, finish=finish, keeps_shard=True)
        if not packing.rest:
            return scattered
        rest = torch.cat([buffer[begin:end] for begin, end in packing.rest])
        rest = rest.div_(before) if before > 1 else rest
        whole = partial(_put_rest, buffer=buffer, ranges=packing.rest, after=after)
        averaged = engine.submit(rest, bucket_index=index, finish=whole)
        if engine.device.type == "cuda":
            # What `collect_all` returns is a future of the CPU: who waits for it would order no stream. Both are on the
            # streams already, so `then` has one wait for the other, and the host for neither.
            return scattered.then(partial(_both, averaged=averaged))
        return collect_all([scattered, averaged]).then(_first)

    def _packing_of(self, bucket: dist.GradBucket) -> Packing | None:
        if self._plan is not self._engine.plan:  # another one has other chunks
            self._plan = self._engine.plan
            self._packings.clear()
        key = (bucket.index(), *map(id, bucket.parameters()))
        if key not in self._packings:
            self._packings[key] = self._new_packing(bucket)
        return self._packings[key]

    def _new_packing(self, bucket: dist.GradBucket) -> Packing | None:
        buffer = bucket.buffer()
        owned: list[list[Range]] = [[] for _ in range(self._num_ranks)]
        rest: list[Range] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            at = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            shard = self._shard_of(parameter)
            if shard is None or gradient.stride() != parameter.stride():
                rest.append((at, at + gradient.numel()))
                continue
            for rank, (begin, end) in enumerate(shard.spans):
                owned[rank].append((at + begin, at + end))
        longest = max(sum(end - begin for begin, end in ranges) for ranges in owned)
        if longest == 0:
            return None
        alignment = self._num_ranks * SHARD_ALIGNMENT
        numel = -(-longest // SHARD_ALIGNMENT) * alignment
        plan = self._engine.planned(bucket.index(), numel, buffer.dtype)
        if plan.algorithm != "two_level":
            return None
        chunks = (
            chunk_numels(numel, plan.num_chunks, alignment=alignment)
            if plan.num_chunks > 1
            else [numel]
        )
        return packing_of(owned, rest, chunks)


def _put_own(
    packed: Tensor, *, buffer: Tensor, moves: list[tuple[int, Range]], after: float
) -> Tensor:
    own = [packed[at : at + end - begin] for at, (begin, end) in moves]
    if after != 1 and own:
        torch._foreach_div_(own, after)
    _copy_([buffer[begin:end] for _, (begin, end) in moves], own)
    return buffer


def _put_rest(rest: Tensor, *, buffer: Tensor, ranges: list[Range], after: float) -> Tensor:
    rest = rest.div_(after) if after != 1 else rest
    _copy_(
        [buffer[begin:end] for begin, end in ranges],
        list(rest.split([end - begin for begin, end in ranges])),
    )
    return buffer


def _copy_(places: list[Tensor], values: list[Tensor]) -> None:
    if places:
        torch._foreach_copy_(places, values)


def _both(scattered: Future[Tensor], *, averaged: Future[Tensor]) -> Tensor:
    averaged.wait()
    return scattered.value()


def _first(done: Future[list[Future[Tensor]]]) -> Tensor:
    # Both hold the bucket; one that failed raises here, so that DDP sees its error.
    values: list[Tensor] = [one.value() for one in done.value()]
    return values[0]
