"""Sums and copies over host memory by messages that go straight to where they are needed.

    reduce_to_first_    others' tensors -> the first rank, which adds them
    broadcast_          the first rank's tensor -> all others
    scatter_reduce_     part r of every tensor -> rank r, which adds them
    gather_parts_       part r of rank r -> all others
    collect_parts_      part r of rank r -> the first rank
    exchange_           every tensor -> every rank, which adds them
    all_to_all_         tensor r of every rank -> rank r, as it is

Each is one round of messages, all under way at once: one delay, where Gloo's rings cost 2 to 4 (n - 1). Sums are in
rank order, so that all ranks get the same bits, and 16-bit tensors are added in fp32 and rounded once, where Gloo
rounds at every hop. n messages at a time into one slow link crowd each other, so large tensors between nodes are better
off in Gloo's ring (`between_nodes_form` chooses).

Collective: every rank of the group must call them, in the same order, with tensors of the same size and dtype (1-D,
contiguous, on the CPU). Waits are limited by the group's timeout. Not for NCCL, whose own are better.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.bucket_layout import ALIGNMENT

# Each stage thread has memory of its own, so two sums at the same time share none.
_thread_local = threading.local()


def reduce_to_first_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `flat` over the group into that of its rank 0; the others stay."""
    me = dist.get_rank(group)
    size = dist.get_world_size(group)
    if me:
        _send(flat, 0, group).wait()
        return
    arrived = scratch("rows", (size - 1) * flat.numel(), flat.dtype).view(size - 1, flat.numel())
    # All receives are posted before any is waited for, so that messages arrive at the same time.
    arrivals = [_receive(row, rank, group) for rank, row in enumerate(arrived, 1)]
    _add_up([flat, *arrived], [None, *arrivals], out=flat)


def broadcast_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Copy `flat` of the group's rank 0 to all others."""
    if dist.get_rank(group):
        _receive(flat, 0, group).wait()
    else:
        _wait([_send(flat, rank, group) for rank in range(1, dist.get_world_size(group))])


def part_of(flat: Tensor, group: dist.ProcessGroup, alignment: int = ALIGNMENT) -> Tensor:
    """Return this rank's part of `flat`, a view; it may be empty. Parts begin at multiples of `alignment` elements."""
    return _parts(flat, dist.get_world_size(group), alignment)[dist.get_rank(group)]


def scatter_reduce_(flat: Tensor, group: dist.ProcessGroup, alignment: int = ALIGNMENT) -> None:
    """Sum each rank's `part_of(flat)` over the group, in its place; other parts stay."""
    me = dist.get_rank(group)
    size = dist.get_world_size(group)
    parts = _parts(flat, size, alignment)
    numel = parts[me].numel()
    rows = list(scratch("rows", size * numel, flat.dtype).view(size, numel))
    arrivals = [
        _receive(rows[rank], rank, group) if rank != me and numel else None for rank in range(size)
    ]
    departures = [
        _send(parts[rank], rank, group) for rank in _others(me, size) if parts[rank].numel()
    ]
    rows[me] = parts[me]  # in its place: sums are in rank order on every rank
    _add_up(rows, arrivals, out=parts[me])
    _wait(departures)


def gather_parts_(flat: Tensor, group: dist.ProcessGroup, alignment: int = ALIGNMENT) -> None:
    """Copy each rank's `part_of(flat)` to all others."""
    me = dist.get_rank(group)
    size = dist.get_world_size(group)
    parts = _parts(flat, size, alignment)
    others = _others(me, size)
    arrivals = [_receive(parts[rank], rank, group) for rank in others if parts[rank].numel()]
    departures = [_send(parts[me], rank, group) for rank in others if parts[me].numel()]
    _wait(arrivals + departures)


def collect_parts_(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Copy `parts[r]` of each rank r to the group's rank 0."""
    if me := dist.get_rank(group):
        _wait([_send(parts[me], 0, group)] if parts[me].numel() else [])
    else:
        _wait(
            [
                _receive(part, rank, group)
                for rank, part in enumerate(parts)
                if rank and part.numel()
            ]
        )


def exchange_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `flat` over the group on every rank; each sends (n - 1) times its bytes."""
    me = dist.get_rank(group)
    size = dist.get_world_size(group)
    rows = list(scratch("rows", size * flat.numel(), flat.dtype).view(size, flat.numel()))
    arrivals = [None if rank == me else _receive(rows[rank], rank, group) for rank in range(size)]
    departures = [_send(flat, rank, group) for rank in _others(me, size)]
    rows[me] = flat  # in its place: sums are in rank order on every rank
    # The sends read `flat`: they must be through before the sum is written into it.
    _add_up(rows, arrivals, out=flat, before_writing=lambda: _wait(departures))


def all_to_all_(
    departures: Sequence[Tensor], arrivals: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """Send `departures[r]` to rank r, and receive `arrivals[r]` from it; what a rank has for itself stays."""
    me = dist.get_rank(group)
    others = _others(me, dist.get_world_size(group))
    works = [_receive(arrivals[rank], rank, group) for rank in others if arrivals[rank].numel()]
    works += [_send(departures[rank], rank, group) for rank in others if departures[rank].numel()]
    _wait(works)


def _parts(flat: Tensor, size: int, alignment: int = ALIGNMENT) -> list[Tensor]:
    """Split into `size` consecutive views of equal length; the last ones may be shorter, or empty.

    >>> [part.numel() for part in _parts(torch.zeros(40), 4)]
    [16, 16, 8, 0]
    """
    step = -(-flat.numel() // (size * alignment)) * alignment
    return [flat[rank * step : (rank + 1) * step] for rank in range(size)]


def _others(me: int, size: int) -> list[int]:
    # The nearest above first: so not all ranks begin by sending to the same one.
    return [(me + distance) % size for distance in range(1, size)]


def _send(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> dist.Work:
    # The group's own method takes the rank in the group, where `dist.isend(dst=...)` takes the global one.
    return group.send([tensor], rank, 0)


def _receive(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> dist.Work:
    return group.recv([tensor], rank, 0)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _add_up(
    rows: Sequence[Tensor],
    arrivals: Sequence[dist.Work | None],
    *,
    out: Tensor,
    before_writing: Callable[[], None] = lambda: None,
) -> None:
    """Add the rows, in their order and each as soon as it has arrived, at least in fp32; round once, into `out`."""
    # `out` may be one of the rows: nothing is written there before all are added up.
    waits = iter(arrivals)

    def arrived(row: Tensor) -> Tensor:
        if (work := next(waits)) is not None:
            work.wait()
        return row

    if len(rows) == 2:  # one addition, hence one rounding, in any dtype
        first = arrived(rows[0])
        second = arrived(rows[1])
        before_writing()
        torch.add(first, second, out=out)
        return
    total = scratch("total", out.numel(), torch.promote_types(out.dtype, torch.float32))
    for index, row in enumerate(rows):
        total.copy_(arrived(row)) if index == 0 else total.add_(arrived(row))
    before_writing()
    out.copy_(total)


def scratch(name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Return memory that this thread uses again and again: fresh pages cost more than what is done in them."""
    held: dict[str, Tensor] = _thread_local.__dict__
    num_bytes = numel * dtype.itemsize
    if name not in held or held[name].numel() < num_bytes:
        held[name] = torch.empty(
            num_bytes, dtype=torch.uint8
        )  # grows to the largest, never shrinks
    return held[name][:num_bytes].view(dtype)
