"""Whether a step takes less time under one plan than under another, decided from few steps.

    round 0     incumbent  A  B  C             every step another plan, so that all other changes on the machine or in
    round 1     C  B  A  incumbent             the network meet every plan; the mirrored order takes off what changes
    round 2     incumbent  A  C                steadily; a plan that has lost is tried no more

A round pairs one step of each challenger with the incumbent's. Its pair is *faster* where it took less time by more
than `LEAST_GAIN`. The signs go through Wald's sequential test (1945, Annals of Mathematical Statistics 16), which asks
nothing of the distribution of step times, whose tail is heavy, but that equal plans be faster as likely as slower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lightning_hybrid.comm.plan import CommPlan

# Our choice: a plan that takes 3 % less is what must be found. Of steps that scatter by 2 % its pairs are faster in 0.8
# of the cases: it wins with probability 0.91, after 23 pairs. One whose pairs are faster in half of them wins with
# 0.008, one that is never faster loses after 4.
LEAST_GAIN = 0.005  # of the incumbent's time
MOST_PAIRS = 48  # of a challenger
_FASTER, _SLOWER = math.log(2 * 0.8), math.log(2 * (1 - 0.8))  # evidence of a pair
_WINS, _LOSES = math.log((1 - 0.05) / 0.01), math.log(0.05 / (1 - 0.01))  # 0.01: error; 0.05: miss, without MOST_PAIRS


def has_won(num_faster: int, num_slower: int) -> bool | None:
    """Return whether a challenger with so many pairs has won (True) or lost (False); None: not decided yet.

    >>> has_won(10, 0), has_won(9, 0), has_won(0, 3), has_won(0, 4)
    (True, None, None, False)
    """
    evidence = num_faster * _FASTER + num_slower * _SLOWER
    if evidence >= _WINS:
        return True
    return False if evidence <= _LOSES or num_faster + num_slower >= MOST_PAIRS else None


class PairedComparison:
    """A comparison of the plan in force with challengers."""

    def __init__(self, incumbent: CommPlan, challengers: Sequence[CommPlan]) -> None:
        self.incumbent = incumbent
        self._num_faster = dict.fromkeys(challengers, 0)
        self._num_slower = dict.fromkeys(challengers, 0)
        self._log_ratios: dict[CommPlan, list[float]] = {challenger: [] for challenger in challengers}
        self._num_rounds = 0

    def order(self) -> tuple[CommPlan, ...]:
        """Return the plans of the next round, one step each; empty where all is decided."""
        if not (undecided := [plan for plan in self._num_faster if self._has_won(plan) is None]):
            return ()
        plans = (self.incumbent, *undecided)
        return plans[::-1] if self._num_rounds % 2 else plans

    def _has_won(self, plan: CommPlan) -> bool | None:
        return has_won(self._num_faster[plan], self._num_slower[plan])

    def record(self, times_s: Sequence[float]) -> None:
        """Record the times of a round, in its order. A time that is not above zero and finite counts as slower."""
        taken_s = dict(zip(self.order(), times_s, strict=True))
        self._num_rounds += 1
        of_incumbent_s = taken_s.pop(self.incumbent)  # of the same round: one pair for each challenger
        for plan, time_s in taken_s.items():
            is_time = 0 < time_s < math.inf and 0 < of_incumbent_s < math.inf
            if is_time and time_s < (1 - LEAST_GAIN) * of_incumbent_s:
                self._num_faster[plan] += 1
            else:
                self._num_slower[plan] += 1  # ties too: a change must pay
            if is_time:
                self._log_ratios[plan].append(math.log(time_s / of_incumbent_s))

    @property
    def winner(self) -> CommPlan:
        """The plan that saves most by the median of its pairs, of those that have won; else the incumbent."""
        return min(filter(self._has_won, self._num_faster), key=self.ratio, default=self.incumbent)

    def ratio(self, plan: CommPlan) -> float:
        """Return the time of a challenger over the incumbent's: the median of their pairs; 1 where there are none."""
        log_ratios = self._log_ratios.get(plan)
        return math.exp(statistics.median(log_ratios)) if log_ratios else 1.0
