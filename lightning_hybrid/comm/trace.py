"""How much was communicated, for how long, how much of that a step had to wait for; and, if asked, when what happened.

``CommTrace(keep_events=True)`` remembers every bucket and stage and writes them as a timeline that Perfetto
(https://ui.perfetto.dev) and Chrome (chrome://tracing) show: one process per rank, one row per stage and column.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

MOST_EVENTS = 500_000
"""A timeline ends after so many events (about 100 MB of JSON); the counters go on."""


class BucketLike(Protocol):
    """What a timeline says of a bucket."""

    @property
    def index(self) -> int:
        """Place in the step."""

    @property
    def num_bytes(self) -> int:
        """On the wire."""

    @property
    def algorithm(self) -> str:
        """That carries it."""


@dataclass(frozen=True, kw_only=True)
class CommSummary:
    """What one rank communicated since the last summary.

    ``num_steps``: backward passes that were averaged. ``num_buckets``, ``num_bytes``: handed to the sum, bytes as on
    the wire, before any algorithm multiplies them. ``busy_s``: time with at least one bucket in flight. ``exposed_s``:
    the part of it that backward did not hide, from the moment the last bucket of a step was handed over until every
    bucket of that step was done. Both in seconds of wall clock, and None on CUDA: there a bucket is handed to a stream
    and the host's clock sees none of it. ``exposed_by_bucket_s``: how much of ``exposed_s`` passed until each bucket
    (by index) was done, and no other that was done before. ``least_bytes_across``: bytes that every node must send to
    the others for these buckets, whatever the algorithm: 2 (N - 1) / N of theirs on N nodes.
    """

    num_steps: int
    num_buckets: int
    num_bytes: int
    busy_s: float | None
    exposed_s: float | None
    exposed_by_bucket_s: dict[int, float] = field(default_factory=dict)
    least_bytes_across: float = 0.0

    def achieved(self, *, bytes_per_s: float) -> float | None:
        """Part of the time in flight that a link of ``bytes_per_s`` between nodes needs at least: 1 is the bound.

        None where no time was taken. At most 1 while the link keeps to its word.

        >>> CommSummary(num_steps=1, num_buckets=1, num_bytes=10, busy_s=2.0, exposed_s=0.0,
        ...             least_bytes_across=10.0).achieved(bytes_per_s=10.0)
        0.5
        """
        return self.least_bytes_across / bytes_per_s / self.busy_s if self.busy_s else None


class CommTrace:
    """Counters that a hook's and an engine's threads may write while another thread drains them.

    ``clock`` returns seconds. ``keep_events`` is for ``write``.

    >>> ticks = iter([0.0, 2.0, 6.0])
    >>> trace = CommTrace(clock=lambda: next(ticks))
    >>> _ = trace.begin(num_bytes=8, is_last=False)    # 0 s
    >>> _ = trace.begin(num_bytes=4, is_last=True)     # 2 s: backward ends
    >>> trace.end(); trace.end()                   # the clock is read at the second: 6 s
    >>> summary = trace.drain()
    >>> summary.num_buckets, summary.num_bytes, summary.busy_s, summary.exposed_s
    (2, 12, 6.0, 4.0)
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, keep_events: bool = False) -> None:
        self._clock = clock
        self.keep_events = keep_events
        self._events: list[dict[str, Any]] = []
        self._first_s: float | None = None
        self._last_end_s = 0.0
        self._lock = threading.Lock()
        self._num_in_flight = 0
        self._busy_since_s: float | None = None
        self._exposed_since_s: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._num_steps = self._num_buckets = self._num_bytes = 0
        self._busy_s = self._exposed_s = self._least_bytes_across = 0.0
        self._exposed_by_bucket_s: dict[int, float] = {}
        self._is_timed = True

    def begin(self, *, num_bytes: int, is_last: bool, least_bytes_across: float = 0.0) -> float:
        """A bucket was handed over. Each call is followed by one of ``end``. Returns the time."""
        with self._lock:
            now_s = self._clock()
            self._count(num_bytes, is_last)
            self._least_bytes_across += least_bytes_across
            self._note_backward(now_s, is_last)
            self._num_in_flight += 1
            if self._busy_since_s is None:
                self._busy_since_s = now_s
            if is_last:
                self._exposed_since_s = self._last_end_s = now_s
            return now_s

    def end(self, bucket: BucketLike | None = None, began_s: float = 0.0) -> None:
        """A bucket was averaged, or given up (None); ``began_s``: when it was handed over."""
        with self._lock:
            self._num_in_flight -= 1
            if self._num_in_flight and bucket is None:
                return
            now_s = self._clock()
            if bucket is not None:
                self._event(f"bucket {bucket.index}", "buckets", began_s, now_s, bucket)
                if self._exposed_since_s is not None:
                    exposed = self._exposed_by_bucket_s
                    exposed[bucket.index] = exposed.get(bucket.index, 0.0) + now_s - self._last_end_s
                    self._last_end_s = now_s
            if self._num_in_flight == 0:
                self._add_times(now_s)
                self._busy_since_s = self._exposed_since_s = None

    def _note_backward(self, now_s: float, is_last: bool) -> None:
        if self._first_s is None:
            self._first_s = now_s
        if is_last:
            self._event("backward, from its first bucket on", "backward", self._first_s, now_s, None)
            self._first_s = None

    def now_s(self) -> float:
        """Seconds on this trace's clock."""
        return self._clock()

    def stage(self, bucket: BucketLike, stage: str, column: int, began_s: float, num_bytes: int) -> None:
        """A stage of a piece of ``num_bytes`` ended."""
        if self.keep_events:
            with self._lock:
                row = f"{bucket.algorithm}.{column} {stage}"
                self._event(f"bucket {bucket.index}", row, began_s, self._clock(), bucket, num_bytes)

    def _event(
        self, name: str, row: str, begin_s: float, end_s: float, bucket: BucketLike | None, num_bytes: int | None = None
    ) -> None:
        if not self.keep_events or len(self._events) >= MOST_EVENTS:
            return
        args: dict[str, Any] = {}
        if bucket is not None:
            args = {
                "bytes": bucket.num_bytes if num_bytes is None else num_bytes,
                "algorithm": bucket.algorithm,
            }
        event = {"name": name, "row": row, "ph": "X", "ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6, "args": args}
        self._events.append(event)

    def write(self, path: Path, *, rank: int) -> None:
        """The timeline so far, as JSON in Chrome's trace format; times in microseconds of this host's clock."""
        with self._lock:
            events = list(self._events)
        rows = {row: tid for tid, row in enumerate(sorted({event["row"] for event in events}))}
        named = [("process_name", 0, f"rank {rank}"), *(("thread_name", tid, row) for row, tid in rows.items())]
        lines: list[dict[str, Any]] = [
            {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": {"name": text}} for kind, tid, text in named
        ]
        for event in events:
            lines.append({**event, "pid": rank, "tid": rows[event["row"]]})
            del lines[-1]["row"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": lines, "displayTimeUnit": "ms"}))

    def count_untimed(self, *, num_bytes: int, is_last: bool) -> None:
        """A bucket was put on a CUDA stream: count it and claim no times."""
        with self._lock:
            self._count(num_bytes, is_last)
            self._is_timed = False

    def drain(self) -> CommSummary:
        """The counts since the last drain. Times of buckets still in flight are split at this moment."""
        with self._lock:
            if self._num_in_flight:
                now_s = self._clock()
                self._add_times(now_s)
                self._busy_since_s = now_s
                self._exposed_since_s = None if self._exposed_since_s is None else now_s
            summary = CommSummary(
                num_steps=self._num_steps,
                num_buckets=self._num_buckets,
                num_bytes=self._num_bytes,
                busy_s=self._busy_s if self._is_timed else None,
                exposed_s=self._exposed_s if self._is_timed else None,
                exposed_by_bucket_s=self._exposed_by_bucket_s,
                least_bytes_across=self._least_bytes_across,
            )
            self._reset()
            return summary

    def _count(self, num_bytes: int, is_last: bool) -> None:
        self._num_steps += is_last
        self._num_buckets += 1
        self._num_bytes += num_bytes

    def _add_times(self, now_s: float) -> None:
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        if self._exposed_since_s is not None:
            self._exposed_s += now_s - self._exposed_since_s
