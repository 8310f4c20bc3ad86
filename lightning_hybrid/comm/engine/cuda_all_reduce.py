"""A bucket on CUDA: torch's own all-reduce and its future, as in DistributedDataParallel's default hook.

    all_reduce(wire, async_op=True)     on the backend's stream, behind what the current stream has done so far
        .get_future().then(finish)      divides the sum, on a stream that waits for it; the host waits for nothing

After a step's last bucket the hash x of the order of all goes as (x, ~x) through a MAX of 16 bytes. Both add up to
max - min - 1, which is -1 where all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.engine.in_flight import Chunk, InFlightBucket


def new_event() -> torch.cuda.Event:
    """Return an event that takes times."""
    return torch.cuda.Event(enable_timing=True)


@dataclass
class Issued:
    """A bucket all of whose work is on streams, which alone hold its tensors."""

    bucket: InFlightBucket
    ready: torch.cuda.Event = field(default_factory=new_event)
    done: torch.cuda.Event = field(default_factory=new_event)
    # Chunk, name, bytes, begin where a timeline wants it, end.
    stages: list[tuple[Chunk, str, int, torch.cuda.Event | None, torch.cuda.Event]] = field(default_factory=list)
    at: str = "order"  # where an error comes while it is put there
    spread: Tensor | None = None  # -1 where all ranks had the same order; on the host, valid once `compared` is
    compared: torch.cuda.Event | None = None

    def is_through(self) -> bool:
        """Return whether the device has done all of it."""
        return self.done.query() and (self.compared is None or self.compared.query())


def all_reduce(issued: Issued, group: dist.ProcessGroup | None, device: torch.device) -> Future[Tensor]:
    """Sum a bucket over a group, None where this rank is alone; the future holds the finished sum."""
    bucket, finish, issued.at = issued.bucket, issued.bucket.finish, "all_reduce"

    def finished(summed: Future[list[Tensor]]) -> Tensor:
        result, stream = finish(summed.value()[0]), torch.cuda.current_stream(device)
        result.record_stream(stream)
        issued.done.record(stream)
        return result

    if group is None:
        summed: Future[list[Tensor]] = Future(devices=[device])
        summed.set_result([bucket.flat])
    else:
        summed = dist.all_reduce(bucket.flat, group=group, async_op=True).get_future()
        issued.stages = [(bucket.chunks[0], issued.at, bucket.plan.num_bytes, None, issued.done)]
    issued.at = "finish"
    return _then(summed, finished)


def compare_order(issued: Issued, order: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Let `issued.spread` become what the hashes of all ranks add up to."""
    # From and to pinned memory, as the host would wait for other copies. Signed, as torch has no MAX of others.
    is_cuda = issued.bucket.flat.is_cuda
    own = torch.tensor([order - 2**63, 2**63 - 1 - order], pin_memory=is_cuda)

    def seen(extremes: Future[list[Tensor]]) -> None:
        issued.spread = torch.empty((), dtype=own.dtype, pin_memory=is_cuda)
        issued.spread.copy_(extremes.value()[0].sum(), non_blocking=True)
        issued.compared = compared = new_event()
        compared.record(torch.cuda.current_stream(device))

    extremes = own.to(issued.bucket.flat.device, non_blocking=True)
    _then(dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group, async_op=True).get_future(), seen)


def _then(summed: Future[list[Tensor]], then: Callable[[Future[list[Tensor]]], Any]) -> Future[Any]:
    future = summed.then(then)
    if future.done():  # on CUDA at once, as far as the host is concerned: raise what `then` raised
        future.value()
    return future
