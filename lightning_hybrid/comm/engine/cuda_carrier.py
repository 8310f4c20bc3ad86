"""What surrounds the sums of buckets on CUDA: which code runs them, how long they took, what hangs, and the end.

By default a bucket is torch's own all-reduce (cuda_all_reduce.py); what was asked for by name goes stage by stage over
streams of our own (cuda_streams.py), imported then. The host waits for neither. `look` asks by events which buckets
are through: before each bucket and each reading of the counts, and four times a second in the watchdog, which notices
what hangs. Order and failures are seen one step late: what the device did meanwhile to the weights is not to be used.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.codec.block_format import BLOCK
from lightning_hybrid.comm.engine.cuda_all_reduce import Issued, all_reduce, compare_order
from lightning_hybrid.comm.engine.in_flight import FailureLatch, InFlightBucket
from lightning_hybrid.comm.engine.job import SHARD_ALIGNMENT, Job
from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.health.abort import ABORT_LIMIT_S, end_on_abort, on_abort
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.health.device_waits import DeviceWaits, is_any_captured
from lightning_hybrid.comm.health.watchdog import Watchdog
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.stats.trace import CommTrace, DeviceTimes

if TYPE_CHECKING:
    from lightning_hybrid.comm.engine.cuda_streams import CudaStreams

# The trace gets the times of a step's buckets together, but of this many at most: a step may have no end.
MOST_UNREPORTED = 64


class CudaCarrier:
    """The buckets of an engine on CUDA.

    `trace` gets the times of each step once the device is through with it; `watchdog` compares new buckets, and reports
    what a stage raises, or another order, to all ranks.
    """

    def __init__(
        self, *, device: torch.device, groups: CommGroups, trace: CommTrace, latch: FailureLatch, watchdog: Watchdog
    ) -> None:
        self._device, self._groups, self._trace = device, groups, trace
        self._latch, self._watchdog = latch, watchdog
        self._streams: CudaStreams | None = None
        self._issued: deque[Issued] = deque()
        self._done: list[Issued] = []
        self._lock = threading.Lock()  # of looks; taken before the engine's, never after it
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._aborting = threading.Lock()
        self._stuck: list[str] | None = None  # groups that would not end; None while there is no failure
        self._waits = DeviceWaits(device, also=partial(self.look, places=True))
        latch.look, latch.give_up = self._waits.stalled_s, self._give_up
        trace.look_first(self.look)

    def use(self, columns: Mapping[Algorithm, int]) -> None:
        """Use the groups of these algorithms. There is one set of groups: more would only share the streams."""
        for group in self._groups.by_stage.values():
            on_abort(group, self._was_aborted)

    def _was_aborted(self) -> None:
        if self._stuck is None:
            self._latch.trip(self._watchdog.collect_status(f"rank {self._groups.topology.rank} saw NCCL give up"))

    def accept(self, bucket: InFlightBucket, job: Callable[[Tensor], Job], checksum: int | None) -> None:
        """Cut a bucket into the chunks of its plan; the thread that submits also puts them on the streams."""
        if is_any_captured():
            raise RuntimeError(
                "a bucket was handed over inside a CUDA-graph capture, which this engine cannot be part of: its order "
                "is compared, and its failures are told, step by step. Capture forward and backward without "
                "DistributedDataParallel's hook (`no_sync`), or leave the capture out."
            )
        # Chunks are cut so that the ranks of the largest node get equal, aligned shards without padding.
        alignment = max(map(len, self._groups.topology.nodes)) * (BLOCK if bucket.is_coded else SHARD_ALIGNMENT)
        bucket.split(job, bucket.plan.num_chunks, checksum=None, alignment=alignment)
        bucket.chunks[-1].checksum = checksum

    def carry(self, bucket: InFlightBucket) -> Future[Tensor]:
        """Put all of a bucket on the streams; the future carries a CUDA event. Raises where a stage does."""
        issued = Issued(bucket)
        try:
            bucket.compare_contents(self._watchdog)
            future = self._put(issued)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            self._watchdog.report(bucket.failed_in(issued.at, error), error)
            raise RuntimeError(bucket.error) from bucket.cause
        bucket.release_tensors()
        self._issued.append(issued)
        self._latch.raise_if_tripped()  # another rank may have failed meanwhile
        return future

    def _put(self, issued: Issued) -> Future[Tensor]:
        bucket, group = issued.bucket, self._groups.by_stage["all_reduce"]
        chunk, job = bucket.chunks[-1], bucket.chunks[-1].job
        issued.ready.record()
        if bucket.plan.algorithm == "flat" and job.blocks is None and job.dtype_across is None:
            future = all_reduce(issued, group, self._device)
        else:
            if self._streams is None:
                from lightning_hybrid.comm.engine.cuda_streams import CudaStreams

                self._streams = CudaStreams(self._device, self._groups, keep_events=self._trace.keep_events)
            future = self._streams.put(issued)
        if chunk.checksum is not None:
            compare_order(issued, chunk.checksum, group, self._device)
        return future

    # ---- what the device has done ----------------------------------------------------------------------------------

    def look(self, *, places: bool = False) -> None:
        """See which buckets the device is through with, and where the oldest other one is. Never waits for it."""
        different = None
        if not self._issued or is_any_captured():
            return
        with self._lock, suppress(RuntimeError):  # of the driver: the host meets it too, and says so
            while self._issued and self._stuck is None and self._issued[0].is_through():
                self._done.append(issued := self._issued.popleft())
                if issued.spread is not None and int(issued.spread) != -1:
                    different = issued.bucket
                self._latch.remove(issued.bucket)
                if issued.bucket.is_last or len(self._done) == MOST_UNREPORTED:
                    self._report_times()
            if places and self._issued and self._stuck is None:
                _set_places(self._issued[0])
        # Without the lock: `report` asks other ranks, and the failure that follows takes it.
        if different is not None and self._stuck is None:
            error = OrderError("the order of buckets in the step before was not the same")
            self._watchdog.report(different.failed_in("order", error), error)

    def _report_times(self) -> None:
        done, self._done = self._done, []
        first = done[0].ready
        # From step to step, as an event gives milliseconds in fp32: after an hour 0.25 ms would be its smallest step.
        begin_s = self._trace.now_s() - first.elapsed_time(done[-1].done) / 1e3
        if self._anchor is not None:
            begin_s = self._anchor[1] + self._anchor[0].elapsed_time(first) / 1e3
        self._anchor = (first, begin_s)

        def at_s(event: torch.cuda.Event) -> float:
            return begin_s + first.elapsed_time(event) / 1e3

        self._trace.replay(
            DeviceTimes(
                bucket=each.bucket.plan,
                traffic=each.bucket.traffic,
                is_last=each.bucket.is_last,
                is_in_update=each.bucket.is_in_update,
                ready_s=at_s(each.ready),
                done_s=at_s(each.done),
                stages=[(name, at_s(begin), at_s(end), size) for _, name, size, begin, end in each.stages if begin],
            )
            for each in done
        )

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _give_up(self, lost: Sequence[InFlightBucket] = ()) -> None:
        # Once: aborting communicators frees hosts and devices that wait in them.
        with self._aborting:  # a second thread that fails comes back when the first has done it
            if self._stuck is None:
                self._stuck = []  # from here on no one looks
                if self._groups.topology.world_size > 1:  # else no other rank waits
                    self._stuck = self._groups.abort(limit_s=ABORT_LIMIT_S)

    def end(self, *, limit_s: Callable[[], float]) -> list[str]:
        """Free the communicators when the device is done or `limit_s` over; returns what would not end, by name."""
        # After a failure nothing is waited for.
        for group in self._groups.by_stage.values():
            end_on_abort(group)
        # Not `synchronize`: after a rank is lost a kernel may never end, and the host would hang with it.
        while self._issued and self._stuck is None and limit_s() > 0:
            self._waits.stalled_s()
            time.sleep(0.001)
        if self._issued and self._stuck is None:
            self._give_up()
            self._stuck = self._stuck or ["of buckets that the device did not finish"]
        if self._stuck is None:
            if self._done:
                self._report_times()
            self._groups.destroy()
        elif not self._stuck:
            self._groups.forget()
        return self._stuck or []


def _set_places(issued: Issued) -> None:
    """Record where the chunks of a bucket are, in the words of stage_threads.py."""
    if not issued.ready.query():
        issued.bucket.chunks[0].place = "waiting for its gradients"
        return
    for chunk in issued.bucket.chunks:
        stages = [name for each, name, _, _, end in issued.stages if each is chunk and not end.query()]
        chunk.place = f"in stage `{stages[0]}`" if stages else "through"
