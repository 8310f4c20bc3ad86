"""Gloo collectives that send each message directly to its destination, in one round.

    reduce_to_first_    tensors of the other ranks -> the first rank, which adds them
    broadcast_          the first rank's tensor -> all other ranks
    scatter_reduce_     shard r of every tensor -> rank r, which adds them
    gather_parts_       shard r of rank r -> all other ranks
    collect_parts_      shard r of rank r -> the first rank
    exchange_           every tensor -> every rank, which adds them
    all_to_all_         tensor r of every rank -> rank r, unchanged

Each function is one round of messages, which are all in flight at the same time. It takes one
latency, whereas a Gloo ring takes 2 to 4 (n - 1) latencies. Tensors are added in rank order, so
that the result is bitwise equal on all ranks. 16-bit tensors are added in fp32 and rounded once,
whereas Gloo rounds at every hop. However, n messages at a time compete for a slow link. Between
nodes, Gloo's ring is therefore faster for large tensors. `between_nodes_form` makes the choice.

Collective: every rank of the group must call these functions, in the same order, with tensors of
the same size and dtype (1-D, contiguous, on the CPU). The group's timeout limits every wait. These
functions are not used with NCCL, whose own collectives are better.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.bucket_layout import ALIGNMENT

# Each stage thread has its own scratch memory, because collectives run at the same time.
_thread_local = threading.local()


def reduce_to_first_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Reduce a tensor over the group in place, with the sum only on the group's rank 0."""
    rank = dist.get_rank(group)
    if rank != 0:
        _send(flat, 0, group).wait()
        return

    num_senders = dist.get_world_size(group) - 1
    rows = scratch("rows", num_senders * flat.numel(), flat.dtype).view(num_senders, flat.numel())
    # All receives are posted before the first wait, so that messages can arrive at the same time.
    arrivals = [_receive(row, sender, group) for sender, row in enumerate(rows, start=1)]
    _add_up([flat, *rows], [None, *arrivals], out=flat)


def broadcast_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Broadcast a tensor from the group's rank 0 to all other ranks of the group, in place."""
    if dist.get_rank(group) != 0:
        _receive(flat, 0, group).wait()
        return
    _wait([_send(flat, rank, group) for rank in range(1, dist.get_world_size(group))])


def part_of(flat: Tensor, group: dist.ProcessGroup, alignment: int = ALIGNMENT) -> Tensor:
    """Return this rank's shard of a flat tensor, as a view that may be empty.

    Shards begin at multiples of `alignment` elements.
    """
    return _parts(flat, dist.get_world_size(group), alignment)[dist.get_rank(group)]


def scatter_reduce_(flat: Tensor, group: dist.ProcessGroup, alignment: int = ALIGNMENT) -> None:
    """Reduce-scatter a tensor in place, so that each rank holds the sum of its own shard.

    Other shards are unchanged.
    """
    rank = dist.get_rank(group)
    num_ranks = dist.get_world_size(group)
    parts = _parts(flat, num_ranks, alignment)
    part = parts[rank]

    buffer = scratch("rows", num_ranks * part.numel(), flat.dtype)
    rows = list(buffer.view(num_ranks, part.numel()))
    arrivals: list[dist.Work | None] = [None] * num_ranks
    if part.numel():
        for sender in range(num_ranks):
            if sender != rank:
                arrivals[sender] = _receive(rows[sender], sender, group)

    departures = []
    for receiver in _peers(rank, num_ranks):
        if parts[receiver].numel():
            departures.append(_send(parts[receiver], receiver, group))

    rows[rank] = part  # at its own index, because every rank adds in rank order
    _add_up(rows, arrivals, out=part)
    _wait(departures)


def gather_parts_(flat: Tensor, group: dist.ProcessGroup, alignment: int = ALIGNMENT) -> None:
    """All-gather a tensor in place, where each rank contributes its own shard."""
    rank = dist.get_rank(group)
    num_ranks = dist.get_world_size(group)
    parts = _parts(flat, num_ranks, alignment)
    peers = _peers(rank, num_ranks)
    works = [_receive(parts[peer], peer, group) for peer in peers if parts[peer].numel()]
    if parts[rank].numel():
        works += [_send(parts[rank], peer, group) for peer in peers]
    _wait(works)


def collect_parts_(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Gather the shards of all ranks on the group's rank 0, in place."""
    rank = dist.get_rank(group)
    works = []
    if rank != 0:
        if parts[rank].numel():
            works.append(_send(parts[rank], 0, group))
    else:
        for sender, part in enumerate(parts):
            if sender != 0 and part.numel():
                works.append(_receive(part, sender, group))
    _wait(works)


def exchange_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce a tensor in place by sending the whole tensor to every other rank of the group."""
    rank = dist.get_rank(group)
    num_ranks = dist.get_world_size(group)
    buffer = scratch("rows", num_ranks * flat.numel(), flat.dtype)
    rows = list(buffer.view(num_ranks, flat.numel()))

    arrivals: list[dist.Work | None] = [None] * num_ranks
    for sender in range(num_ranks):
        if sender != rank:
            arrivals[sender] = _receive(rows[sender], sender, group)
    departures = [_send(flat, peer, group) for peer in _peers(rank, num_ranks)]

    rows[rank] = flat  # at its own index, because every rank adds in rank order
    # The sends read `flat`, so they must be complete before the sum is written into it.
    _add_up(rows, arrivals, out=flat, before_writing=lambda: _wait(departures))


def all_to_all_(
    departures: Sequence[Tensor], arrivals: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """Exchange tensors with all ranks: send `departures[r]` to rank r, and receive `arrivals[r]`."""
    peers = _peers(dist.get_rank(group), dist.get_world_size(group))
    works = [_receive(arrivals[peer], peer, group) for peer in peers if arrivals[peer].numel()]
    works += [_send(departures[peer], peer, group) for peer in peers if departures[peer].numel()]
    _wait(works)


def _parts(flat: Tensor, num_parts: int, alignment: int = ALIGNMENT) -> list[Tensor]:
    """Split a tensor into consecutive views of equal length.

    The last views may be shorter, or empty.

    >>> [part.numel() for part in _parts(torch.zeros(40), 4)]
    [16, 16, 8, 0]
    """
    step = -(-flat.numel() // (num_parts * alignment)) * alignment
    return [flat[index * step : (index + 1) * step] for index in range(num_parts)]


def _peers(rank: int, num_ranks: int) -> list[int]:
    """Return all other ranks in cyclic order, beginning with the next rank.

    In this order, ranks do not all send to the same rank first.
    """
    return [(rank + distance) % num_ranks for distance in range(1, num_ranks)]


def _send(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> dist.Work:
    # The group's method takes the rank in the group, whereas `dist.isend(dst=...)` takes the global rank.
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
    """Add tensors in order, as they are received, and write the sum to `out`.

    Partial sums are kept in at least fp32, and rounded once. `out` may be one of the rows, so it is written
    after all rows are added, and after `before_writing` is called.
    """
    if len(rows) == 2:  # a single addition rounds once, in any dtype
        for work in arrivals:
            if work is not None:
                work.wait()
        before_writing()
        torch.add(rows[0], rows[1], out=out)
        return

    total = scratch("total", out.numel(), torch.promote_types(out.dtype, torch.float32))
    for index, (row, work) in enumerate(zip(rows, arrivals, strict=True)):
        if work is not None:
            work.wait()
        if index == 0:
            total.copy_(row)
        else:
            total.add_(row)
    before_writing()
    out.copy_(total)


def scratch(name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Return this thread's reusable scratch buffer with a given name.

    Buffers are reused, because allocating new memory pages takes more time than the computation. A buffer grows to the
    largest request for its name, and never shrinks.
    """
    buffers: dict[str, Tensor] = _thread_local.__dict__
    num_bytes = numel * dtype.itemsize
    if name not in buffers or buffers[name].numel() < num_bytes:
        buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
    return buffers[name][:num_bytes].view(dtype)
