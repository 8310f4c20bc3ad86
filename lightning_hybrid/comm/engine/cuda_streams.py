"""The stages on CUDA: what stage_threads.py is on the CPU, by streams and events. The host waits for nothing.

    network    [all_reduce] ...                     [ring 0]    [ring 1]    [ring 2]
    node                               [reduce 0] [reduce 1] [broadcast 0] [reduce 2] [broadcast 1] [broadcast 2]

`flat` is one call on one stream. A hierarchy has a stream for what stays in the node and one for what leaves it, and
its chunks follow each other: a chunk comes back into the node while the next one is on the network. Both have high
priority, as the few blocks of NCCL's kernels would else queue behind thousands of backward's.

Events alone order what is written and read:

    ready    recorded where the hook runs         the first stage's stream waits: the gradients are there
    end      of every stage of every chunk        the next stage's stream waits, where it is another one
    done     after the last, and `finish`         the future's own event follows it: who waits for it waits for all

The same events take times, and say where a bucket is: `look` asks which are through, and never waits for one. It is
called before each bucket and each reading of the counts, and four times a second by the watchdog, which so notices what
hangs. Whether the order of buckets was the same on all ranks is read when the step's last bucket is seen to be done:
one step late. So is a failure: what the device did meanwhile to the weights is not to be used.

What only two GPUs can show: that NCCL runs both streams' kernels at the same time, and that aborting its communicators
ends them. All else is tested with streams, events and communicators that only record what is asked of them.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.codec.block_format import BLOCK
from lightning_hybrid.comm.engine.in_flight import Chunk, FailureLatch, InFlightBucket
from lightning_hybrid.comm.engine.job import SHARD_ALIGNMENT, Job
from lightning_hybrid.comm.engine.order_check import ChecksummedCopy
from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.engine.stages import Stage, run_stage, stage_scopes, stages_by_name
from lightning_hybrid.comm.health.abort import ABORT_LIMIT_S, abort_all, end_on_abort, on_abort
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.health.device_waits import DeviceWaits, is_any_captured
from lightning_hybrid.comm.health.watchdog import Watchdog
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.stats.trace import CommTrace, DeviceTimes

HIGH_PRIORITY = -1

# The trace gets the times of a step's buckets together, but of this many at most: a step may have no end.
MOST_UNREPORTED = 64


@dataclass
class _StageRun:
    """A stage of a chunk on its stream."""

    chunk: Chunk
    stage: Stage
    begin: torch.cuda.Event | None
    end: torch.cuda.Event
    num_bytes: int


@dataclass
class _Issued:
    """A bucket all of whose work is on the streams, which alone hold its tensors."""

    bucket: InFlightBucket
    ready: torch.cuda.Event
    done: torch.cuda.Event
    stage_runs: list[_StageRun] = field(default_factory=list)
    mismatch: Tensor | None = None  # of the checksums; on the host, valid once `done` is


class CudaStreams:
    """The streams of an engine.

    `trace` gets the times of each step once the device is through with it; `watchdog` compares new buckets, and reports
    what a stage raises, or a wrong checksum, to all ranks.
    """

    def __init__(
        self, *, device: torch.device, groups: CommGroups, trace: CommTrace, latch: FailureLatch, watchdog: Watchdog
    ) -> None:
        self._device = device
        self._groups = groups
        # Chunks are cut so that the ranks of the largest node get equal, aligned shards without padding.
        self._alignment = max(map(len, groups.topology.nodes)) * SHARD_ALIGNMENT
        self._trace = trace
        self._latch = latch
        self._watchdog = watchdog
        self._network = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._node: torch.cuda.Stream | None = None
        self._stages: tuple[str, ...] = ()
        self._issued: deque[_Issued] = deque()
        self._done: list[_Issued] = []
        self._lock = threading.Lock()  # of looks; taken before the engine's, never after it
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._aborting = threading.Lock()
        self._has_failed = False
        self._stuck: list[str] = []
        self._waits = DeviceWaits(device, also=partial(self.look, places=True))
        latch.look, latch.give_up = self._waits.stalled_s, self._give_up
        trace.look_first(self.look)

    def use(self, columns: Mapping[Algorithm, int]) -> None:
        """Use these algorithms from now on. There is one set of groups: more would only share the streams."""
        self._stages = tuple(stage_scopes(columns))
        for group in self._groups.by_stage.values():
            on_abort(group, self._was_aborted)

    def _was_aborted(self) -> None:
        if not self._has_failed:
            self._latch.trip(self._watchdog.collect_status(f"rank {self._groups.topology.rank} saw NCCL give up"))

    def free_unused(self) -> None:
        """Free the communicators that the algorithms in use do not need. Collective."""
        self._groups.keep(self._stages)

    def split(self, bucket: InFlightBucket, job: Callable[[Tensor], Job], checksum: int | None) -> None:
        """Cut a bucket into the chunks of its plan."""
        if is_any_captured():
            raise RuntimeError(
                "a bucket was handed over inside a CUDA-graph capture, which this engine cannot be part of: its order "
                "is compared, and its failures are told, step by step. Capture forward and backward without "
                "DistributedDataParallel's hook (`no_sync`), or leave the capture out."
            )
        # No short tail for the checksum: on a device a copy costs less than one message more.
        alignment = self._alignment // SHARD_ALIGNMENT * BLOCK if bucket.is_coded else self._alignment
        bucket.split(job, bucket.plan.num_chunks, checksum=checksum, alignment=alignment, has_short_tail=False)

    def accept(self, bucket: InFlightBucket) -> None:
        """Do nothing: the thread that submits also puts the bucket on the streams."""

    def carry(self, bucket: InFlightBucket) -> Future[Tensor]:
        """Put all of a bucket on the streams; the future carries a CUDA event. Raises where a stage does."""
        # Filled while the bucket is put on the streams: where an error comes, its last entry names the stage.
        at: list[str] = ["order"]
        try:
            return self._issue(bucket, at)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            self._watchdog.report(bucket.failed_in(at[-1], error), error)
            raise RuntimeError(bucket.error) from bucket.cause

    def _issue(self, bucket: InFlightBucket, at: list[str]) -> Future[Tensor]:
        flat, stages = bucket.flat, stages_by_name(bucket.plan.algorithm)
        streams = [self._stream_of(stage) for stage in stages]
        issued = _Issued(bucket=bucket, ready=self._event(), done=self._event())
        bucket.compare_contents(self._watchdog)
        issued.ready.record(torch.cuda.current_stream(self._device))
        streams[0].wait_event(issued.ready)
        flat.record_stream(streams[-1])  # the allocator must not give it away before: that stream waits for the others
        with torch.cuda.stream(streams[0]):
            for chunk in bucket.chunks:
                self._add_checksum(chunk)
        ends: dict[Chunk, torch.cuda.Event] = {}
        for chunk, index in _in_order(bucket.chunks, streams):
            at.append(stages[index].name)
            if index and streams[index] is not streams[index - 1]:
                streams[index].wait_event(ends[chunk])  # now, and not before: another chunk's stage is between
            stage_run = self._run(chunk, stages[index], streams[index])
            ends[chunk] = stage_run.end
            if self._groups.by_stage[stages[index].name] is not None:
                issued.stage_runs.append(stage_run)
        at.append("finish")
        with torch.cuda.stream(streams[-1]):
            mismatch = bucket.chunks[-1].take_sum()
            if mismatch is not None:
                # Pinned, and copied without a wait: the host reads it when `done` has passed.
                issued.mismatch = torch.empty((), dtype=mismatch.dtype, pin_memory=flat.is_cuda)
                issued.mismatch.copy_(mismatch, non_blocking=True)
            result = bucket.finish(flat)
            result.record_stream(streams[-1])
            issued.done.record(streams[-1])
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(result)  # records an event on this stream; who waits makes its own stream wait for it
        bucket.release_tensors()
        bucket.is_issued = True
        self._issued.append(issued)
        if bucket.error is not None:  # another rank failed meanwhile
            raise RuntimeError(bucket.error) from bucket.cause
        return future

    def _stream_of(self, stage: Stage) -> torch.cuda.Stream:
        if stage.scope != "node":
            return self._network
        if self._node is None:
            self._node = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
        return self._node

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _add_checksum(self, chunk: Chunk) -> None:
        if chunk.checksum is not None:
            part = chunk.part
            copy = ChecksummedCopy(part.numel(), part.dtype, part.device, multiple_of=self._alignment)
            copy.fill(part, chunk.checksum)
            chunk.sum_in(copy)

    def _run(self, chunk: Chunk, stage: Stage, stream: torch.cuda.Stream) -> _StageRun:
        # An event costs the host some time: the begin of a stage is wanted for a timeline only.
        begin = self._event() if self._trace.keep_events else None
        end, num_bytes = self._event(), chunk.num_bytes
        with torch.cuda.stream(stream):
            if begin is not None:
                begin.record(stream)
            run_stage(stage, chunk.job, self._groups.by_stage[stage.name])
            end.record(stream)
        return _StageRun(chunk=chunk, stage=stage, begin=begin, end=end, num_bytes=num_bytes)

    # ---- what the device has done ----------------------------------------------------------------------------------

    def look(self, *, places: bool = False) -> None:
        """See which buckets the device is through with, and where the oldest other one is. Never waits for it."""
        different = None
        if not self._issued or is_any_captured():
            return
        with self._lock:
            try:
                while self._issued and not self._has_failed and self._issued[0].done.query():
                    issued = self._issued.popleft()
                    self._done.append(issued)
                    if issued.mismatch is not None and bool(issued.mismatch):
                        different = issued.bucket
                    self._latch.remove(issued.bucket)
                    if issued.bucket.is_last or len(self._done) == MOST_UNREPORTED:
                        self._report_times()
                if places and self._issued and not self._has_failed:
                    _set_places(self._issued[0])
            except RuntimeError:  # of the driver: the host meets it too, and says so
                return
        # Without the lock: `report` asks other ranks, and the failure that follows takes it.
        if different is not None and not self._has_failed:
            error = OrderError("the order of buckets in the step before was not the same")
            self._watchdog.report(different.failed_in("order", error), error)

    def _report_times(self) -> None:
        done, self._done = self._done, []
        if not done:
            return
        first = done[0].ready
        # From step to step, as an event gives milliseconds in fp32: after an hour 0.25 ms would be its smallest step.
        if self._anchor is None:
            begin_s = self._trace.now_s() - first.elapsed_time(done[-1].done) / 1e3
        else:
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
                stages=[
                    (run.stage.name, at_s(run.begin), at_s(run.end), run.num_bytes)
                    for run in each.stage_runs
                    if run.begin is not None
                ],
            )
            for each in done
        )

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _give_up(self, lost: Sequence[InFlightBucket]) -> None:
        # Once: aborting communicators frees hosts and devices that wait in them.
        with self._aborting:  # a second thread that fails comes back when the first has done it
            if self._has_failed:
                return
            self._has_failed = True
            if self._groups.topology.world_size > 1:  # else no other rank waits
                self._stuck = abort_all(limit_s=ABORT_LIMIT_S)

    def end(self, *, limit_s: Callable[[], float]) -> list[str]:
        """Free the communicators when the device is done or `limit_s` over; returns what would not end, by name."""
        # After a failure nothing is waited for.
        for group in self._groups.by_stage.values():
            end_on_abort(group)
        # Not `synchronize`: after a rank is lost a kernel may never end, and the host would hang with it.
        while self._issued and not self._has_failed and limit_s() > 0:
            self._waits.stalled_s()
            time.sleep(0.001)
        if self._issued and not self._has_failed:
            self._give_up([])
            self._stuck = self._stuck or ["of buckets that the device did not finish"]
        if not self._has_failed:
            self._report_times()
            self._groups.destroy()
        elif not self._stuck:
            self._groups.forget()
        return self._stuck


def _in_order(chunks: Sequence[Chunk], streams: Sequence[object]) -> Iterator[tuple[Chunk, int]]:
    """Yield chunks and indices of their stages in the order of issue.

    A stage that comes back to a stream lets the next chunk's earlier stages go first: in issue order, the reduce of
    chunk b is on the node's stream before the broadcast of chunk a, which waits for the network.

    >>> [(chunk, index) for chunk, index in _in_order("ab", ["node", "network", "node"])]
    [('a', 0), ('a', 1), ('b', 0), ('b', 1), ('a', 2), ('b', 2)]
    >>> [(chunk, index) for chunk, index in _in_order("ab", ["network"])]
    [('a', 0), ('b', 0)]
    """
    # A slot is the time of one chunk: the stages that come back to a stream run one slot later.
    is_back = [stream in streams[:index] for index, stream in enumerate(streams)]
    for slot in range(len(chunks) + 1):
        for index, late in enumerate(is_back):
            if 0 <= slot - late < len(chunks):
                yield chunks[slot - late], index


def _set_places(issued: _Issued) -> None:
    """Record where the chunks of a bucket are, in the words of stage_threads.py."""
    if not issued.ready.query():
        issued.bucket.chunks[0].place = "waiting for its gradients"
        return
    for chunk in issued.bucket.chunks:
        stages = [run.stage.name for run in issued.stage_runs if run.chunk is chunk and not run.end.query()]
        chunk.place = f"in stage `{stages[0]}`" if stages else "through"
