"""Reduce-scatter of gradients to the ranks that update them.

It is the algorithm `two_level` without its all-gather:

    bucket      | a: rank 0's elements | a: rank 1's | b: rank 0's | b: rank 1's | small |       as in DDP
    packed      | a: rank 0's | b: rank 0's | a: rank 1's | b: rank 1's |                        reduce-scattered
    rest        | small |                                                                       averaged on all ranks

If all ranks share the update, the shards of a node are reduce-scattered once more over the nodes, in place of their
all-reduce. Afterwards a rank holds the averages of the elements that it updates. All other elements of its `p.grad`
keep their previous values. The all-gather of the weights after the update replaces the all-gather of the gradients, so
both together send as many bytes as `two_level`.

Buckets are reduce-scattered only if no user code reads gradients and the plan assigns them to `two_level`. The last
bucket, which carries the checksum of the step, is averaged on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.bucket_sizes import chunk_numels
from lightning_hybrid.comm.engine.job import SHARD_ALIGNMENT
from lightning_hybrid.comm.hook import split_divisor
from lightning_hybrid.strategy.shard_update.shard_pairs import ParameterShard

Range = tuple[int, int]
"""Elements from begin to end."""


class Move(NamedTuple):
    """Range of elements in a gradient bucket, with its position in the packed tensor.

    The range goes from `begin` to `end` in the bucket and starts at `packed_begin` in the packed tensor.
    """

    packed_begin: int
    begin: int
    end: int

    def in_packed(self, packed: Tensor) -> Tensor:
        """Return a view of the range in the packed tensor."""
        length = self.end - self.begin
        packed_end = self.packed_begin + length
        return packed[self.packed_begin : packed_end]

    def in_bucket(self, buffer: Tensor) -> Tensor:
        """Return a view of the range in the bucket."""
        return buffer[self.begin : self.end]


@dataclass(frozen=True)
class Packing:
    """Layout of a packed tensor, which holds the elements of a bucket in the order in which they are sent.

    Attributes:
        numel: Number of elements of the packed tensor.
        moves: For each rank that shares the update, the elements that it owns.
        whole_ranges: Elements of the bucket that are averaged on all ranks.
    """

    numel: int
    moves: list[list[Move]]
    whole_ranges: list[Range]


def packing_of(
    owned: Sequence[Sequence[Range]], whole_ranges: list[Range], chunks: Sequence[int]
) -> Packing:
    """Plan the layout of a packed tensor so that each chunk has an equally long shard for each rank.

    Args:
        owned: Elements of the bucket that each rank owns.
        whole_ranges: Elements of the bucket that are averaged on all ranks.
        chunks: Number of elements of each chunk.

    >>> packing_of([[(0, 3)], [(3, 4), (6, 8)]], [], chunks=[2, 4]).moves[1]
    [Move(packed_begin=1, begin=3, end=4), Move(packed_begin=4, begin=6, end=8)]
    """
    num_ranks = len(owned)
    moves = []
    for rank, ranges in enumerate(owned):
        moves_of_rank = _moves_of_rank(ranges, rank, num_ranks, chunks)
        moves.append(moves_of_rank)
    return Packing(numel=sum(chunks), moves=moves, whole_ranges=whole_ranges)


def _moves_of_rank(
    ranges: Sequence[Range], rank: int, num_ranks: int, chunks: Sequence[int]
) -> list[Move]:
    """Return the ranges that one rank owns, with their positions in the rank's shard of each chunk."""
    moves: list[Move] = []
    remaining = list(ranges)
    chunk_begin = 0
    for numel in chunks:
        room = numel // num_ranks
        packed_begin = chunk_begin + rank * room
        while room and remaining:
            begin, end = remaining[0]
            length = min(room, end - begin)
            moves.append(Move(packed_begin, begin, begin + length))
            packed_begin += length
            room -= length
            if begin + length == end:
                remaining.pop(0)
            else:
                remaining[0] = (begin + length, end)
        chunk_begin += numel
    return moves


class GradientScatter:
    """Communication hook that reduce-scatters gradient buckets if no user code reads the gradients.

    Buckets that it does not handle are all-reduced as usual.

    Args:
        engine: Communication engine of the run.
        shard_of: Returns the shard of a parameter, or None if every rank updates the full parameter.
        is_possible: Whether the options of the run allow a reduce-scatter.

    Attributes:
        is_on: Whether buckets of the current step are reduce-scattered.
        is_possible: Whether any step may reduce-scatter.
    """

    def __init__(
        self,
        engine: CommEngine,
        shard_of: Callable[[Tensor], ParameterShard | None],
        *,
        is_possible: bool,
    ) -> None:
        self._engine = engine
        self._shard_of = shard_of
        self.is_possible = is_possible
        sharers = engine.topology.sharers(engine.update_scope)
        self._rank = sharers.index(engine.topology.rank)
        self._num_ranks = len(sharers)
        # The value None means that the bucket is averaged on all ranks.
        self._packings: dict[tuple[int, ...], Packing | None] = {}
        self._plan = engine.plan  # the plan that the packings were computed for
        self.is_on = False

    def prepare_step(self, is_unobserved: bool) -> None:
        """Enable the reduce-scatter for the next step, unless user code reads its gradients."""
        self.is_on = self.is_possible and is_unobserved

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor] | None:
        """Start the reduce-scatter of a bucket and return its future, or None if it has to be all-reduced."""
        if not self.is_on:
            return None
        if bucket.is_last():
            return None  # because it carries the checksum of the step, which all ranks need
        packing = self._packing_of(bucket)
        if packing is None:
            return None

        engine = self._engine
        buffer = bucket.buffer()
        dtypes = (buffer.dtype, engine.dtype_across_nodes)
        before, after = split_divisor(engine.num_terms, is_fp16=torch.float16 in dtypes)
        scattered = self._scatter(bucket, packing, before, after)
        if not packing.whole_ranges:
            return scattered

        averaged = self._average_whole_ranges(bucket, packing, before, after)
        if engine.device.type == "cuda":
            # `collect_all` returns a CPU future, and waiting for it would not synchronize streams. Both results are
            # ordered on streams already. `then` makes one wait for the other, while the host waits for neither.
            return scattered.then(partial(_wait_for_both, averaged=averaged))
        return collect_all([scattered, averaged]).then(_first_value)

    def _scatter(
        self, bucket: dist.GradBucket, packing: Packing, before: float, after: float
    ) -> Future[Tensor]:
        """Pack the gradients of sharded parameters, and start their reduce-scatter."""
        buffer = bucket.buffer()
        # The packed tensor is not kept between steps, to save memory.
        packed = buffer.new_zeros(packing.numel)
        for moves in packing.moves:
            pieces_in_packed = [move.in_packed(packed) for move in moves]
            pieces_in_bucket = [move.in_bucket(buffer) for move in moves]
            _copy_(pieces_in_packed, pieces_in_bucket)
        if before > 1:
            packed.div_(before)
        finish = partial(
            _store_owned, buffer=buffer, moves=packing.moves[self._rank], divisor=after
        )
        return self._engine.submit(
            packed, bucket_index=bucket.index(), finish=finish, keeps_shard=True
        )

    def _average_whole_ranges(
        self, bucket: dist.GradBucket, packing: Packing, before: float, after: float
    ) -> Future[Tensor]:
        """Start the all-reduce of the gradients that every rank needs."""
        buffer = bucket.buffer()
        ranges = packing.whole_ranges
        pieces = [buffer[begin:end] for begin, end in ranges]
        flat = torch.cat(pieces)
        if before > 1:
            flat.div_(before)
        finish = partial(_store_ranges, buffer=buffer, ranges=ranges, divisor=after)
        return self._engine.submit(flat, bucket_index=bucket.index(), finish=finish)

    def _packing_of(self, bucket: dist.GradBucket) -> Packing | None:
        """Return the packing of a bucket, or None if the bucket has to be averaged on all ranks."""
        if self._plan is not self._engine.plan:
            # A new plan has other chunks.
            self._plan = self._engine.plan
            self._packings.clear()
        parameter_ids = map(id, bucket.parameters())
        key = (bucket.index(), *parameter_ids)
        if key not in self._packings:
            self._packings[key] = self._new_packing(bucket)
        return self._packings[key]

    def _new_packing(self, bucket: dist.GradBucket) -> Packing | None:
        owned, whole_ranges = self._ranges_of(bucket)
        longest = max(_numel_of(ranges) for ranges in owned)
        if longest == 0:
            return None
        chunks = self._planned_chunks(bucket, longest)
        if chunks is None:
            return None
        return packing_of(owned, whole_ranges, chunks)

    def _ranges_of(self, bucket: dist.GradBucket) -> tuple[list[list[Range]], list[Range]]:
        """Return the elements of a bucket that each rank owns, and those that are averaged on all ranks."""
        buffer = bucket.buffer()
        owned: list[list[Range]] = [[] for _ in range(self._num_ranks)]
        whole_ranges: list[Range] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            num_bytes = gradient.data_ptr() - buffer.data_ptr()
            offset = num_bytes // buffer.element_size()
            shard = self._shard_of(parameter)
            has_same_layout = gradient.stride() == parameter.stride()
            if shard is None or not has_same_layout:
                whole_range = (offset, offset + gradient.numel())
                whole_ranges.append(whole_range)
                continue
            for rank, (begin, end) in enumerate(shard.spans):
                owned[rank].append((offset + begin, offset + end))
        return owned, whole_ranges

    def _planned_chunks(self, bucket: dist.GradBucket, longest: int) -> list[int] | None:
        """Return the number of elements of each chunk of a bucket's packed tensor.

        Returns None if the plan uses an algorithm without a reduce-scatter.

        Args:
            bucket: Bucket of gradients.
            longest: Number of elements of the rank that owns the most.
        """
        shard_numel = -(-longest // SHARD_ALIGNMENT) * SHARD_ALIGNMENT  # with padding
        numel = self._num_ranks * shard_numel
        dtype = bucket.buffer().dtype
        plan = self._engine.planned(bucket.index(), numel, dtype)
        if plan.algorithm != "two_level":
            return None
        if plan.num_chunks <= 1:
            return [numel]
        alignment = self._num_ranks * SHARD_ALIGNMENT
        return chunk_numels(numel, plan.num_chunks, alignment=alignment)


def _numel_of(ranges: Sequence[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def _store_owned(packed: Tensor, *, buffer: Tensor, moves: list[Move], divisor: float) -> Tensor:
    """Divide the gradient sums that this rank owns by `divisor`, and copy the quotients into the bucket."""
    averages = [move.in_packed(packed) for move in moves]
    if divisor != 1 and averages:
        torch._foreach_div_(averages, divisor)
    pieces_in_bucket = [move.in_bucket(buffer) for move in moves]
    _copy_(pieces_in_bucket, averages)
    return buffer


def _store_ranges(flat: Tensor, *, buffer: Tensor, ranges: list[Range], divisor: float) -> Tensor:
    """Divide the gradient sums that all ranks need by `divisor`, and copy the quotients into the bucket."""
    if divisor != 1:
        flat.div_(divisor)
    pieces = [buffer[begin:end] for begin, end in ranges]
    numels = [piece.numel() for piece in pieces]
    averages = list(flat.split(numels))
    _copy_(pieces, averages)
    return buffer


def _copy_(destinations: list[Tensor], values: list[Tensor]) -> None:
    if destinations:
        torch._foreach_copy_(destinations, values)


def _wait_for_both(scattered: Future[Tensor], *, averaged: Future[Tensor]) -> Tensor:
    averaged.wait()
    return scattered.value()


def _first_value(done: Future[list[Future[Tensor]]]) -> Tensor:
    # Both futures hold the bucket. A failed one raises here, so that DDP sees its error.
    values: list[Tensor] = [future.value() for future in done.value()]
    return values[0]
