"""Compressed all-reduce between nodes, with bitwise equal results on all ranks.

    two ranks       exchange          every rank sends its encoded tensor to the other rank, and adds both
    more            scatter_reduce    every rank sends shard r, encoded, to rank r, which adds the shards in fp32
                    gather            the owner of a shard encodes its sum, and sends it to all other ranks

Messages are added in rank order. A rank adds only decoded messages, including its own, and decodes
the result from messages that all ranks hold. Therefore the result is bitwise equal on all ranks, and
it does not depend on which rank owns a shard. An element is rounded once with two ranks and twice
with more ranks. Unlike in a ring, partial sums are never rounded.

Collective: every rank of the group must call it, in the same order, with tensors of the same size
and dtype. The result is written in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import BLOCK, OF_A_SUM, num_blocks_of
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.comm.engine import gloo_p2p
from lightning_hybrid.comm.engine.node_exchange import all_gather


def sum_coded_(
    flat: Tensor, blocks: Blocks, group: dist.ProcessGroup, *, sender: int, by_backend: bool
) -> None:
    """All-reduce a tensor over the group in place, with messages compressed by a codec.

    Collective: every rank of the group must call it, in the same order.

    Args:
        flat: Tensor of this rank, of any floating dtype. Blocks are encoded from fp32.
        blocks: Encoder of the blocks of `flat`, with the step and bucket that its noise depends on.
        group: Process group of the all-reduce.
        sender: Number that the rounding noise of this rank's messages depends on.
        by_backend: Whether to use collectives of the backend, rather than our own messages.
    """
    collectives = _RowCollectives(group, flat.device, by_backend=by_backend)
    values = flat
    if flat.dtype is not torch.float32:
        values = collectives.buffer("values", flat.numel(), torch.float32)
        values.copy_(flat)

    if collectives.num_ranks == 2:
        _exchange_(values, blocks, sender, collectives)
    else:
        _scatter_and_gather_(values, blocks, sender, collectives)

    if values is not flat:
        flat.copy_(values)


def _exchange_(values: Tensor, blocks: Blocks, sender: int, collectives: _RowCollectives) -> None:
    """All-reduce a tensor over two ranks, which exchange the whole encoded tensor."""
    coder = blocks.coder
    num_bytes = coder.codec.message_bytes(values.numel())
    messages = collectives.rows("messages", num_bytes)
    own_message = messages[collectives.rank]
    blocks.encode(values, own_message, sender=sender)
    lengths = [num_bytes, num_bytes]
    collectives.gather(messages, lengths)
    coder.add(messages, values)


def _scatter_and_gather_(
    values: Tensor, blocks: Blocks, sender: int, collectives: _RowCollectives
) -> None:
    """All-reduce a tensor over three or more ranks by a compressed reduce-scatter and all-gather."""
    shards = _shards(values, blocks, collectives.num_ranks)
    own_shard = shards[collectives.rank]
    lengths = [shard.num_bytes for shard in shards]

    # Each rank has a row. All rows have the same size, because backends require it. If a shard is
    # shorter, the end of its row is unused.
    row_bytes = lengths[0]
    departures = collectives.rows("departures", row_bytes)
    arrivals = collectives.rows("arrivals", row_bytes)
    sums = collectives.rows("messages", row_bytes)

    if collectives.by_backend:
        # One kernel encodes all shards, for any number of ranks.
        blocks.encode(values, departures, sender=sender)
    else:
        for shard, row in zip(shards, departures, strict=True):
            shard.encode(row, sender=sender)
    collectives.scatter(departures, arrivals, lengths)

    own_sum = sums[collectives.rank]
    own_shard.decode_sum(arrivals)
    own_shard.encode(own_sum, sender=OF_A_SUM)
    collectives.gather(sums, lengths)

    if collectives.by_backend:
        blocks.coder.decode(sums, values)
    else:
        for owner, shard in enumerate(shards):
            row_of_owner = sums[owner : owner + 1]
            shard.decode_sum(row_of_owner)


@dataclass(frozen=True)
class _Shard:
    """Shard of a tensor that one rank sums over all ranks.

    Attributes:
        values: View of the shard's elements, which may be empty.
        begin: Index of the first element in the tensor.
        blocks: Encoder of the blocks of the whole tensor.
        num_bytes: Size of the encoded shard.
    """

    values: Tensor
    begin: int
    blocks: Blocks
    num_bytes: int

    def encode(self, row: Tensor, *, sender: int) -> None:
        """Encode the shard into the beginning of a row."""
        if self.values.numel() > 0:
            blocks = self.blocks.since(self.begin)
            message = row[: self.num_bytes]
            blocks.encode(self.values, message, sender=sender)

    def decode_sum(self, rows: Tensor) -> None:
        """Decode the message at the beginning of each row, and write their sum into the shard."""
        if self.values.numel() > 0:
            coder = self.blocks.coder
            messages = rows[:, : self.num_bytes]
            coder.add(messages, self.values)


def _shards(values: Tensor, blocks: Blocks, num_shards: int) -> list[_Shard]:
    """Split a tensor into shards of complete blocks.

    The last shards may be shorter, or empty.
    """
    codec = blocks.coder.codec
    num_blocks = num_blocks_of(values.numel())
    blocks_per_shard = -(-num_blocks // num_shards)
    shard_numel = blocks_per_shard * BLOCK

    shards = []
    for index in range(num_shards):
        begin = index * shard_numel
        elements = values[begin : begin + shard_numel]
        numel = elements.numel()
        num_bytes = codec.message_bytes(numel)
        shard = _Shard(elements, begin, blocks, num_bytes)
        shards.append(shard)
    return shards


class _RowCollectives:
    """Collectives on matrices of bytes, which have a row for each rank.

    Args:
        group: Process group of the collectives.
        device: Device of the matrices.
        by_backend: Whether to use collectives of the backend, rather than our own messages.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, by_backend: bool) -> None:
        self.by_backend = by_backend
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._group = group
        self._device = device

    def scatter(self, departures: Tensor, arrivals: Tensor, lengths: list[int]) -> None:
        """Exchange rows with all ranks: send row r to rank r, and receive one row from each rank.

        Collective: every rank of the group must call it, in the same order.

        Args:
            departures: Matrix of the rows to send.
            arrivals: Matrix of the rows to receive.
            lengths: Number of bytes that each rank receives in a row. The rest of the row is unused.
        """
        if self.by_backend:
            outgoing_bytes = departures.view(-1)
            incoming_bytes = arrivals.view(-1)
            dist.all_to_all_single(incoming_bytes, outgoing_bytes, group=self._group)
            return

        rank = self.rank
        arrivals[rank] = departures[rank]
        outgoing = _used_parts(departures, lengths)
        own_length = lengths[rank]
        incoming = [row[:own_length] for row in arrivals]
        gloo_p2p.all_to_all_(outgoing, incoming, self._group)

    def gather(self, rows: Tensor, lengths: list[int]) -> None:
        """All-gather the rows of a matrix in place, where rank r contributes row r.

        Collective: every rank of the group must call it, in the same order.

        Args:
            rows: Matrix with the row of this rank.
            lengths: Number of bytes that are used in each row.
        """
        if self.by_backend:
            own_row = rows[self.rank].clone()
            all_rows = rows.view(-1)
            all_gather(all_rows, own_row, group=self._group)
            return

        messages = _used_parts(rows, lengths)
        own_message = messages[self.rank]
        outgoing = [own_message] * self.num_ranks
        gloo_p2p.all_to_all_(outgoing, messages, self._group)

    def rows(self, name: str, row_bytes: int) -> Tensor:
        """Return an uninitialized matrix of bytes with a row for each rank."""
        num_bytes = self.num_ranks * row_bytes
        flat = self.buffer(name, num_bytes, torch.uint8)
        return flat.view(self.num_ranks, row_bytes)

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory: a scratch buffer of this thread, or a new tensor on CUDA."""
        if self.by_backend:
            return torch.empty(numel, dtype=dtype, device=self._device)
        return gloo_p2p.scratch(name, numel, dtype)


def _used_parts(rows: Tensor, lengths: list[int]) -> list[Tensor]:
    parts = []
    for row, length in zip(rows, lengths, strict=True):
        used_part = row[:length]
        parts.append(used_part)
    return parts
