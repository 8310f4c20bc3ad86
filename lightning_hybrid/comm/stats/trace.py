"""Communication counters, and an optional timeline in Chrome's trace format.

`CommTrace(keep_events=True)` records every bucket and stage, and writes a timeline for Perfetto
(https://ui.perfetto.dev) or Chrome (chrome://tracing). The timeline has one process per rank, and one row per stage and
column.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning_hybrid.comm.plan import BucketPlan
from lightning_hybrid.comm.stats.link_bytes import NO_TRAFFIC, Traffic
from lightning_hybrid.comm.stats.phases import Phase, StepPhases
from lightning_hybrid.comm.stats.summary import BucketSummary, CommSummary

_NOTHING = nullcontext()

# Maximum number of events in a timeline (about 100 MB of JSON). The counters continue after that.
MOST_EVENTS = 500_000


@dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """Start and end times of one bucket on a CUDA device, in seconds.

    Args:
        bucket: Plan of the bucket.
        traffic: Bytes on the links of a node.
        is_last: Whether this is the last bucket of its step.
        ready_s: Time at which the gradients were available.
        done_s: Time at which the bucket was averaged.
        stages: Name, begin, end and number of bytes of each stage.
        is_in_update: True if the bucket held no gradients and the optimizer step waited for it, None if it held no
            gradients and the step did not wait, and False if it held gradients.
    """

    bucket: BucketPlan
    traffic: Traffic
    is_last: bool
    ready_s: float
    done_s: float
    stages: Sequence[tuple[str, float, float, int]] = ()
    is_in_update: bool | None = False


class _Counts:
    """Mutable counters of one bucket, from which a `BucketSummary` is created."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.num_times = 0
        self.in_flight_s = 0.0
        self.exposed_s = 0.0


class CommTrace:
    """Thread-safe counters of an engine's communication, with an optional timeline.

    Args:
        clock: Function that returns seconds.
        keep_events: Whether to record a timeline, which `write` needs.

    Attributes:
        measures_devices: Whether buckets on CUDA are timed. Buckets on a CPU are always timed.
        phases: Recorder of the phases of each step, or None if phases are not measured.
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
        # Re-entrant, because `replay` holds the lock while it calls `begin` and `end`.
        self._lock = threading.RLock()
        self._looks: list[Callable[[], None]] = []
        self._num_in_flight = 0
        self._busy_since_s: float | None = None
        self._exposed_since_s: float | None = None
        self._drained = CommSummary()
        self._reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> CommTrace:
        return self  # Copies of a callback or of the trainer share the trace, as they share the engine.

    def _reset(self) -> None:
        self._counts: dict[str, Any] = {
            field.name: field.default for field in fields(CommSummary) if field.name != "buckets"
        }
        self._by_bucket: dict[BucketPlan, _Counts] = {}

    def measure_devices(self) -> None:
        """Enable timing of buckets on CUDA, starting with the next bucket."""
        self.measures_devices = True

    def enter(self, phase: Phase) -> None:
        """Begin a phase of the training step, if phases are measured."""
        if self.phases is not None:
            self.phases.enter(phase)

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time inside the returned context as waiting for other ranks."""
        if self.phases is None:
            return _NOTHING
        return self._wait_phase(self.phases)

    @contextmanager
    def _wait_phase(self, phases: StepPhases) -> Iterator[None]:
        phase = phases.current
        self.enter(Phase.WAIT)
        try:
            yield
        finally:
            self.enter(phase)

    def look_first(self, look: Callable[[], None]) -> None:
        """Register a function to call before counters are read, such as one that polls the device.

        Args:
            look: Function of an engine that calls `replay` for the buckets which the device has finished.
        """
        self._looks.append(look)

    def _look_first(self) -> None:
        # The trace's lock must not be held here. A `look` function takes its own lock first and then, in `replay`, the
        # trace's lock. The opposite order could deadlock.
        for look in self._looks:
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
        """Count a submitted bucket, and return the time of its submission in seconds.

        `end` must be called later for the same bucket.

        Args:
            num_bytes: Size of the bucket in bytes.
            is_last: Whether this is the last bucket of its step.
            traffic: Bytes on the links of a node.
            at_s: Time of the submission. The default is now.
            is_in_update: True if the bucket holds no gradients and the optimizer step waits for it, None if it holds no
                gradients and the step does not wait (see `count_wait`), and False if it holds gradients.
        """
        with self._lock:
            now_s = self._clock() if at_s is None else at_s
            self._count(num_bytes, traffic, is_last=is_last)
            if is_in_update is False:
                if self._first_s is None:
                    self._first_s = now_s
                if is_last:
                    name = "backward, from its first bucket on"
                    self._event(name, "backward", self._first_s, now_s, None)
                    self._first_s = None
            self._num_in_flight += 1
            if self._busy_since_s is None:
                self._busy_since_s = now_s
            if is_last or (is_in_update and self._exposed_since_s is None):
                # Backward has finished, so the step waits from now on.
                self._exposed_since_s = now_s
                self._last_end_s = now_s
            return now_s

    def count(self, bucket: BucketPlan, traffic: Traffic, *, is_last: bool) -> None:
        """Count a submitted bucket, but measure no times."""
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
        """Count a submitted bucket as averaged or failed.

        Args:
            bucket: Plan of the averaged bucket, or None if the bucket has failed.
            began_s: Time of the submission, as returned by `begin`.
            traffic: Bytes on the links of a node.
            at_s: Time of the end. The default is now.
        """
        with self._lock:
            self._num_in_flight -= 1
            if self._num_in_flight and bucket is None:  # The last failed bucket stops the clock.
                return
            now_s = self._clock() if at_s is None else at_s
            if bucket is not None:
                # Exposed time begins when the step's last bucket is submitted. Each bucket is charged for the time
                # since the previous bucket finished.
                self._event(f"bucket {bucket.index}", "buckets", began_s, now_s, bucket)
                counts = self._by_bucket.setdefault(bucket, _Counts(traffic))
                counts.num_times += 1
                counts.in_flight_s += now_s - began_s
                if self._exposed_since_s is not None:
                    counts.exposed_s += now_s - self._last_end_s
                    self._last_end_s = now_s
            if self._num_in_flight == 0:  # The last bucket in flight stops the clock.
                self._add_times(now_s)
                self._busy_since_s = None
                self._exposed_since_s = None

    def count_wait(self, began_s: float) -> None:
        """Count the time since `began_s` as exposed communication.

        It is called after a forward pass has waited for a collective of the last sharded update.
        """
        with self._lock:
            self._add(exposed_s=self._clock() - began_s)

    def count_rounding(self, error: float, rounded: float) -> None:
        """Add the rounding errors of a codec to the counters.

        Args:
            error: Sum of the squared rounding errors.
            rounded: Sum of the squares of the rounded values.
        """
        with self._lock:
            self._add(rounding_error=error, rounded=rounded)

    def replay(self, buckets: Iterable[DeviceTimes]) -> None:
        """Count buckets that the device has finished, with their start and end times on the device."""
        moments = []
        for bucket in buckets:
            moments.append((bucket.ready_s, False, bucket))
            moments.append((bucket.done_s, True, bucket))
        # The lock is held, because a `drain` in between would use the host's clock.
        with self._lock:
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
        """Return the current time of this trace's clock in seconds."""
        return self._clock()

    def stage(
        self, bucket: BucketPlan, stage: str, column: int, began_s: float, num_bytes: int
    ) -> None:
        """Record an all-reduce stage that has just ended in the timeline.

        Args:
            bucket: Plan of the bucket.
            stage: Name of the stage.
            column: Column of the stage's thread.
            began_s: Time at which the stage began.
            num_bytes: Size of the chunk in bytes.
        """
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
        args: dict[str, Any] = {}
        if bucket is not None:
            args = {"bytes": num_bytes or bucket.num_bytes, "algorithm": bucket.algorithm}
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
        """Write the timeline to a JSON file in Chrome's trace format.

        Times are in microseconds of this host's clock. On CUDA, the device's clock is synchronized with the host's
        clock at the first bucket, and may be late by the duration of the work that was queued at that time.
        """
        self._look_first()
        with self._lock:
            events = list(self._events)  # A copy, because threads continue to add events.
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
        path.parent.mkdir(parents=True, exist_ok=True)  # The folder of a run may not exist yet.
        path.write_text(json.dumps({"traceEvents": lines, "displayTimeUnit": "ms"}))

    def write_if_possible(self, folder: str | Path, *, rank: int) -> None:
        """Write the timeline to `rank<r>.json` in a folder, or warn if that fails."""
        path = Path(folder) / f"rank{rank}.json"
        try:
            self.write(path, rank=rank)
        except OSError as error:
            warnings.warn(
                f"`report.trace_dir` (={folder}) contains no timeline of this rank, because {path} could not be "
                f"written ({error.strerror or error}). Set a folder to which every rank can write.",
                stacklevel=2,
            )

    def drain(self) -> CommSummary:
        """Return a summary of the communication since the previous call, and reset the counters.

        The call never waits. On CUDA, the summary covers the steps that the device has finished.
        """
        self._look_first()
        with self._lock:
            summary = self._summary()
            self._drained += summary
            self._reset()
            return summary

    def total(self) -> CommSummary:
        """Return a summary of all communication since the trace was created."""
        self._look_first()
        with self._lock:
            return self._drained + self._summary()

    def _summary(self) -> CommSummary:
        # Buckets in flight count up to now in this summary, and from now on in the next summary.
        if self._num_in_flight:
            now_s = self._clock()
            self._add_times(now_s)
            self._busy_since_s = now_s
            if self._exposed_since_s is not None:
                self._exposed_since_s = now_s
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
