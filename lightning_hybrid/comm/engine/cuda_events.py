"""Events of buckets on CUDA: how long each took, and which of them the device is through with.

Recorded for the stages that were asked for by name (`cuda_streams.py`), and where somebody reads the times: a timeline
(`report.trace_dir`), or a callback such as `TrainingMetrics`. Other buckets have none.
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

# The trace gets the times of a step's buckets together, but of this many at most: a step may have no end.
MOST_UNREPORTED = 64


def new_event() -> torch.cuda.Event:
    """Return an event that takes times."""
    return torch.cuda.Event(enable_timing=True)


@dataclass(kw_only=True)
class StageEvents:
    """Stage of a chunk on a stream. `begin` is None unless a timeline needs it."""

    chunk: Chunk
    name: str
    num_bytes: int
    begin: torch.cuda.Event | None
    end: torch.cuda.Event


@dataclass
class BucketEvents:
    """The events of a bucket all of whose work is on streams, which alone hold its tensors."""

    bucket: InFlightBucket
    ready: torch.cuda.Event = field(default_factory=new_event)
    done: torch.cuda.Event = field(default_factory=new_event)
    stages: list[StageEvents] = field(default_factory=list)
    _is_done_recorded: bool = False

    def record_done(self, stream: torch.cuda.Stream) -> None:
        """Record the end of the bucket."""
        self.done.record(stream)
        self._is_done_recorded = True

    def is_through(self) -> bool:
        """Return whether the device has done all of it."""
        # CUDA says of an event that was never recorded that it is through.
        return self._is_done_recorded and self.done.query()

    def finishing(
        self, finish: Callable[[Tensor], Tensor], device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """Return `finish`, with the end of the bucket recorded behind it."""

        def finish_and_record(flat: Tensor) -> Tensor:
            result = finish(flat)
            self.record_done(torch.cuda.current_stream(device))
            return result

        return finish_and_record

    def note_places(self) -> None:
        """Note where the chunks of the bucket are, in the words of stage_threads.py."""
        if not self.ready.query():
            self.bucket.chunks[0].place = "waiting for its gradients"
            return
        for chunk in self.bucket.chunks:
            chunk.place = "through"
            for stage in self.stages:
                is_over = self.is_through() if stage.end is self.done else stage.end.query()
                if stage.chunk is chunk and not is_over:
                    chunk.place = f"in stage `{stage.name}`"
                    break

    def times(self, at_s: Callable[[torch.cuda.Event], float]) -> DeviceTimes:
        """Return the times of the bucket. `at_s` returns the time of an event."""
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
    """The buckets with events, in the order in which they were put on the streams.

    `trace` gets the times of each step once the device is through with it; `latch` loses each bucket then.
    """

    def __init__(self, trace: CommTrace, latch: FailureLatch) -> None:
        self._trace = trace
        self._latch = latch
        self._issued: deque[BucketEvents] = deque()
        self._unreported: list[BucketEvents] = []
        self._lock = threading.Lock()  # of looks; taken before the engine's, never after it
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._is_over = False

    def add(self, events: BucketEvents) -> None:
        """Append a bucket whose work is on the streams."""
        self._issued.append(events)

    def look(self, *, with_places: bool) -> None:
        """See which buckets the device is through with, and where the oldest other one is. Never waits for it."""
        if not self._issued or is_any_captured():
            return
        # What the driver raises the host meets too, and says so.
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
        """Look no more: the communicators are aborted."""
        self._is_over = True

    def close(self) -> None:
        """Report the times that the trace has not got yet."""
        with suppress(RuntimeError, ValueError):
            self._report()

    def _report(self) -> None:
        finished = self._unreported
        self._unreported = []
        if not finished:
            return
        first = finished[0].ready
        # From step to step, as an event gives milliseconds in fp32: after an hour 0.25 ms would be its smallest step.
        begin_s = self._trace.now_s() - first.elapsed_time(finished[-1].done) / 1e3
        if self._anchor is not None:
            begin_s = self._anchor[1] + self._anchor[0].elapsed_time(first) / 1e3
        self._anchor = (first, begin_s)

        def at_s(event: torch.cuda.Event) -> float:
            return begin_s + first.elapsed_time(event) / 1e3

        self._trace.replay([events.times(at_s) for events in finished])
