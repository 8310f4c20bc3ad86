"""Counters of communication, and if asked for a timeline of it.

`CommTrace(keep_events=True)` records every bucket and stage and writes them as a timeline that Perfetto
(https://ui.perfetto.dev) and Chrome (chrome://tracing) show: one process per rank, one row per stage and column.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning_hybrid.comm.plan import BucketPlan
from lightning_hybrid.comm.stats.link_bytes import NO_TRAFFIC, Traffic
from lightning_hybrid.comm.stats.phases import Phase, StepPhases
from lightning_hybrid.comm.stats.summary import BucketSummary, CommSummary

# A timeline ends after so many events (about 100 MB of JSON); the counters go on.
MOST_EVENTS = 500_000


@dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """The times of one bucket on a device, which are known only afterwards, in seconds."""

    bucket: BucketPlan
    traffic: Traffic
    is_last: bool
    ready_s: float  # its gradients were there
    done_s: float  # it was averaged
    stages: Sequence[tuple[str, float, float, int]] = ()  # name, begin, end, bytes
    is_in_update: bool | None = (
        False  # no gradients: the optimizer's step waited for it; None: it did not
    )


class _Counts:  # the rest of a `BucketSummary`
    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.num_times = 0
        self.in_flight_s = self.exposed_s = 0.0


class CommTrace:
    """Counters that the threads of an engine may write while another thread drains them.

    `clock` returns seconds. `keep_events` is for `write`.

    Attributes:
        measures_devices: whether a device records when each bucket began and ended. The threads of a CPU always do.
        phases: recorder of the phases of each step. None: nobody measures them.
    """

    def __init__(
        self, *, clock: Callable[[], float] = perf_counter, keep_events: bool = False
    ) -> None:
        self._clock = clock
        self.keep_events = keep_events
        self.measures_devices = keep_events
        self.phases: StepPhases | None = None
        self._events: list[dict[str, Any]] = []
        self._first_s: float | None = None
        self._last_end_s = 0.0
        # Re-entrant: `replay` holds it over many calls of `begin` and `end`.
        self._lock = threading.RLock()
        self._looks: list[Callable[[], None]] = []
        self._num_in_flight = 0
        self._busy_since_s: float | None = None
        self._exposed_since_s: float | None = None
        self._drained = CommSummary()
        self._reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> CommTrace:
        return self  # as the engine that counts in it: a copy of a callback or of the trainer shares both

    def _reset(self) -> None:
        self._counts: dict[str, Any] = {
            field.name: field.default for field in fields(CommSummary) if field.name != "buckets"
        }
        self._by_bucket: dict[BucketPlan, _Counts] = {}

    def measure_devices(self) -> None:
        """Have a device record the times of buckets from the next one on, as somebody reads them."""
        self.measures_devices = True

    def enter(self, phase: Phase) -> None:
        """Begin a phase of the step, if phases are measured."""
        if self.phases is not None:
            self.phases.enter(phase)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for other ranks, if phases are measured."""
        if self.phases is None:
            yield
            return
        phase = self.phases.current
        self.enter(Phase.WAIT)
        try:
            yield
        finally:
            self.enter(phase)

    def look_first(self, look: Callable[[], None]) -> None:
        """Call `look` before counts are read: it replays what a device has done for an engine."""
        self._looks.append(look)

    def _look_first(self) -> None:
        for look in self._looks:
            # A look replays, which takes the lock, and takes the lock of looks first: the other order could deadlock.
            look()

    def begin(
        self,
        *,
        num_bytes: int,
        is_last: bool,
        traffic: Traffic = NO_TRAFFIC,
        at_s: float | None = None,
        is_in_update: bool | None = False,
    ) -> float:
        """Count a bucket that was submitted. `end` must follow. Returns the time: `at_s`, or now.

        `is_in_update`: it is no bucket of gradients, but an exchange that the optimizer's step waits for; None: nor
        does the step wait, see `count_wait`.
        """
        with self._lock:
            now_s = self._clock() if at_s is None else at_s
            self._count(num_bytes, traffic, is_last=is_last)
            if is_in_update is False:
                first_s = now_s if self._first_s is None else self._first_s
                self._first_s = None if is_last else first_s
                if is_last:
                    self._event(
                        "backward, from its first bucket on", "backward", first_s, now_s, None
                    )
            self._num_in_flight += 1
            if self._busy_since_s is None:
                self._busy_since_s = now_s
            if is_last or (is_in_update and self._exposed_since_s is None):
                self._exposed_since_s = self._last_end_s = (
                    now_s  # backward is over: from here on a step waits
                )
            return now_s

    def count(self, bucket: BucketPlan, traffic: Traffic, *, is_last: bool) -> None:
        """Count a bucket whose times are not measured."""
        with self._lock:
            self._count(bucket.num_bytes, traffic, is_last=is_last)

    def _count(self, num_bytes: int, traffic: Traffic, *, is_last: bool) -> None:
        self._add(num_steps=is_last, num_buckets=1, num_bytes=num_bytes)
        self._add(
            least_bytes_across=traffic.least_across,
            bytes_across=traffic.across,
            bytes_inside=traffic.inside,
        )

    def end(
        self,
        bucket: BucketPlan | None = None,
        began_s: float = 0.0,
        traffic: Traffic = NO_TRAFFIC,
        at_s: float | None = None,
    ) -> None:
        """Count a bucket that was averaged, or given up (None), now or at `at_s`. `began_s`: when it was submitted."""
        with self._lock:
            self._num_in_flight -= 1  # several buckets in flight count their time once
            if self._num_in_flight and bucket is None:  # given up: the last of them ends the time
                return
            now_s = self._clock() if at_s is None else at_s
            if bucket is not None:
                # Exposed time is what passes after the step's last bucket was submitted. It is given to the buckets in
                # the order in which they are done: each gets the time since the one before.
                self._event(f"bucket {bucket.index}", "buckets", began_s, now_s, bucket)
                counts = self._by_bucket.setdefault(bucket, _Counts(traffic))
                counts.num_times += 1
                counts.in_flight_s += now_s - began_s
                if self._exposed_since_s is not None:
                    counts.exposed_s += now_s - self._last_end_s
                    self._last_end_s = now_s
            if self._num_in_flight == 0:  # the last one in flight stops the clock
                self._add_times(now_s)
                self._busy_since_s = self._exposed_since_s = None

    def count_wait(self, began_s: float) -> None:
        """Count the time since then as exposed: forward has waited for what the step did not wait for."""
        with self._lock:
            self._add(exposed_s=self._clock() - began_s)

    def count_rounding(self, error: float, rounded: float) -> None:
        """Count what a codec lost: sums of squares, of errors and of what was rounded."""
        with self._lock:
            self._add(rounding_error=error, rounded=rounded)

    def replay(self, buckets: Iterable[DeviceTimes]) -> None:
        """Count buckets that a device has averaged, each begun and ended when it was there."""
        moments = [
            moment
            for bucket in buckets
            for moment in ((bucket.ready_s, False, bucket), (bucket.done_s, True, bucket))
        ]
        with self._lock:  # a drain meanwhile would read the host's clock
            for at_s, is_end, bucket in sorted(moments, key=lambda moment: moment[:2]):
                if is_end:
                    self.end(bucket.bucket, bucket.ready_s, bucket.traffic, at_s=at_s)
                    for stage, begin_s, end_s, num_bytes in bucket.stages:
                        self._stage(bucket.bucket, stage, 0, begin_s, end_s, num_bytes)
                else:
                    self.begin(
                        num_bytes=bucket.bucket.num_bytes,
                        is_last=bucket.is_last,
                        traffic=bucket.traffic,
                        at_s=at_s,
                        is_in_update=bucket.is_in_update,
                    )

    def now_s(self) -> float:
        """Read this trace's clock, in seconds."""
        return self._clock()

    def stage(
        self, bucket: BucketPlan, stage: str, column: int, began_s: float, num_bytes: int
    ) -> None:
        """Record that a stage of a chunk of `num_bytes` ended."""
        if self.keep_events:
            with self._lock:
                self._stage(bucket, stage, column, began_s, self._clock(), num_bytes)

    def _stage(
        self,
        bucket: BucketPlan,
        stage: str,
        column: int,
        begin_s: float,
        end_s: float,
        num_bytes: int,
    ) -> None:
        row = f"{bucket.algorithm}.{column} {stage}"
        self._event(f"bucket {bucket.index}", row, begin_s, end_s, bucket, num_bytes)

    def _event(
        self,
        name: str,
        row: str,
        begin_s: float,
        end_s: float,
        bucket: BucketPlan | None,
        num_bytes: int | None = None,
    ) -> None:
        if not self.keep_events or len(self._events) >= MOST_EVENTS:
            return
        args = (
            {}
            if bucket is None
            else {"bytes": num_bytes or bucket.num_bytes, "algorithm": bucket.algorithm}
        )
        event = {
            "name": name,
            "row": row,
            "ph": "X",
            "ts": begin_s * 1e6,
            "dur": (end_s - begin_s) * 1e6,
            "args": args,
        }
        self._events.append(event)

    def write(self, path: Path, *, rank: int) -> None:
        """Write the timeline so far as JSON in Chrome's trace format, in microseconds of this host's clock."""
        # On CUDA they are the device's, set equal to this clock at the first bucket: the device may have been behind
        # by what was queued then.
        self._look_first()
        with self._lock:
            events = list(self._events)  # a copy: threads go on adding
        rows = {row: tid for tid, row in enumerate(sorted({event["row"] for event in events}))}
        named = [
            ("process_name", 0, f"rank {rank}"),
            *(("thread_name", tid, row) for row, tid in rows.items()),
        ]
        lines: list[dict[str, Any]] = [
            {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": {"name": text}}
            for kind, tid, text in named
        ]
        for event in events:
            lines.append({**event, "pid": rank, "tid": rows[event["row"]]})
            del lines[-1]["row"]
        path.parent.mkdir(parents=True, exist_ok=True)  # the folder of a run may not be there yet
        path.write_text(json.dumps({"traceEvents": lines, "displayTimeUnit": "ms"}))

    def write_if_possible(self, folder: str | Path, *, rank: int) -> None:
        """Write `rank<r>.json` into the folder, or warn where it cannot be written: a run is not lost for that."""
        path = Path(folder) / f"rank{rank}.json"
        try:
            self.write(path, rank=rank)
        except OSError as error:
            warnings.warn(
                f"`report.trace_dir`: {path} was not written ({error.strerror}): no timeline of it.",
                stacklevel=2,
            )

    def drain(self) -> CommSummary:
        """Return the counts since the last drain, on CUDA those of steps that the device has completed. Never waits."""
        self._look_first()
        with self._lock:
            summary = self._summary()
            self._drained += summary  # `total` counts over all drains
            self._reset()
            return summary

    def total(self) -> CommSummary:
        """Return the counts since the beginning, however often drained."""
        self._look_first()
        with self._lock:
            return self._drained + self._summary()

    def _summary(self) -> CommSummary:
        if (
            self._num_in_flight
        ):  # what is in flight counts up to now here, and from now on in the next summary
            now_s = self._clock()
            self._add_times(now_s)
            self._busy_since_s = now_s
            self._exposed_since_s = None if self._exposed_since_s is None else now_s
        buckets = (
            BucketSummary(**vars(bucket), **vars(counts))
            for bucket, counts in self._by_bucket.items()
        )
        by_index = sorted(buckets, key=lambda bucket: (bucket.index, bucket.numel, bucket.dtype))
        return CommSummary(**self._counts, buckets=tuple(by_index))

    def _add_times(self, now_s: float) -> None:
        if self._busy_since_s is not None:
            self._add(busy_s=now_s - self._busy_since_s)
        if self._exposed_since_s is not None:
            self._add(exposed_s=now_s - self._exposed_since_s)

    def _add(self, **counts: float) -> None:
        for name, count in counts.items():
            self._counts[name] += count
