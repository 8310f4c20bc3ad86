"""Conversion of a simulated step to the trace format of a real run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_hybrid.comm.plan import BucketPlan
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.planning.model.event_simulation import Span
from lightning_hybrid.planning.model.simulate import SimulatedSteps


def to_trace(outcome: SimulatedSteps) -> CommTrace:
    """Convert the first simulated step to the trace format of a real run.

    Rows, counters and JSON have the same format. `to_trace(outcome).write(path, rank=0)` writes a
    file for Perfetto.
    """
    # A `CommTrace` reads a clock. This one is a list of one number, set to the time of each event.
    clock_s = [0.0]
    trace = CommTrace(clock=lambda: clock_s[0], keep_events=True)
    buckets = {bucket.index: bucket for bucket in outcome.buckets}
    last_position = len(buckets) - 1

    # A real run writes its events in the order of time, and at the same time in the order begin (0),
    # stage (1), end (2).
    events: list[tuple[float, int, Callable[[], None]]] = []
    for position, bucket in enumerate(buckets.values()):
        ready_s = outcome.first.ready_s[bucket.index]
        end_s = _end_of_bucket(outcome, bucket.index)
        is_last = position == last_position

        # Default arguments bind the values of this iteration.
        def begin(bucket: BucketPlan = bucket, is_last: bool = is_last) -> None:
            trace.begin(num_bytes=bucket.num_bytes, is_last=is_last)

        def end(bucket: BucketPlan = bucket, ready_s: float = ready_s) -> None:
            trace.end(bucket, ready_s)

        events.append((ready_s, 0, begin))
        events.append((end_s, 2, end))

    for span in outcome.first.spans:

        def stage(span: Span = span) -> None:
            # The simulated algorithm may differ from the plan's.
            chunk = span.chunk
            bucket = replace(buckets[chunk.bucket], algorithm=chunk.algorithm)  # type: ignore[arg-type]
            trace.stage(bucket, span.stage, chunk.column, span.begin_s, int(chunk.num_bytes))

        events.append((span.end_s, 1, stage))

    for time_s, _, record in sorted(events, key=lambda event: event[:2]):
        clock_s[0] = time_s
        record()
    return trace


def _end_of_bucket(outcome: SimulatedSteps, bucket_index: int) -> float:
    # A bucket without spans needs no communication and ends when it is ready.
    ends_s = [span.end_s for span in outcome.first.spans if span.chunk.bucket == bucket_index]
    return max(ends_s, default=outcome.first.ready_s[bucket_index])
