"""All-reduce of a bucket on CUDA with `torch.distributed.all_reduce`, as in DDP's default hook.

    all_reduce(wire, async_op=True)     on the backend's stream, after the work that is on the current stream
        .get_future().then(finish)      divides the sum on a stream that waits for it, so that the host does not wait

No event is recorded here. Times are measured in cuda_events.py.
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
    """Start an asynchronous all-reduce of a bucket, and return a future of the finished bucket.

    Args:
        bucket: Bucket to all-reduce.
        group: Process group, or None if there is only one rank.
        device: Device of the bucket.
    """
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
    # With NCCL, the host sees the future as done at once. If `finish` has failed, the future's value raises the error.
    if future.done():
        future.value()
    return future
