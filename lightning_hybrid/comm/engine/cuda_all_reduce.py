"""A bucket on CUDA: torch's own all-reduce and its future, as in DistributedDataParallel's default hook.

    all_reduce(wire, async_op=True)     on the backend's stream, behind what the current stream has done so far
        .get_future().then(finish)      divides the sum, on a stream that waits for it; the host waits for nothing

Nothing is recorded besides: see cuda_events.py for the times.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.engine.in_flight import InFlightBucket


def all_reduce(
    bucket: InFlightBucket, group: dist.ProcessGroup | None, device: torch.device
) -> Future[Tensor]:
    """Sum a bucket over a group, or over this rank alone if it is None. The future holds the finished sum."""
    finish = bucket.finish

    def finished(summed: Future[list[Tensor]]) -> Tensor:
        result = finish(summed.value()[0])
        result.record_stream(torch.cuda.current_stream(device))
        return result

    bucket.stage = "all_reduce"
    if group is None:
        summed: Future[list[Tensor]] = Future(devices=[device])
        summed.set_result([bucket.flat])
    else:
        summed = dist.all_reduce(bucket.flat, group=group, async_op=True).get_future()
    bucket.stage = "finish"
    future = summed.then(finished)
    if (
        future.done()
    ):  # over NCCL at once, as far as the host is concerned: raise what `finish` raised
        future.value()
    return future
