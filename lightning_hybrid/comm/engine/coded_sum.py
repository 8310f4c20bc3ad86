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
    values = flat
    if flat.dtype is not torch.float32:
        values = _buffer("values", flat.numel(), torch.float32, flat.device, by_backend)
        values.copy_(flat)

    if dist.get_world_size(group) == 2:
        _exchange_(values, blocks, group, sender, by_backend)
    else:
        _sum_by_parts_(values, blocks, group, sender, by_backend)

    if values is not flat:
        flat.copy_(values)


def _exchange_(
    values: Tensor, blocks: Blocks, group: dist.ProcessGroup, sender: int, by_backend: bool
) -> None:
    """All-reduce a tensor over two ranks, which exchange the whole encoded tensor."""
    rank = dist.get_rank(group)
    num_bytes = blocks.coder.codec.message_bytes(values.numel())
    messages = _messages("messages", 2, num_bytes, values.device, by_backend)
    blocks.encode(values, messages[rank], sender=sender)
    _gather(messages, rank, [num_bytes] * 2, group, by_backend)
    blocks.coder.add(messages, values)


def _sum_by_parts_(
    values: Tensor, blocks: Blocks, group: dist.ProcessGroup, sender: int, by_backend: bool
) -> None:
    """All-reduce a tensor over three or more ranks by a compressed reduce-scatter and all-gather."""
    coder = blocks.coder
    num_ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)

    # Shards consist of complete blocks. The last shards may be shorter, or empty.
    part_numel = -(-num_blocks_of(values.numel()) // num_ranks) * BLOCK
    parts = [values[r * part_numel : (r + 1) * part_numel] for r in range(num_ranks)]
    lengths = [coder.codec.message_bytes(part.numel()) for part in parts]

    # Each rank has a row. All rows have the same size, because backends require it. If a shard is
    # shorter, the end of its row is unused.
    device = values.device
    departures = _messages("departures", num_ranks, lengths[0], device, by_backend)
    arrivals = _messages("arrivals", num_ranks, lengths[0], device, by_backend)
    sums = _messages("messages", num_ranks, lengths[0], device, by_backend)

    if by_backend:
        # One kernel encodes all shards, for any number of ranks.
        blocks.encode(values, departures, sender=sender)
    else:
        for r, part in enumerate(parts):
            if part.numel():
                part_blocks = blocks.since(r * part_numel)
                part_blocks.encode(part, departures[r, : lengths[r]], sender=sender)
    _scatter(departures, arrivals, rank, lengths, group, by_backend)

    if parts[rank].numel():
        coder.add(arrivals[:, : lengths[rank]], parts[rank])
        own_blocks = blocks.since(rank * part_numel)
        own_blocks.encode(parts[rank], sums[rank, : lengths[rank]], sender=OF_A_SUM)
    _gather(sums, rank, lengths, group, by_backend)

    if by_backend:
        coder.decode(sums, values)
    else:
        for r, part in enumerate(parts):
            if part.numel():
                coder.add(sums[r : r + 1, : lengths[r]], part)


def _scatter(
    departures: Tensor,
    arrivals: Tensor,
    rank: int,
    lengths: list[int],
    group: dist.ProcessGroup,
    by_backend: bool,
) -> None:
    """Exchange rows with all ranks: send row r to rank r, and receive one row from each rank."""
    if by_backend:
        dist.all_to_all_single(arrivals.view(-1), departures.view(-1), group=group)
        return
    arrivals[rank] = departures[rank]
    outgoing = [row[:length] for row, length in zip(departures, lengths, strict=True)]
    incoming = [row[: lengths[rank]] for row in arrivals]
    gloo_p2p.all_to_all_(outgoing, incoming, group)


def _gather(
    rows: Tensor, rank: int, lengths: list[int], group: dist.ProcessGroup, by_backend: bool
) -> None:
    """All-gather the rows of a matrix in place, where rank r contributes row r."""
    if by_backend:
        all_gather(rows.view(-1), rows[rank].clone(), group=group)
        return
    messages = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    gloo_p2p.all_to_all_([messages[rank]] * len(messages), messages, group)


def _messages(
    name: str, num_rows: int, num_bytes: int, device: torch.device, by_backend: bool
) -> Tensor:
    flat = _buffer(name, num_rows * num_bytes, torch.uint8, device, by_backend)
    return flat.view(num_rows, num_bytes)


def _buffer(
    name: str, numel: int, dtype: torch.dtype, device: torch.device, by_backend: bool
) -> Tensor:
    """Return uninitialised memory: a scratch buffer of this thread, or a new tensor on CUDA."""
    if by_backend:
        return torch.empty(numel, dtype=dtype, device=device)
    return gloo_p2p.scratch(name, numel, dtype)
