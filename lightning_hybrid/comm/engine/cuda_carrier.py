"""The way of buckets on CUDA: which code sums them, what happens where one hangs, and the end.

By default a bucket is torch's own all-reduce (cuda_all_reduce.py), and nothing besides. What was asked for by name goes
stage by stage over streams of our own (cuda_streams.py), and so does everything over Gloo, whose asynchronous sums end
in a thread of its own: there each call is synchronous. Times of buckets are taken by events where somebody reads them
(cuda_events.py). Both files are imported then.

The host waits for none of it. The watchdog asks four times a second whether the device gets on, and notices what hangs
(health/device_waits.py). Failures are seen one step late: what the device did meanwhile to the weights is not to be
used.
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
    """The buckets of an engine on CUDA.

    `trace` counts them, and gets the times of each step once the device is through with it, where it wants them;
    `watchdog` compares new buckets, and reports what a stage raises to all ranks.
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
        self._issued: IssuedBuckets | None = None  # those with events; None: there was none yet
        self._aborting = threading.Lock()
        self._stuck: list[str] | None = (
            None  # groups that would not end; None while there is no failure
        )
        self._waits = DeviceWaits(device, also=partial(self.look, with_places=True))
        latch.look = self._waits.stalled_s
        latch.give_up = self._give_up
        trace.look_first(self.look)

    def use(self, columns: Mapping[Algorithm, int]) -> None:
        """Do nothing: there is one set of groups, whatever the algorithms. More would only share the streams."""

    def accept(
        self, bucket: InFlightBucket, job: Callable[[Tensor], Job], checksum: int | None
    ) -> None:
        """Cut a bucket into the chunks of its plan. The submitting thread also puts them on the streams."""
        if is_any_captured():
            raise RuntimeError(
                "a bucket was handed over inside a CUDA-graph capture, which this engine cannot be part of: its order "
                "is compared, and its failures are told, step by step. Capture forward and backward without "
                "DistributedDataParallel's hook (`no_sync`), or leave the capture out."
            )
        # Chunks are cut so that the ranks of the largest node get equal, aligned shards without padding.
        alignment = max(map(len, self._groups.topology.nodes)) * (
            BLOCK if bucket.is_coded else SHARD_ALIGNMENT
        )
        bucket.split(job, bucket.plan.num_chunks, checksum=None, alignment=alignment)

    def carry(self, bucket: InFlightBucket) -> Future[Tensor]:
        """Put all chunks of a bucket on the streams. The future carries a CUDA event."""
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
        self._latch.raise_if_tripped()  # another rank may have failed meanwhile
        return future

    def _put(self, bucket: InFlightBucket) -> Future[Tensor]:
        if not self._is_torchs_own(bucket):
            return self._put_in_stages(bucket)
        group = self._groups.by_stage["all_reduce"]
        if self._trace.measures_devices:
            return self._put_with_events(bucket, group)
        future = all_reduce(bucket, group, self._device)
        self._trace.count(bucket.plan, bucket.traffic, is_last=bucket.is_last)
        self._latch.remove(bucket)  # from here on the device alone knows where it is
        return future

    def _is_torchs_own(self, bucket: InFlightBucket) -> bool:
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
        """See which buckets with events the device is through with. Never waits for it."""
        if self._issued is not None:
            self._issued.look(with_places=with_places)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _give_up(self, lost: Sequence[InFlightBucket] = ()) -> None:
        # Once: aborting communicators frees hosts and devices that wait in them.
        with self._aborting:  # a second thread that fails comes back when the first has done it
            if self._stuck is None:
                self._stuck = []  # from here on no one looks
                if self._issued is not None:
                    self._issued.give_up()
                if self._groups.topology.world_size > 1:  # else no other rank waits
                    self._stuck = self._groups.abort(limit_s=ABORT_LIMIT_S)

    def end(self, *, limit_s: Callable[[], float]) -> list[str]:
        """Free the communicators when the device is done or `limit_s` is over. Return names that do not end."""
        # After a failure nothing is waited for. Not `synchronize`: after a rank is lost a kernel may never end, and the
        # host would hang with it.
        is_busy = self._stuck is None and self._waits.stalled_s() > 0
        while is_busy and self._stuck is None and limit_s() > 0:
            time.sleep(0.001)
            is_busy = self._waits.stalled_s() > 0
        if is_busy and self._stuck is None:
            self._give_up()
            self._stuck = self._stuck or ["of buckets that the device did not finish"]
        if self._stuck is None:
            self.look()
            if self._issued is not None:
                self._issued.close()
            self._groups.destroy()
        elif not self._stuck:
            self._groups.forget()
        return self._stuck or []
