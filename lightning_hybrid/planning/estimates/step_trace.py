"""Conversion of a simulated step to the trace format of a real run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from lightning_hybrid.comm.plan import BucketPlan
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.planning.model.event_simulation import Span
from lightning_hybrid.planning.model.simulate import SimulatedSteps


class _Clock:
    """Clock that shows the simulated time of the event that is being recorded."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def read(self) -> float:
        return self.time_s


class _Kind(IntEnum):
    """Kinds of events, in the order in which a real run records events of the same time."""

    BEGIN = 0
    STAGE = 1
    END = 2


@dataclass(frozen=True, kw_only=True)
class _Event:
    """Event of a simulated step.

    Attributes:
        time_s: Time of the event in seconds.
        kind: Beginning or end of a bucket, or end of a stage.
        bucket: Plan of the bucket.
        is_last: Whether the bucket is the last one of the step.
        span: Interval of the stage. None: the event is not the end of a stage.
    """

    time_s: float
    kind: _Kind
    bucket: BucketPlan
    is_last: bool = False
    span: Span | None = None


def to_trace(outcome: SimulatedSteps) -> CommTrace:
    """Convert the first simulated step to the trace format of a real run.

    Rows, counters and JSON have the same format. `to_trace(outcome).write(path, rank=0)` writes a
    file for Perfetto.
    """
    clock = _Clock()
    trace = CommTrace(clock=clock.read, keep_events=True)
    events = _bucket_events(outcome) + _stage_events(outcome)
    events.sort(key=lambda event: (event.time_s, event.kind))

    for event in events:
        clock.time_s = event.time_s
        bucket = event.bucket
        span = event.span
        if span is not None:
            num_bytes = int(span.chunk.num_bytes)
            trace.stage(bucket, span.stage, span.chunk.column, span.begin_s, num_bytes)
        elif event.kind is _Kind.BEGIN:
            trace.begin(num_bytes=bucket.num_bytes, is_last=event.is_last)
        else:
            ready_s = outcome.first.ready_s[bucket.index]
            trace.end(bucket, ready_s)
    return trace


def _bucket_events(outcome: SimulatedSteps) -> list[_Event]:
    """Return the events that start and end each bucket."""
    events = []
    last_index = len(outcome.buckets) - 1
    for bucket in outcome.buckets:
        ready_s = outcome.first.ready_s[bucket.index]
        end_s = _end_of_bucket(outcome, bucket.index)
        is_last = bucket.index == last_index
        events.append(_Event(time_s=ready_s, kind=_Kind.BEGIN, bucket=bucket, is_last=is_last))
        events.append(_Event(time_s=end_s, kind=_Kind.END, bucket=bucket))
    return events


def _stage_events(outcome: SimulatedSteps) -> list[_Event]:
    """Return the end of each stage of each chunk."""
    events = []
    bucket_by_index = {bucket.index: bucket for bucket in outcome.buckets}
    for span in outcome.first.spans:
        chunk = span.chunk
        # The simulated algorithm may differ from the plan's.
        bucket = replace(bucket_by_index[chunk.bucket], algorithm=chunk.algorithm)  # type: ignore[arg-type]
        events.append(_Event(time_s=span.end_s, kind=_Kind.STAGE, bucket=bucket, span=span))
    return events


def _end_of_bucket(outcome: SimulatedSteps, bucket_index: int) -> float:
    """Return the time at which a bucket is averaged, in seconds."""
    # A bucket without spans needs no communication and ends when it is ready.
    ends_s = [span.end_s for span in outcome.first.spans if span.chunk.bucket == bucket_index]
    return max(ends_s, default=outcome.first.ready_s[bucket_index])
