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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.bucket_sizes import ALIGNMENT

# Each stage thread has its own scratch memory, because collectives run at the same time.
_thread_local = threading.local()


def reduce_to_first_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a tensor over the group in place, with the result only on the group's rank 0."""
    links = _Links(group)
    if links.rank != 0:
        links.send(flat, 0).wait()
        return

    rows = links.receive_rows(flat)
    _add_up(rows, out=flat)


def broadcast_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Broadcast a tensor from the group's rank 0 to all other ranks of the group, in place."""
    links = _Links(group)
    if links.rank != 0:
        links.receive(flat, 0).wait()
        return
    departures = links.send_to_all(flat)
    _wait(departures)


def part_of(flat: Tensor, group: dist.ProcessGroup, alignment: int = ALIGNMENT) -> Tensor:
    """Return this rank's shard of a flat tensor, as a view that may be empty.

    Shards begin at multiples of `alignment` elements.
    """
    num_ranks = dist.get_world_size(group)
    parts = _parts(flat, num_ranks, alignment)
    return parts[dist.get_rank(group)]


def scatter_reduce_(flat: Tensor, group: dist.ProcessGroup, alignment: int = ALIGNMENT) -> None:
    """Reduce-scatter a tensor in place, so that each rank holds the sum of its own shard.

    Other shards are unchanged.
    """
    links = _Links(group)
    parts = _parts(flat, links.num_ranks, alignment)
    part = parts[links.rank]

    rows: list[_Row] = []
    if part.numel() > 0:
        rows = links.receive_rows(part)
    departures = links.send_each(parts)

    if rows:
        _add_up(rows, out=part)
    _wait(departures)


def gather_parts_(flat: Tensor, group: dist.ProcessGroup, alignment: int = ALIGNMENT) -> None:
    """All-gather a tensor in place, where each rank contributes its own shard."""
    num_ranks = dist.get_world_size(group)
    parts = _parts(flat, num_ranks, alignment)
    own_part = parts[dist.get_rank(group)]
    all_to_all_([own_part] * num_ranks, parts, group)


def collect_parts_(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Gather the shards of all ranks on the group's rank 0, in place."""
    links = _Links(group)
    if links.rank != 0:
        own_part = parts[links.rank]
        if own_part.numel() > 0:
            links.send(own_part, 0).wait()
        return

    arrivals = []
    for sender, part in enumerate(parts):
        if sender != 0 and part.numel() > 0:
            arrivals.append(links.receive(part, sender))
    _wait(arrivals)


def exchange_(flat: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce a tensor in place by sending the whole tensor to every other rank of the group."""
    links = _Links(group)
    rows = links.receive_rows(flat)
    departures = links.send_to_all(flat)
    _add_up(rows, out=flat, sends_of_out=departures)


def all_to_all_(
    departures: Sequence[Tensor], arrivals: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """Exchange tensors with all ranks: send `departures[r]` to rank r, and receive `arrivals[r]`."""
    links = _Links(group)
    works = []
    for peer in links.peers():
        tensor = arrivals[peer]
        if tensor.numel() > 0:
            works.append(links.receive(tensor, peer))
    works += links.send_each(departures)
    _wait(works)


@dataclass(frozen=True)
class _Row:
    """Tensor of one rank, which may still be in transit.

    Attributes:
        tensor: Tensor of the rank.
        arrival: Operation that receives the tensor, or None for this rank's own tensor.
    """

    tensor: Tensor
    arrival: dist.Work | None = None

    def received(self) -> Tensor:
        """Wait until the tensor has been received, and return it."""
        if self.arrival is not None:
            self.arrival.wait()
        return self.tensor


class _Links:
    """Connections of this rank to the other ranks of a group, which are numbered within the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._group = group

    def send(self, tensor: Tensor, receiver: int) -> dist.Work:
        """Start sending a tensor to a rank."""
        # The group's method takes the rank in the group, whereas `dist.isend(dst=...)` takes the global rank.
        return self._group.send([tensor], receiver, 0)

    def receive(self, tensor: Tensor, sender: int) -> dist.Work:
        """Start receiving a tensor from a rank."""
        return self._group.recv([tensor], sender, 0)

    def peers(self) -> list[int]:
        """Return all other ranks in cyclic order, beginning with the next rank.

        In this order, ranks do not all send to the same rank first.
        """
        peers = []
        for distance in range(1, self.num_ranks):
            peer = (self.rank + distance) % self.num_ranks
            peers.append(peer)
        return peers

    def send_to_all(self, tensor: Tensor) -> list[dist.Work]:
        """Start sending a tensor to every other rank."""
        return [self.send(tensor, peer) for peer in self.peers()]

    def send_each(self, departures: Sequence[Tensor]) -> list[dist.Work]:
        """Start sending `departures[r]` to each other rank r, unless it is empty."""
        works = []
        for peer in self.peers():
            tensor = departures[peer]
            if tensor.numel() > 0:
                works.append(self.send(tensor, peer))
        return works

    def receive_rows(self, own: Tensor) -> list[_Row]:
        """Start receiving a tensor from every other rank, and return the tensors of all ranks in rank order.

        All receives are posted before the first wait, so that messages can arrive at the same time.

        Args:
            own: Tensor of this rank, 1-D. The other tensors have its size and dtype, and are in scratch memory.
        """
        num_peers = self.num_ranks - 1
        numel = own.numel()
        buffer = scratch("rows", num_peers * numel, own.dtype)
        tensors = list(buffer.view(num_peers, numel))
        tensors.insert(self.rank, own)

        rows = []
        for rank, tensor in enumerate(tensors):
            arrival = None
            if rank != self.rank:
                arrival = self.receive(tensor, rank)
            rows.append(_Row(tensor, arrival))
        return rows


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _add_up(rows: Sequence[_Row], *, out: Tensor, sends_of_out: Sequence[dist.Work] = ()) -> None:
    """Add tensors in order, as they are received, and write the sum to `out`.

    Partial sums are kept in at least fp32, and rounded once.

    Args:
        rows: Tensors to add.
        out: Tensor of the sum. It may be one of the rows, so it is written after all rows are added.
        sends_of_out: Send operations that read `out`. They must be complete before it is written.
    """
    if len(rows) == 2:  # a single addition rounds once, in any dtype
        first = rows[0].received()
        second = rows[1].received()
        _wait(sends_of_out)
        torch.add(first, second, out=out)
        return

    sum_dtype = torch.promote_types(out.dtype, torch.float32)
    total = scratch("total", out.numel(), sum_dtype)
    first = rows[0].received()
    total.copy_(first)
    for row in rows[1:]:
        addend = row.received()
        total.add_(addend)
    _wait(sends_of_out)
    out.copy_(total)


def _parts(flat: Tensor, num_parts: int, alignment: int = ALIGNMENT) -> list[Tensor]:
    """Split a tensor into consecutive views of equal length.

    The last views may be shorter, or empty.

    >>> [part.numel() for part in _parts(torch.zeros(40), 4)]
    [16, 16, 8, 0]
    """
    # Every part has the same number of units of alignment, rounded up.
    num_units = -(-flat.numel() // alignment)
    units_per_part = -(-num_units // num_parts)
    part_numel = units_per_part * alignment
    parts = []
    for index in range(num_parts):
        begin = index * part_numel
        parts.append(flat[begin : begin + part_numel])
    return parts


def scratch(name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Return this thread's reusable scratch buffer with a given name.

    Buffers are reused, because allocating new memory pages takes more time than the computation. A buffer grows to the
    largest request for its name, and never shrinks.
    """
    buffers: dict[str, Tensor] = _thread_local.__dict__
    num_bytes = numel * dtype.itemsize
    buffer = buffers.get(name)
    if buffer is None or buffer.numel() < num_bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        buffers[name] = buffer
    used_bytes = buffer[:num_bytes]
    return used_bytes.view(dtype)
