"""Execution of all-reduces on CUDA, including hang detection and the shutdown of communicators.

By default, a bucket is summed by torch's own all-reduce (cuda_all_reduce.py). An algorithm that was set by name runs
stage by stage on our own streams (cuda_streams.py). With Gloo, all algorithms run in this way, with synchronous calls,
because Gloo's asynchronous collectives end in a separate thread. Times of buckets are measured with events if a
timeline or callback reads them (cuda_events.py). The last two modules are imported only if they are needed.

The host never waits for the device. To detect a hang, the watchdog checks four times a second whether the device makes
progress (health/device_waits.py). A failure is detected one step late, when the weights are already invalid.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.codec.block_format import BLOCK
from lightning_hybrid.comm.engine.cuda_all_reduce import all_reduce
from lightning_hybrid.comm.engine.in_flight import FailureLatch, InFlightBucket
from lightning_hybrid.comm.engine.job import SHARD_ALIGNMENT, Job
from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.health.abort import ABORT_LIMIT_S, is_on_hosts
from lightning_hybrid.comm.health.device_waits import DeviceWaits, is_any_captured
from lightning_hybrid.comm.health.watchdog import Watchdog
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.stats.trace import CommTrace

if TYPE_CHECKING:
    from lightning_hybrid.comm.engine.cuda_events import IssuedBuckets
    from lightning_hybrid.comm.engine.cuda_streams import CudaStreams


class CudaCarrier:
    """Executor of an engine's all-reduces on CUDA.

    Args:
        device: CUDA device of the buckets.
        groups: Process groups of the stages.
        trace: Trace that counts buckets. If it measures devices, it receives the times of a step once the device has
            finished the step.
        latch: Buckets in flight and the first failure.
        watchdog: Watchdog that compares new buckets, and reports errors of stages to all ranks.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        groups: CommGroups,
        trace: CommTrace,
        latch: FailureLatch,
        watchdog: Watchdog,
    ) -> None:
        self._device = device
        self._groups = groups
        self._trace = trace
        self._latch = latch
        self._watchdog = watchdog
        self._streams: CudaStreams | None = None
        self._issued: IssuedBuckets | None = None  # buckets with events
        self._aborting = threading.Lock()
        self._stuck: list[str] | None = None  # groups that could not be shut down after a failure
        self._waits = DeviceWaits(device, also=partial(self.look, with_places=True))
        latch.look = self._waits.stalled_s
        latch.give_up = self._give_up
        trace.look_first(self.look)

    def use(self, columns: Mapping[Algorithm, int]) -> None:
        """Do nothing, because on CUDA one set of process groups serves all algorithms.

        Additional sets would only share the streams.
        """

    def accept(
        self, bucket: InFlightBucket, job: Callable[[Tensor], Job], checksum: int | None
    ) -> None:
        """Split a bucket into the chunks of its plan, before `carry` enqueues them.

        Raises:
            RuntimeError: A CUDA graph is being captured.
        """
        if is_any_captured():
            raise RuntimeError(
                "Gradient buckets cannot be all-reduced inside a CUDA graph capture, because the host must check "
                "their order and report failures in every step. Capture forward and backward under "
                "DistributedDataParallel's `no_sync()`, or train without CUDA graphs."
            )
        alignment = SHARD_ALIGNMENT
        if bucket.is_coded:
            alignment = BLOCK
        # With this alignment, the ranks of the largest node get equal and aligned shards without padding.
        alignment *= max(map(len, self._groups.topology.nodes))
        bucket.split(job, bucket.plan.num_chunks, checksum=None, alignment=alignment)

    def carry(self, bucket: InFlightBucket) -> Future[Tensor]:
        """Enqueue the all-reduce of a bucket on CUDA streams, and return its future without waiting.

        Streams that use the future's value wait for the all-reduce by an event.
        """
        try:
            bucket.compare_contents(self._watchdog)
            future = self._put(bucket)
            bucket.stage = "order"
            bucket.compare_step(self._watchdog)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            self._watchdog.report(bucket.failed_in(bucket.stage, error), error)
            self._latch.raise_if_tripped()
            raise
        bucket.release_tensors()
        self._latch.raise_if_tripped()  # another rank may have failed in the meantime
        return future

    def _put(self, bucket: InFlightBucket) -> Future[Tensor]:
        if not self._uses_torch_all_reduce(bucket):
            return self._put_in_stages(bucket)
        group = self._groups.by_stage["all_reduce"]
        if self._trace.measures_devices:
            return self._put_with_events(bucket, group)
        future = all_reduce(bucket, group, self._device)
        self._trace.count(bucket.plan, bucket.traffic, is_last=bucket.is_last)
        self._latch.remove(bucket)  # without events, the host cannot track its progress
        return future

    def _uses_torch_all_reduce(self, bucket: InFlightBucket) -> bool:
        job = bucket.chunks[0].job
        if (
            bucket.plan.algorithm != "flat"
            or job.blocks is not None
            or job.dtype_across is not None
        ):
            return False
        return not is_on_hosts(self._groups.by_stage["all_reduce"])

    # ---- with events -----------------------------------------------------------------------------------------------

    def _put_with_events(
        self, bucket: InFlightBucket, group: torch.distributed.ProcessGroup | None
    ) -> Future[Tensor]:
        from lightning_hybrid.comm.engine.cuda_events import BucketEvents, StageEvents

        events = BucketEvents(bucket)
        events.ready.record()
        bucket.finish = events.finishing(bucket.finish, self._device)
        if group is not None:
            chunk = bucket.chunks[0]
            num_bytes = bucket.plan.num_bytes
            stage = StageEvents(
                chunk=chunk, name="all_reduce", num_bytes=num_bytes, begin=None, end=events.done
            )
            events.stages.append(stage)
        future = all_reduce(bucket, group, self._device)
        self._issued_buckets().add(events)
        return future

    def _put_in_stages(self, bucket: InFlightBucket) -> Future[Tensor]:
        from lightning_hybrid.comm.engine.cuda_events import BucketEvents

        if self._streams is None:
            from lightning_hybrid.comm.engine.cuda_streams import CudaStreams

            self._streams = CudaStreams(
                self._device, self._groups, keep_events=self._trace.keep_events
            )
        events = BucketEvents(bucket)
        events.ready.record()
        future = self._streams.put(events)
        self._issued_buckets().add(events)
        return future

    def _issued_buckets(self) -> IssuedBuckets:
        if self._issued is None:
            from lightning_hybrid.comm.engine.cuda_events import IssuedBuckets

            self._issued = IssuedBuckets(self._trace, self._latch)
        return self._issued

    def look(self, *, with_places: bool = False) -> None:
        """Check without blocking which buckets the device has finished.

        Args:
            with_places: Whether to note the current stage of the oldest unfinished bucket.
        """
        if self._issued is not None:
            self._issued.look(with_places=with_places)

    # ---- shutdown --------------------------------------------------------------------------------------------------

    def _give_up(self, lost: Sequence[InFlightBucket] = ()) -> None:
        # Aborting the communicators unblocks hosts and devices that wait in them. If two threads fail, only the first
        # one aborts, and the second one waits here.
        with self._aborting:
            if self._stuck is None:
                self._stuck = []
                if self._issued is not None:
                    self._issued.give_up()
                if self._groups.topology.world_size > 1:
                    self._stuck = self._groups.abort(limit_s=ABORT_LIMIT_S)

    def end(self, *, limit_s: Callable[[], float]) -> list[str]:
        """Wait for the device, free the communicators, and return the names of groups that are stuck.

        After a failure, the method does not wait.

        Args:
            limit_s: Function that returns the remaining time limit of the wait, in seconds.
        """
        # The device is polled, because `synchronize` would hang if a kernel waits for a rank that was lost.
        is_busy = self._stuck is None and self._waits.stalled_s() > 0
        while is_busy and self._stuck is None and limit_s() > 0:
            time.sleep(0.001)
            is_busy = self._waits.stalled_s() > 0
        if is_busy and self._stuck is None:
            self._give_up()
            self._stuck = self._stuck or ["buckets on the device"]
        if self._stuck is None:
            self.look()
            if self._issued is not None:
                self._issued.close()
            self._groups.destroy()
        elif not self._stuck:
            self._groups.forget()
        return self._stuck or []
