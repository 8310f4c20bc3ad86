"""Whether communication still takes what it took when its plan was chosen: a plan that is stale should be chosen anew.

Each step's seconds x with a bucket in flight are compared with a level learned first, in logarithms, by cumulative sums
in both directions (Page 1954, Biometrika 41): with z = log(x / level), and sigma the scatter of the steps that taught
it,

    up   = max(0, up   + clip(z) - slack)        changed where either reaches the limit
    down = max(0, down - clip(z) - slack)

    slack = max(sigma, log 1.05)    limit = max(15 sigma, 1)    clip: to +- max(3 sigma, 0.5)

Changes below 5 %, and below the scatter, are left alone; a step that hangs does not count for more than half of the
limit. By simulation, with normal noise and the level learned from 50 steps
(tests/comm/tuning/test_change_detector.py): no false alarm
in 60 runs of 10,000 steps, at a scatter of 5 to 30 %; at 5 %, twice or half the time is noticed after 3 steps and 20 %
more after 8, at 20 % twice the time after 9. That is why it waits for more than the 10 sigma and half a sigma of
textbooks, which are for a level that is known: with one learned from 30 steps every other run had a false alarm.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

NUM_LEARNED = 50
"""Steps that teach the level."""

SLACK, LIMIT, CLIP = math.log(1.05), 1.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a step takes: the median, and the scatter of logarithms (1.4826 times the median absolute deviation)."""

    seconds: float
    sigma: float

    @classmethod
    def of(cls, times_s: list[float]) -> Baseline:
        """Of steps that are alike.

        >>> Baseline.of([1.0, 1.0, 1.0, 50.0])
        Baseline(seconds=1.0, sigma=0.0)
        """
        median_s = statistics.median(times_s)
        deviations = [abs(math.log(time_s / median_s)) for time_s in times_s]
        return cls(seconds=median_s, sigma=1.4826 * statistics.median(deviations))


class ChangeDetector:
    """Watches one number per step. ``level``: None learns it from the first steps.

    >>> drift = ChangeDetector(Baseline(seconds=1.0, sigma=0.02))
    >>> for _ in range(1000): drift.add(1.04)
    >>> drift.has_changed
    False
    >>> for _ in range(5): drift.add(2.0)
    >>> drift.has_changed, round(drift.ratio, 1)
    (True, 2.0)
    """

    def __init__(self, level: Baseline | None = None) -> None:
        self.level = level
        self._learned: list[float] = []
        self._up = self._down = 0.0
        self._recent: deque[float] = deque(maxlen=3)  # the fewest steps in which a change is noticed
        self.has_changed = False

    def add(self, time_s: float) -> None:
        """The seconds of one step more; what is not above zero and finite says nothing."""
        if self.has_changed or not 0 < time_s < math.inf:
            return
        if self.level is None:
            self._learned.append(time_s)
            if len(self._learned) == NUM_LEARNED:
                self.level = Baseline.of(self._learned)
            return
        sigma = self.level.sigma
        most = max(3 * sigma, CLIP)
        z = min(most, max(-most, math.log(time_s / self.level.seconds)))
        slack = max(sigma, SLACK)
        self._up, self._down = max(0.0, self._up + z - slack), max(0.0, self._down - z - slack)
        self._recent.append(time_s)
        self.has_changed = max(self._up, self._down) >= max(15 * sigma, LIMIT)

    @property
    def ratio(self) -> float:
        """Time of a step over the level: of the last three, by their median."""
        if self.level is None or not self._recent:
            return 1.0
        return statistics.median(self._recent) / self.level.seconds
