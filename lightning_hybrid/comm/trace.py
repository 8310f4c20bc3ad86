"""How much was communicated, for how long, and how much of that a step had to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CommSummary:
    """What one rank communicated since the last summary.

    ``num_steps``: backward passes that were averaged. ``num_buckets``, ``num_bytes``: handed to the sum, bytes as on
    the wire, before any algorithm multiplies them. ``busy_s``: time with at least one bucket in flight. ``exposed_s``:
    the part of it that backward did not hide, from the moment the last bucket of a step was handed over until every
    bucket of that step was done. Both in seconds of wall clock, and None on CUDA: there a bucket is handed to a stream
    and the host's clock sees none of it.
    """

    num_steps: int
    num_buckets: int
    num_bytes: int
    busy_s: float | None
    exposed_s: float | None


class CommTrace:
    """Counters that a hook's and an engine's threads may write while another thread drains them.

    ``clock`` returns seconds.

    >>> ticks = iter([0.0, 2.0, 6.0])
    >>> trace = CommTrace(clock=lambda: next(ticks))
    >>> trace.begin(num_bytes=8, is_last=False)    # 0 s
    >>> trace.begin(num_bytes=4, is_last=True)     # 2 s: backward ends
    >>> trace.end(); trace.end()                   # the clock is read at the second: 6 s
    >>> trace.drain()
    CommSummary(num_steps=1, num_buckets=2, num_bytes=12, busy_s=6.0, exposed_s=4.0)
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_in_flight = 0
        self._busy_since_s: float | None = None
        self._exposed_since_s: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._num_steps = self._num_buckets = self._num_bytes = 0
        self._busy_s = self._exposed_s = 0.0
        self._is_timed = True

    def begin(self, *, num_bytes: int, is_last: bool) -> None:
        """A bucket was handed over. Each call is followed by one of ``end``."""
        with self._lock:
            now_s = self._clock()
            self._count(num_bytes, is_last)
            self._num_in_flight += 1
            if self._busy_since_s is None:
                self._busy_since_s = now_s
            if is_last:
                self._exposed_since_s = now_s

    def end(self) -> None:
        """A bucket was averaged, or given up."""
        with self._lock:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._add_times(self._clock())
                self._busy_since_s = self._exposed_since_s = None

    def now_s(self) -> float:
        """Seconds on this trace's clock."""
        return self._clock()

    def stage(self, bucket: object, stage: str, column: int, began_s: float) -> None:
        """A stage of a piece ended."""

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
