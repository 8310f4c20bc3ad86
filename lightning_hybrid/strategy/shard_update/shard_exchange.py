"""What ranks that share the update send one another: parts of tensors, in chunks that go through the engine.

    chunk       | rank 0's elements | rank 1's elements | ...       of as many parameters as there is room for

Each rank packs its elements of all tensors, in one order, into chunks of bounded size; while one is on its way the next
is packed, and what has arrived is put where it belongs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.engine.node_exchange import PART_ALIGNMENT
from lightning_hybrid.placement import flattened
from lightning_hybrid.strategy.shard_update.late_gather import LateGather
from lightning_hybrid.strategy.shard_update.shard_pairs import ParameterShard

# Elements of a chunk, of all ranks together. Two chunks are in memory: 16 MiB of half-precision weights.
CHUNK_NUMEL = 1 << 22

Slice = tuple[int, int, int]  # a tensor by its place in a list, and its elements from begin to end


@dataclass
class PackedChunk:
    """The layout of a chunk: the slices of each rank, one after the other from `rank * numel` on."""

    numel: int = 0  # of one rank, with what fills it up
    slices: list[list[Slice]] = field(default_factory=list)  # by sharer


def chunks_of(spans: Sequence[Sequence[tuple[int, int]]], numel: int) -> list[PackedChunk]:
    """Lay out chunks of up to `numel` elements a rank for tensors whose `spans` are given: of each, by rank.

    >>> [chunk.slices for chunk in chunks_of([[(0, 4), (4, 9)], [(2, 4), (0, 2)]], numel=6)]
    [[[(0, 0, 4), (1, 2, 4)], [(0, 4, 9), (1, 0, 1)]], [[], [(1, 1, 2)]]]
    """
    by_rank = [_cut([of_one[rank] for of_one in spans], numel) for rank in range(len(spans[0]))]
    chunks = []
    for index in range(max(map(len, by_rank))):
        slices = [found[index] if index < len(found) else [] for found in by_rank]
        longest = max(sum(end - begin for _, begin, end in some) for some in slices)
        chunks.append(
            PackedChunk(numel=-(-longest // PART_ALIGNMENT) * PART_ALIGNMENT, slices=slices)
        )
    return chunks


def _cut(spans: Sequence[tuple[int, int]], numel: int) -> list[list[Slice]]:
    found: list[list[Slice]] = [[]]
    room = numel
    for index, (begin, end) in enumerate(spans):
        while begin < end:
            if room == 0:
                found.append([])
                room = numel
            step = min(room, end - begin)
            found[-1].append((index, begin, begin + step))
            begin = begin + step
            room = room - step
    return found


class ShardExchange:
    """The exchanges of one engine among ranks that share the update. All are collective, and raise its errors."""

    def __init__(self, engine: CommEngine) -> None:
        self._engine = engine
        sharers = engine.topology.sharers(engine.update_scope)
        self.place = self._rank, self._num_ranks = sharers.index(engine.topology.rank), len(sharers)
        self.is_first = engine.topology.rank == 0
        self.is_in_node = engine.update_scope == "node"
        self._layouts: dict[tuple[int, ...], list[PackedChunk]] = {}

    def add_up_(self, table: Tensor) -> None:
        """Add a tensor over the ranks, in place."""
        self._engine.submit(
            table.view(-1), bucket_index=0, exchange=self._exchange_named("sum")
        ).wait()

    def largest(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the largest magnitude in the tensors of all ranks, of which some may have none."""
        table = torch.zeros(self._num_ranks, device=self._engine.device)
        for tensor in tensors:
            if tensor.numel():
                table[self._rank] = torch.maximum(
                    table[self._rank], torch.linalg.vector_norm(tensor, float("inf"))
                )
        self.add_up_(table)
        return table.amax()

    @torch.no_grad()
    def gather_(
        self,
        shards: Sequence[ParameterShard],
        tensors: Sequence[Tensor],
        late: LateGather | None = None,
    ) -> None:
        """Complete tensors as large as parameters, of which each rank has its own part.

        `late` waits for them where they are read, in place of this call; until then all are in memory twice.
        """
        by_dtype: dict[torch.dtype, list[tuple[ParameterShard, Tensor]]] = {}
        for shard, tensor in zip(shards, tensors, strict=True):
            by_dtype.setdefault(tensor.dtype, []).append((shard, tensor))
        for some in by_dtype.values():
            rows = [flattened(tensor, shard.whole) for shard, tensor in some]
            own = [
                row.narrow(0, *_begin_and_length(shard))
                for row, (shard, _) in zip(rows, some, strict=True)
            ]
            self._exchange("gather", [shard for shard, _ in some], own, into=rows, late=late)

    @torch.no_grad()
    def collect(
        self, shards: Sequence[ParameterShard], own: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Return on rank zero, on the CPU, the whole of tensors of which each rank gives its own part."""
        wholes = None
        if self.is_first:
            each = zip(shards, own, strict=True)
            wholes = [
                torch.empty_like(shard.whole, dtype=part.dtype, device="cpu")
                for shard, part in each
            ]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(own):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        for some in by_dtype.values():
            rows = (
                None
                if wholes is None
                else [flattened(wholes[index], shards[index].whole) for index in some]
            )
            for row, index in zip(rows or (), some, strict=False):
                row.narrow(0, *_begin_and_length(shards[index])).copy_(own[index])
            self._exchange(
                "collect",
                [shards[index] for index in some],
                [own[index] for index in some],
                into=rows,
            )
        return wholes

    def _exchange(
        self,
        what: Literal["gather", "collect"],
        shards: Sequence[ParameterShard],
        own: Sequence[Tensor],
        into: Sequence[Tensor] | None,
        late: LateGather | None = None,
    ) -> None:
        layout = self._layout(shards, is_late=late is not None)
        under_way: deque[Future[Tensor]] = deque()
        # Not kept: between steps memory is what is to be saved.
        largest = max((chunk.numel for chunk in layout), default=0) * self._num_ranks
        memory = [
            own[0].new_zeros(largest, device=self._engine.device)
            for _ in (layout if late else layout[:2])
        ]
        for index, chunk in enumerate(layout):
            if not late and len(under_way) == 2:
                under_way.popleft().wait()  # its memory is used again
            flat = memory[index % len(memory)][: chunk.numel * self._num_ranks]
            begins = [shard.spans[self._rank][0] for shard in shards]
            slices = chunk.slices[self._rank]
            rows = self._rows(flat, chunk, self._rank)
            if rows:
                torch._foreach_copy_(
                    rows, [own[i][begin - begins[i] : end - begins[i]] for i, begin, end in slices]
                )
            finish = partial(self._put, chunk=chunk, into=into)
            waits = {"exchange": self._exchange_named(what), "is_in_update": None if late else True}
            under_way.append(self._engine.submit(flat, bucket_index=index, finish=finish, **waits))
            if late:
                late.add(
                    under_way.pop(),
                    [shards[i].parameter for some in chunk.slices for i, _, _ in some],
                )
        for future in under_way:
            future.wait()

    @torch.no_grad()
    def _put(self, flat: Tensor, *, chunk: PackedChunk, into: Sequence[Tensor] | None) -> Tensor:
        # Where the last stage ran: what others have sent goes to its places.
        for rank in range(self._num_ranks):
            slices = chunk.slices[rank]
            if into is not None and rank != self._rank and slices:
                places = [into[i][begin:end] for i, begin, end in slices]
                torch._foreach_copy_(places, self._rows(flat, chunk, rank))
        return flat

    def _rows(self, flat: Tensor, chunk: PackedChunk, rank: int) -> list[Tensor]:
        numels = [end - begin for _, begin, end in chunk.slices[rank]]
        return list(flat[rank * chunk.numel :][: sum(numels)].split(numels)) if numels else []

    def _exchange_named(self, what: str) -> Any:
        return f"{'node' if self.is_in_node else 'world'}_{what}"

    def _layout(self, shards: Sequence[ParameterShard], *, is_late: bool) -> list[PackedChunk]:
        key = (is_late, *map(id, shards))
        if key not in self._layouts:
            total = sum(shard.whole.numel() for shard in shards)
            # What comes first lets forward begin: some 16 chunks, of half a MiB at least in half precision.
            numel = min(CHUNK_NUMEL, max(total // 16, 1 << 18)) if is_late else CHUNK_NUMEL
            self._layouts[key] = chunks_of(
                [shard.spans for shard in shards], numel // self._num_ranks
            )
        return self._layouts[key]


def _begin_and_length(shard: ParameterShard) -> tuple[int, int]:
    begin, end = shard.spans[shard.rank]
    return begin, end - begin
