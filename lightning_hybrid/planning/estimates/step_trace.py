"""The timeline of a simulated step, in the format of a real run's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_hybrid.comm.plan import BucketPlan
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.planning.model.event_simulation import Span
from lightning_hybrid.planning.model.simulate import SimulatedSteps


def to_trace(outcome: SimulatedSteps) -> CommTrace:
    """Convert the first step to the trace that a real run writes: same rows, same counters, same JSON.

    `to_trace(outcome).write(path, rank=0)` writes a file for Perfetto.
    """
    # A `CommTrace` reads a clock: here a list of one number, which is set to the time of each event in turn.
    now = [0.0]
    trace = CommTrace(clock=lambda: now[0], keep_events=True)
    buckets = {bucket.index: bucket for bucket in outcome.buckets}
    spans = outcome.first.spans
    ends_s = {
        index: max(
            (s.end_s for s in spans if s.chunk.bucket == index),
            default=outcome.first.ready_s[index],
        )
        for index in buckets
    }
    # In order of time, and at one time begin (0), stage (1), end (2): the order in which a real run writes them.
    events: list[tuple[float, int, Callable[[], None]]] = []
    for place, (index, bucket) in enumerate(buckets.items()):
        ready_s = outcome.first.ready_s[index]
        is_last = place == len(buckets) - 1

        # Defaults bind the values of this turn of the loop.
        def begin(bucket: BucketPlan = bucket, is_last: bool = is_last) -> None:
            trace.begin(num_bytes=bucket.num_bytes, is_last=is_last)

        def end(bucket: BucketPlan = bucket, ready_s: float = ready_s) -> None:
            trace.end(bucket, ready_s)

        events += [(ready_s, 0, begin), (ends_s[index], 2, end)]
    for span in spans:

        def stage(span: Span = span) -> None:
            # The algorithm that was simulated, which may replace the plan's.
            chunk = span.chunk
            bucket = replace(buckets[chunk.bucket], algorithm=chunk.algorithm)  # type: ignore[arg-type]
            trace.stage(bucket, span.stage, chunk.column, span.begin_s, int(chunk.num_bytes))

        events.append((span.end_s, 1, stage))
    for at_s, _, happen in sorted(events, key=lambda event: event[:2]):
        now[0] = at_s
        happen()
    return trace
