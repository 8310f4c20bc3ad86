"""All-gather of tensor shards among the ranks that share the update, in chunks of bounded size.

    chunk       | rank 0's elements | rank 1's elements | ...       of as many parameters as fit

Each rank packs its shards of all tensors, in the same order, into chunks of bounded size. While one chunk is exchanged,
the next one is packed, and received elements are copied to their tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

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


class TensorSpan(NamedTuple):
    """Range of elements of one of several tensors.

    Attributes:
        tensor: Index of the tensor in the list of tensors.
        begin: First element.
        end: One past the last element.
    """

    tensor: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements of the range."""
        return self.end - self.begin

    def of(self, rows: Sequence[Tensor]) -> Tensor:
        """Return a view of the range in its tensor, given all tensors, each flattened."""
        row = rows[self.tensor]
        return row[self.begin : self.end]


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

    >>> chunks = chunks_of([[(0, 4), (4, 9)], [(2, 4), (0, 2)]], numel=6)
    >>> chunks[0].spans[1]  # rank 1 has 7 elements, of which 6 fit into the first chunk
    [TensorSpan(tensor=0, begin=4, end=9), TensorSpan(tensor=1, begin=0, end=1)]
    >>> chunks[1].spans
    [[], [TensorSpan(tensor=1, begin=1, end=2)]]
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
            numel_of_rank = sum(span.numel for span in chunk_spans)
            longest = max(longest, numel_of_rank)
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
            span = TensorSpan(index, begin, begin + length)
            pieces[-1].append(span)
            begin += length
            room -= length
    return pieces


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
        flat = table.view(-1)
        exchange = self._exchange_named("sum")
        future = self._engine.submit(flat, bucket_index=0, exchange=exchange)
        self._wait_for(future)

    def largest(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the largest absolute value in the tensors of all ranks.

        A rank may pass no tensors.
        """
        # Each rank writes its own element, so the sum over ranks holds the values of all ranks.
        table = torch.zeros(self.num_ranks, device=self._engine.device)
        for tensor in tensors:
            if tensor.numel():
                magnitude = torch.linalg.vector_norm(tensor, torch.inf)
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
                value = _part_of_row(row, shards[index])
                rows.append(row)
                values.append(value)
            self._exchange("gather", shards_of_dtype, values, rows, late=late)

    @torch.no_grad()
    def collect(
        self, shards: Sequence[ParameterShard], values: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Gather full tensors from the shards of all ranks on the CPU of rank zero. Return None on other ranks.

        Args:
            shards: Shards of the parameters.
            values: For each shard, this rank's elements of a tensor, 1-D.
        """
        wholes = None
        if self.is_first:
            wholes = []
            for shard, value in zip(shards, values, strict=True):
                whole = torch.empty_like(shard.whole, dtype=value.dtype, device="cpu")
                wholes.append(whole)

        for indices in _indices_by_dtype(values):
            rows = None
            if wholes is not None:
                rows = []
                for index in indices:
                    row = flattened(wholes[index], shards[index].whole)
                    _part_of_row(row, shards[index]).copy_(values[index])
                    rows.append(row)
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
        # The buffers are not kept between steps, to save memory. A late gather needs all of them at once.
        longest = max((chunk.numel for chunk in layout), default=0)
        buffer_numel = longest * self.num_ranks
        num_buffers = min(len(layout), 2)
        if late is not None:
            num_buffers = len(layout)
        device = self._engine.device
        buffers = [values[0].new_zeros(buffer_numel, device=device) for _ in range(num_buffers)]

        is_in_update: bool | None = True
        if late is not None:
            is_in_update = None  # the optimizer step does not wait for the result
        pending: deque[Future[Tensor]] = deque()
        for index, chunk in enumerate(layout):
            if len(pending) == 2:
                self._wait_for(pending.popleft())  # because its buffer is reused
            buffer = buffers[index % num_buffers]
            flat = buffer[: chunk.numel * self.num_ranks]
            self._pack(flat, chunk, shards, values)
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

    def _pack(
        self,
        flat: Tensor,
        chunk: PackedChunk,
        shards: Sequence[ParameterShard],
        values: Sequence[Tensor],
    ) -> None:
        """Copy this rank's elements into the memory of a chunk."""
        pieces = []
        for span in chunk.spans[self.rank]:
            # Spans count the elements of the full tensor, and `values` hold this rank's elements only.
            offset, _ = shards[span.tensor].spans[self.rank]
            value = values[span.tensor]
            pieces.append(value[span.begin - offset : span.end - offset])
        if pieces:
            packed_pieces = self._packed_pieces(flat, chunk, self.rank)
            torch._foreach_copy_(packed_pieces, pieces)

    @torch.no_grad()
    def _unpack(self, flat: Tensor, *, chunk: PackedChunk, rows: Sequence[Tensor] | None) -> Tensor:
        """Copy other ranks' elements from a received chunk into the full tensors.

        It runs on the stream or thread of the engine's last stage.
        """
        if rows is None:
            return flat
        for rank, spans in enumerate(chunk.spans):
            if rank == self.rank or not spans:
                continue
            destinations = [span.of(rows) for span in spans]
            packed_pieces = self._packed_pieces(flat, chunk, rank)
            torch._foreach_copy_(destinations, packed_pieces)
        return flat

    def _packed_pieces(self, flat: Tensor, chunk: PackedChunk, rank: int) -> list[Tensor]:
        """Return views of one rank's tensor spans in the memory of a chunk. The rank must have at least one span."""
        numels = [span.numel for span in chunk.spans[rank]]
        begin = rank * chunk.numel
        end = begin + sum(numels)
        return list(flat[begin:end].split(numels))

    def _exchange_named(self, kind: Literal["sum", "gather", "collect"]) -> Any:
        """Return the name under which the engine knows a collective of the ranks that share the update."""
        if self.is_in_node:
            return f"node_{kind}"
        return f"world_{kind}"

    def _layout(self, shards: Sequence[ParameterShard], *, is_late: bool) -> list[PackedChunk]:
        shard_ids = map(id, shards)
        key = (is_late, *shard_ids)
        if key not in self._layouts:
            numel = CHUNK_NUMEL
            if is_late:
                numel = _late_chunk_numel(shards)
            spans = [shard.spans for shard in shards]
            self._layouts[key] = chunks_of(spans, numel // self.num_ranks)
        return self._layouts[key]


def _late_chunk_numel(shards: Sequence[ParameterShard]) -> int:
    """Return the chunk size of a late gather in elements, over all ranks."""
    total = sum(shard.whole.numel() for shard in shards)
    numel = total // NUM_LATE_CHUNKS
    numel = max(numel, MIN_LATE_NUMEL)
    return min(numel, CHUNK_NUMEL)


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
        for span in spans:
            shard = shards[span.tensor]
            parameters.append(shard.parameter)
    return parameters
