"""CUDA events that time buckets and show which buckets the device has finished.

Events are recorded for algorithms that were set by name (`cuda_streams.py`), and if the times are read by a timeline
(`report.trace_dir`) or a callback such as `TrainingMetrics`. Other buckets have no events.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_hybrid.comm.engine.in_flight import Chunk, FailureLatch, InFlightBucket
from lightning_hybrid.comm.health.device_waits import is_any_captured
from lightning_hybrid.comm.stats.trace import CommTrace, DeviceTimes

# Maximum number of buckets whose times are passed to the trace at once. Usually all buckets of a step are passed
# together, but the last bucket of a step may be missing.
MOST_UNREPORTED = 64


def new_event() -> torch.cuda.Event:
    """Create a CUDA event with timing enabled."""
    return torch.cuda.Event(enable_timing=True)


@dataclass(kw_only=True)
class StageEvents:
    """CUDA events at the beginning and end of one all-reduce stage of a chunk.

    Args:
        chunk: Chunk that the stage processes.
        name: Name of the stage.
        num_bytes: Size of the chunk in bytes.
        begin: Event at the beginning of the stage, or None if no timeline needs it.
        end: Event at the end of the stage.
    """

    chunk: Chunk
    name: str
    num_bytes: int
    begin: torch.cuda.Event | None
    end: torch.cuda.Event


@dataclass
class BucketEvents:
    """CUDA events of a bucket whose work is queued on streams.

    Args:
        bucket: Bucket without its tensors.
        ready: Event that marks when the gradients are available.
        done: Event that marks when the bucket is averaged.
        stages: Events of each stage of each chunk.
    """

    bucket: InFlightBucket
    ready: torch.cuda.Event = field(default_factory=new_event)
    done: torch.cuda.Event = field(default_factory=new_event)
    stages: list[StageEvents] = field(default_factory=list)
    _is_done_recorded: bool = False

    def record_done(self, stream: torch.cuda.Stream) -> None:
        """Record the `done` event of the bucket on a stream."""
        self.done.record(stream)
        self._is_done_recorded = True

    def is_through(self) -> bool:
        """Return whether the device has finished all work of the bucket."""
        # CUDA reports events that were never recorded as completed.
        return self._is_done_recorded and self.done.query()

    def finishing(
        self, finish: Callable[[Tensor], Tensor], device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """Wrap `finish` so that the `done` event of the bucket is recorded after it has run."""

        def finish_and_record(flat: Tensor) -> Tensor:
            result = finish(flat)
            self.record_done(torch.cuda.current_stream(device))
            return result

        return finish_and_record

    def note_places(self) -> None:
        """Update the description of every chunk's current stage, for use in error messages.

        The descriptions are worded as in stage_threads.py.
        """
        if not self.ready.query():
            self.bucket.chunks[0].place = "waiting for its gradients before the start"
            return
        for chunk in self.bucket.chunks:
            chunk.place = "past the last stage"
            for stage in self.stages:
                if stage.chunk is not chunk:
                    continue
                if stage.end is self.done:
                    is_over = self.is_through()
                else:
                    is_over = stage.end.query()
                if not is_over:
                    chunk.place = f"in stage `{stage.name}`"
                    break

    def times(self, at_s: Callable[[torch.cuda.Event], float]) -> DeviceTimes:
        """Convert the events of the bucket to times in seconds.

        Args:
            at_s: Function that returns the time of an event in seconds.
        """
        stages = []
        for stage in self.stages:
            if stage.begin is not None:
                stages.append((stage.name, at_s(stage.begin), at_s(stage.end), stage.num_bytes))
        return DeviceTimes(
            bucket=self.bucket.plan,
            traffic=self.bucket.traffic,
            is_last=self.bucket.is_last,
            is_in_update=self.bucket.is_in_update,
            ready_s=at_s(self.ready),
            done_s=at_s(self.done),
            stages=stages,
        )


class IssuedBuckets:
    """Queue of buckets with CUDA events, in the order in which their work was enqueued on the streams.

    Args:
        trace: Trace that receives the times of a step once the device has finished the step.
        latch: Latch from which finished buckets are removed.
    """

    def __init__(self, trace: CommTrace, latch: FailureLatch) -> None:
        self._trace = trace
        self._latch = latch
        self._issued: deque[BucketEvents] = deque()
        self._unreported: list[BucketEvents] = []
        self._lock = threading.Lock()  # taken before the latch's lock, never after it
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._is_over = False

    def add(self, events: BucketEvents) -> None:
        """Append a bucket whose work is queued on the streams."""
        self._issued.append(events)

    def look(self, *, with_places: bool) -> None:
        """Remove all buckets that the device has finished, without waiting for unfinished ones.

        Args:
            with_places: Whether to note the current stage of the oldest unfinished bucket.
        """
        if not self._issued or is_any_captured():
            return
        # Errors of the driver are ignored, because the training thread gets and reports them as well.
        with self._lock, suppress(RuntimeError, ValueError):
            while self._issued and not self._is_over and self._issued[0].is_through():
                events = self._issued.popleft()
                self._unreported.append(events)
                self._latch.remove(events.bucket)
                if events.bucket.is_last or len(self._unreported) == MOST_UNREPORTED:
                    self._report()
            if with_places and self._issued and not self._is_over:
                self._issued[0].note_places()

    def give_up(self) -> None:
        """Stop tracking all buckets, because their communicators were aborted."""
        self._is_over = True

    def close(self) -> None:
        """Pass the times of all remaining finished buckets to the trace."""
        with suppress(RuntimeError, ValueError):
            self._report()

    def _report(self) -> None:
        finished = self._unreported
        self._unreported = []
        if not finished:
            return
        first = finished[0].ready
        # Times are added up from step to step. Events return milliseconds in fp32, so that after an hour the resolution
        # of a single difference would be only 0.25 ms.
        begin_s = self._trace.now_s() - first.elapsed_time(finished[-1].done) / 1e3
        if self._anchor is not None:
            begin_s = self._anchor[1] + self._anchor[0].elapsed_time(first) / 1e3
        self._anchor = (first, begin_s)

        def at_s(event: torch.cuda.Event) -> float:
            return begin_s + first.elapsed_time(event) / 1e3

        self._trace.replay([events.times(at_s) for events in finished])
