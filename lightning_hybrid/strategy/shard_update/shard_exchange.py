"""All-gather of tensor shards among the ranks that share the update, in chunks of bounded size.

    chunk       | rank 0's elements | rank 1's elements | ...       of as many parameters as fit

Each rank packs its shards of all tensors, in the same order, into chunks of bounded size. While one chunk is exchanged,
the next one is packed, and received elements are copied to their tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
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

# Number of elements of a chunk, over all ranks. Two chunks are in memory: 16 MiB of half-precision weights.
CHUNK_NUMEL = 1 << 22

# Approximate number of chunks of a late gather. The forward pass begins as soon as the first one has arrived.
NUM_LATE_CHUNKS = 16
# Minimum number of elements of a chunk of a late gather, which is half a MiB in half precision.
MIN_LATE_NUMEL = 1 << 18

TensorSpan = tuple[int, int, int]
"""Index of a tensor in a list, and its elements from begin to end."""


@dataclass
class PackedChunk:
    """Layout of a chunk of packed tensor shards, in which the elements of rank r begin at `r * numel`.

    Attributes:
        numel: Number of elements of one rank, with padding.
        spans: For each rank, its tensor spans in the order in which they are packed.
    """

    numel: int = 0
    spans: list[list[TensorSpan]] = field(default_factory=list)


def chunks_of(spans: Sequence[Sequence[tuple[int, int]]], numel: int) -> list[PackedChunk]:
    """Divide tensor shards into chunks of up to `numel` elements per rank, and return their layouts.

    Args:
        spans: For each tensor, the begin and end of each rank's elements.
        numel: Maximum number of elements of one rank in a chunk.

    >>> [chunk.spans for chunk in chunks_of([[(0, 4), (4, 9)], [(2, 4), (0, 2)]], numel=6)]
    [[[(0, 0, 4), (1, 2, 4)], [(0, 4, 9), (1, 0, 1)]], [[], [(1, 1, 2)]]]
    """
    num_ranks = len(spans[0])
    pieces_by_rank = []
    for rank in range(num_ranks):
        spans_of_rank = [tensor_spans[rank] for tensor_spans in spans]
        pieces_by_rank.append(_cut(spans_of_rank, numel))

    chunks = []
    num_chunks = max(len(pieces) for pieces in pieces_by_rank)
    for index in range(num_chunks):
        chunk = PackedChunk()
        longest = 0
        for pieces in pieces_by_rank:
            chunk_spans = pieces[index] if index < len(pieces) else []
            chunk.spans.append(chunk_spans)
            longest = max(longest, _numel_of(chunk_spans))
        chunk.numel = -(-longest // PART_ALIGNMENT) * PART_ALIGNMENT
        chunks.append(chunk)
    return chunks


def _cut(spans: Sequence[tuple[int, int]], numel: int) -> list[list[TensorSpan]]:
    """Split one rank's tensor spans into pieces of `numel` elements, the last of which may be smaller."""
    pieces: list[list[TensorSpan]] = [[]]
    room = numel
    for index, (begin, end) in enumerate(spans):
        while begin < end:
            if room == 0:
                pieces.append([])
                room = numel
            length = min(room, end - begin)
            pieces[-1].append((index, begin, begin + length))
            begin += length
            room -= length
    return pieces


def _numel_of(spans: Iterable[TensorSpan]) -> int:
    return sum(end - begin for _, begin, end in spans)


class ShardExchange:
    """Collectives among the ranks that share the optimizer update.

    Collective: every rank that shares the update must call each method that sends tensors, in the same order. If the
    engine has failed, these methods raise its error.

    Attributes:
        rank: Index of this rank among the ranks that share the update.
        num_ranks: Number of ranks that share the update.
        is_first: Whether this is rank zero, which receives whole tensors for checkpoints.
        is_in_node: Whether the ranks of a node share the update. False: all ranks do.
    """

    def __init__(self, engine: CommEngine) -> None:
        self._engine = engine
        sharers = engine.topology.sharers(engine.update_scope)
        self.rank = sharers.index(engine.topology.rank)
        self.num_ranks = len(sharers)
        self.is_first = engine.topology.rank == 0
        self.is_in_node = engine.update_scope == "node"
        self._layouts: dict[tuple[int, ...], list[PackedChunk]] = {}

    def add_up_(self, table: Tensor) -> None:
        """All-reduce a tensor over the ranks that share the update, in place."""
        exchange = self._exchange_named("sum")
        self._wait_for(self._engine.submit(table.view(-1), bucket_index=0, exchange=exchange))

    def largest(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the largest absolute value in the tensors of all ranks.

        A rank may pass no tensors.
        """
        table = torch.zeros(self.num_ranks, device=self._engine.device)
        for tensor in tensors:
            if tensor.numel():
                magnitude = torch.linalg.vector_norm(tensor, float("inf"))
                table[self.rank] = torch.maximum(table[self.rank], magnitude)
        self.add_up_(table)
        return table.amax()

    @torch.no_grad()
    def gather_(
        self,
        shards: Sequence[ParameterShard],
        tensors: Sequence[Tensor],
        late: LateGather | None = None,
    ) -> None:
        """All-gather tensor shards in place, so that every rank holds the full tensors.

        Args:
            shards: Shards of the parameters.
            tensors: Tensors of the parameters' shapes. All elements are valid afterwards.
            late: Mode that makes readers of the tensors wait for them. Until the gather is complete, its buffers need
                as much memory as the tensors. None: this call waits.
        """
        for indices in _indices_by_dtype(tensors):
            shards_of_dtype = [shards[index] for index in indices]
            rows = []
            values = []
            for index in indices:
                row = flattened(tensors[index], shards[index].whole)
                rows.append(row)
                values.append(_part_of_row(row, shards[index]))
            self._exchange("gather", shards_of_dtype, values, rows, late=late)

    @torch.no_grad()
    def collect(
        self, shards: Sequence[ParameterShard], values: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Gather full tensors on rank zero's CPU from the shards of all ranks. Return None on other ranks.

        Args:
            shards: Shards of the parameters.
            values: For each shard, this rank's elements of a tensor, 1-D.
        """
        wholes = None
        if self.is_first:
            wholes = []
            for shard, value in zip(shards, values, strict=True):
                wholes.append(torch.empty_like(shard.whole, dtype=value.dtype, device="cpu"))

        for indices in _indices_by_dtype(values):
            rows = None
            if wholes is not None:
                rows = [flattened(wholes[index], shards[index].whole) for index in indices]
                for row, index in zip(rows, indices, strict=True):
                    _part_of_row(row, shards[index]).copy_(values[index])
            shards_of_dtype = [shards[index] for index in indices]
            values_of_dtype = [values[index] for index in indices]
            self._exchange("collect", shards_of_dtype, values_of_dtype, rows)
        return wholes

    def _exchange(
        self,
        kind: Literal["gather", "collect"],
        shards: Sequence[ParameterShard],
        values: Sequence[Tensor],
        rows: Sequence[Tensor] | None,
        late: LateGather | None = None,
    ) -> None:
        """Gather shards of tensors with one data type, on all ranks or on rank zero.

        Args:
            kind: `"gather"`: all ranks receive. `"collect"`: rank zero receives.
            shards: Shards of the parameters.
            values: This rank's elements of each tensor.
            rows: Full tensors, flattened, that receive the elements of other ranks. None: this rank receives nothing.
            late: As in `gather_`.
        """
        layout = self._layout(shards, is_late=late is not None)
        begins = [shard.spans[self.rank][0] for shard in shards]
        # The buffers are not kept between steps, to save memory. A late gather needs all of them at once.
        largest = max((chunk.numel for chunk in layout), default=0) * self.num_ranks
        num_buffers = min(len(layout), 2)
        if late is not None:
            num_buffers = len(layout)
        device = self._engine.device
        memory = [values[0].new_zeros(largest, device=device) for _ in range(num_buffers)]

        pending: deque[Future[Tensor]] = deque()
        for index, chunk in enumerate(layout):
            if len(pending) == 2:
                self._wait_for(pending.popleft())  # its buffer is used again
            flat = memory[index % num_buffers][: chunk.numel * self.num_ranks]
            packed_rows = self._packed_rows(flat, chunk, self.rank)
            if packed_rows:
                pieces = []
                for tensor_index, begin, end in chunk.spans[self.rank]:
                    offset = begins[tensor_index]
                    pieces.append(values[tensor_index][begin - offset : end - offset])
                torch._foreach_copy_(packed_rows, pieces)

            is_in_update = True if late is None else None
            future = self._engine.submit(
                flat,
                bucket_index=index,
                finish=partial(self._unpack, chunk=chunk, rows=rows),
                exchange=self._exchange_named(kind),
                is_in_update=is_in_update,
            )
            if late is None:
                pending.append(future)
            else:
                late.add(future, _parameters_in(chunk, shards))
        for future in pending:
            self._wait_for(future)

    def _wait_for(self, future: Future[Tensor]) -> None:
        with self._engine.trace.waiting():
            future.wait()

    @torch.no_grad()
    def _unpack(self, flat: Tensor, *, chunk: PackedChunk, rows: Sequence[Tensor] | None) -> Tensor:
        """Copy other ranks' elements from a received chunk into the full tensors.

        It runs on the stream or thread of the engine's last stage.
        """
        for rank, spans in enumerate(chunk.spans):
            if rows is not None and rank != self.rank and spans:
                destinations = [rows[index][begin:end] for index, begin, end in spans]
                torch._foreach_copy_(destinations, self._packed_rows(flat, chunk, rank))
        return flat

    def _packed_rows(self, flat: Tensor, chunk: PackedChunk, rank: int) -> list[Tensor]:
        """Return views of one rank's tensor spans in the memory of a chunk."""
        numels = [end - begin for _, begin, end in chunk.spans[rank]]
        if not numels:
            return []
        elements_of_rank = flat[rank * chunk.numel :]
        return list(elements_of_rank[: sum(numels)].split(numels))

    def _exchange_named(self, kind: Literal["sum", "gather", "collect"]) -> Any:
        """Return the name under which the engine knows a collective of the ranks that share the update."""
        if self.is_in_node:
            return f"node_{kind}"
        return f"world_{kind}"

    def _layout(self, shards: Sequence[ParameterShard], *, is_late: bool) -> list[PackedChunk]:
        key = (is_late, *map(id, shards))
        if key not in self._layouts:
            numel = CHUNK_NUMEL
            if is_late:
                total = sum(shard.whole.numel() for shard in shards)
                numel = min(CHUNK_NUMEL, max(total // NUM_LATE_CHUNKS, MIN_LATE_NUMEL))
            spans = [shard.spans for shard in shards]
            self._layouts[key] = chunks_of(spans, numel // self.num_ranks)
        return self._layouts[key]


def _indices_by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors, grouped by dtype.

    Groups are in the order in which their dtypes first occur.
    """
    indices: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.dtype, []).append(index)
    return list(indices.values())


def _part_of_row(row: Tensor, shard: ParameterShard) -> Tensor:
    """Return a view of this rank's elements in a flattened full tensor."""
    begin, end = shard.spans[shard.rank]
    return row.narrow(0, begin, end - begin)


def _parameters_in(chunk: PackedChunk, shards: Sequence[ParameterShard]) -> list[Tensor]:
    """Return the parameters that have elements in a chunk, possibly with repetitions."""
    parameters: list[Tensor] = []
    for spans in chunk.spans:
        for index, _, _ in spans:
            parameters.append(shards[index].parameter)
    return parameters
