"""The sum between nodes through the codec: fewer bytes, and the same bits on every rank.

    two ranks       exchange          every rank sends its message to the other, and adds up both
    more            scatter_reduce    every rank sends part r, encoded, to rank r, which adds them up in float32
                    gather            the owner of a part encodes its sum, and sends it to all others

Sums are in rank order. Only decoded messages are added up, a rank's own one too, and what the tensor holds at last is
decoded from messages that all ranks have: so all hold the same bits, and none depends on which rank owns a part. An
element is rounded once, or twice with more than two ranks. Sums of some of the ranks are never rounded, as in a ring.

Collective: every rank of the group must call it, in the same order, with tensors of the same size and dtype, in place.
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
    """Sum `flat` over the group in place; see above.

    `sender`: of which the noise of this rank's messages is a function. `by_backend`: by the backend's collectives, and
    no messages of our own.
    """
    values = flat
    if flat.dtype is not torch.float32:  # as blocks are
        values = _memory("values", flat.numel(), torch.float32, flat.device, by_backend).copy_(flat)
    size = dist.get_world_size(group)
    me = dist.get_rank(group)
    if size == 2:
        num_bytes = blocks.coder.codec.message_bytes(flat.numel())
        messages = _messages("messages", 2, num_bytes, flat.device, by_backend)
        blocks.encode(values, messages[me], sender=sender)
        _gather(messages, me, [num_bytes] * 2, group, by_backend)
        blocks.coder.add(messages, values)
    else:
        _sum_by_parts_(values, blocks, group, sender, by_backend)
    if values is not flat:
        flat.copy_(values)


def _sum_by_parts_(
    values: Tensor, blocks: Blocks, group: dist.ProcessGroup, sender: int, by_backend: bool
) -> None:
    coder = blocks.coder
    size = dist.get_world_size(group)
    me = dist.get_rank(group)
    numel = -(-num_blocks_of(values.numel()) // size) * BLOCK
    parts = [
        values[rank * numel : (rank + 1) * numel] for rank in range(size)
    ]  # the last may be shorter, or empty
    lengths = [coder.codec.message_bytes(part.numel()) for part in parts]
    # A row for each rank, of equal size as a backend asks; a shorter part leaves the end of its row unused.
    departures, arrivals, sums = (
        _messages(name, size, lengths[0], values.device, by_backend)
        for name in ("departures", "arrivals", "messages")
    )
    if by_backend:  # by one kernel, whatever the number of ranks
        blocks.encode(values, departures, sender=sender)
    for rank, part in enumerate(parts if not by_backend else []):
        if part.numel():
            blocks.since(rank * numel).encode(
                part, departures[rank, : lengths[rank]], sender=sender
            )
    _scatter(departures, arrivals, me, lengths, group, by_backend)
    if parts[me].numel():
        coder.add(arrivals[:, : lengths[me]], parts[me])
        blocks.since(me * numel).encode(parts[me], sums[me, : lengths[me]], sender=OF_A_SUM)
    _gather(sums, me, lengths, group, by_backend)
    if by_backend:
        coder.decode(sums, values)
    for rank, part in enumerate(parts if not by_backend else []):
        if part.numel():
            coder.add(sums[rank : rank + 1, : lengths[rank]], part)


def _scatter(
    departures: Tensor,
    arrivals: Tensor,
    me: int,
    lengths: list[int],
    group: dist.ProcessGroup,
    by_backend: bool,
) -> None:
    """Send row r of `departures` to rank r, into row `me` of its `arrivals`."""
    if by_backend:
        dist.all_to_all_single(arrivals.view(-1), departures.view(-1), group=group)
        return
    arrivals[me] = departures[me]
    sent = [row[:length] for row, length in zip(departures, lengths, strict=True)]
    gloo_p2p.all_to_all_(sent, [row[: lengths[me]] for row in arrivals], group)


def _gather(
    rows: Tensor, me: int, lengths: list[int], group: dist.ProcessGroup, by_backend: bool
) -> None:
    """Copy row r of rank r to all others."""
    if by_backend:
        all_gather(rows.view(-1), rows[me].clone(), group=group)
        return
    filled = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    gloo_p2p.all_to_all_([filled[me]] * len(filled), filled, group)


def _messages(
    name: str, num_rows: int, num_bytes: int, device: torch.device, by_backend: bool
) -> Tensor:
    return _memory(name, num_rows * num_bytes, torch.uint8, device, by_backend).view(
        num_rows, num_bytes
    )


def _memory(
    name: str, numel: int, dtype: torch.dtype, device: torch.device, by_backend: bool
) -> Tensor:
    # On the CPU memory of the thread; on CUDA the allocator has some that the stream used before.
    return (
        torch.empty(numel, dtype=dtype, device=device)
        if by_backend
        else gloo_p2p.scratch(name, numel, dtype)
    )
