"""Whether communication still takes what it took when its plan was chosen: a plan that is stale should be chosen anew.

Each step's seconds x with a bucket in flight are compared with a level learned first, in logarithms, by cumulative sums
in both directions (Page 1954, Biometrika 41): with z = log(x / level), and sigma the scatter of the steps that taught
it,

    up   = max(0, up   + clip(z) - slack)        changed where either reaches the limit
    down = max(0, down - clip(z) - slack)

    slack = max(sigma / 2, log 1.05)    limit = max(10 sigma, 1)    clip: to +- max(3 sigma, 0.5)

Changes below 5 % are left alone. One of 20 % is noticed after 8 to 23 steps, one to half the speed within 3, one step
that hangs never by itself. By Siegmund's approximation (Sequential Analysis, 1985) normal noise gives a false alarm in
70,000 steps: (exp(b) - 1 - b) / (2 * 0.5**2) in each direction, with b = 10 + 1.166.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

NUM_LEARNED = 30
"""Steps that teach the level."""

SLACK, LIMIT, CLIP = math.log(1.05), 1.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Level:
    """What a step takes: the median, and the scatter of logarithms (1.4826 times the median absolute deviation)."""

    seconds: float
    sigma: float

    @classmethod
    def of(cls, times_s: list[float]) -> Level:
        """Of steps that are alike.

        >>> Level.of([1.0, 1.0, 1.0, 50.0])
        Level(seconds=1.0, sigma=0.0)
        """
        median_s = statistics.median(times_s)
        deviations = [abs(math.log(time_s / median_s)) for time_s in times_s]
        return cls(seconds=median_s, sigma=1.4826 * statistics.median(deviations))


class Drift:
    """Watches one number per step. ``level``: None learns it from the first steps.

    >>> drift = Drift(Level(seconds=1.0, sigma=0.02))
    >>> for _ in range(1000): drift.add(1.04)
    >>> drift.has_changed
    False
    >>> for _ in range(5): drift.add(2.0)
    >>> drift.has_changed, round(drift.ratio, 1)
    (True, 2.0)
    """

    def __init__(self, level: Level | None = None) -> None:
        self.level = level
        self._learned: list[float] = []
        self._up = self._down = 0.0
        self._recent: list[float] = []
        self.has_changed = False

    def add(self, time_s: float) -> None:
        """The seconds of one step more; what is not above zero and finite says nothing."""
        if self.has_changed or not 0 < time_s < math.inf:
            return
        if self.level is None:
            self._learned.append(time_s)
            if len(self._learned) == NUM_LEARNED:
                self.level = Level.of(self._learned)
            return
        sigma = self.level.sigma
        most = max(3 * sigma, CLIP)
        z = min(most, max(-most, math.log(time_s / self.level.seconds)))
        slack = max(sigma / 2, SLACK)
        self._up, self._down = max(0.0, self._up + z - slack), max(0.0, self._down - z - slack)
        if self._up == self._down == 0:
            self._recent.clear()  # what comes from now on is what changed
        self._recent.append(time_s)
        self.has_changed = max(self._up, self._down) >= max(10 * sigma, LIMIT)

    @property
    def ratio(self) -> float:
        """Time of a step since the change over that before it."""
        if self.level is None or not self._recent:
            return 1.0
        return statistics.median(self._recent) / self.level.seconds
