"""Whether communication still takes the time it took when its plan was chosen; if not, the plan is stale.

Each step's seconds x with a bucket in flight are compared with a baseline learned first, in logarithms, by cumulative
sums in both directions (CUSUM: Page 1954, Biometrika 41): with z = log(x / baseline), and sigma the scatter of the
steps from which it was learned,

    up   = max(0, up   + clip(z) - slack)        changed where either reaches the limit
    down = max(0, down - clip(z) - slack)

    slack = max(sigma, log 1.05)    limit = max(15 sigma, 1)    clip: to +- max(3 sigma, 0.5)

Changes below 5 %, and below the scatter, are left alone. By simulation, with normal noise and the baseline learned from
50 steps (its test): no false alarm in 60 runs of 10,000 steps, at a scatter of 5 to 30 %; at 5 %, twice or half the
time is noticed after 3 steps and 20 % more after 8, at 20 % twice the time after 9.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

# Steps from which the baseline is learned.
NUM_LEARNED = 50

# More than the 10 sigma and half a sigma of textbooks, which are for a known baseline: with one learned from 30 steps
# every other run had a false alarm. A step that hangs counts for half of the limit at most.
SLACK, LIMIT, CLIP = math.log(1.05), 1.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The time of a step: its median, and the scatter of its logarithm (1.4826 times the median absolute deviation)."""

    seconds: float
    sigma: float

    @classmethod
    def of(cls, times_s: list[float]) -> Baseline:
        """Learn it from steps under one plan.

        >>> Baseline.of([1.0, 1.0, 1.0, 50.0])
        Baseline(seconds=1.0, sigma=0.0)
        """
        median_s = statistics.median(times_s)
        deviations = [abs(math.log(time_s / median_s)) for time_s in times_s]
        return cls(seconds=median_s, sigma=1.4826 * statistics.median(deviations))


class ChangeDetector:
    """A watch on one number per step. `baseline`: None learns it from the first steps.

    >>> detector = ChangeDetector(Baseline(seconds=1.0, sigma=0.02))
    >>> for _ in range(1000): detector.add(1.04)
    >>> detector.has_changed
    False
    >>> for _ in range(5): detector.add(2.0)
    >>> detector.has_changed, round(detector.ratio, 1)
    (True, 2.0)
    """

    def __init__(self, baseline: Baseline | None = None) -> None:
        self.baseline = baseline
        self._learned: list[float] = []
        self._up = self._down = 0.0
        self._recent: deque[float] = deque(maxlen=3)  # the fewest steps in which a change is noticed
        self.has_changed = False

    def add(self, time_s: float) -> None:
        """Add the seconds of one step; a value that is not above zero and finite is left out."""
        if self.has_changed or not 0 < time_s < math.inf:  # found once is enough
            return
        if self.baseline is None:
            self._learned.append(time_s)
            if len(self._learned) == NUM_LEARNED:
                self.baseline = Baseline.of(self._learned)
            return
        sigma = self.baseline.sigma
        most = max(3 * sigma, CLIP)
        z = min(most, max(-most, math.log(time_s / self.baseline.seconds)))  # one step that hangs is no change
        slack = max(sigma, SLACK)
        self._up, self._down = max(0.0, self._up + z - slack), max(0.0, self._down - z - slack)
        self._recent.append(time_s)
        self.has_changed = max(self._up, self._down) >= max(15 * sigma, LIMIT)

    @property
    def ratio(self) -> float:
        """Time of a step over the baseline: the median of the last three."""
        if self.baseline is None or not self._recent:
            return 1.0
        return statistics.median(self._recent) / self.baseline.seconds
