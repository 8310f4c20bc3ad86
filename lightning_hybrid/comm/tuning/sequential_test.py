"""Whether a step takes less time one way than another, decided from few steps by paired comparison.

    round 0     incumbent  A  B  C             every step another arm, so that all other changes on the machine or in
    round 1     C  B  A  incumbent             the network meet every arm; the mirrored order takes off what changes
    round 2     incumbent  A  C                steadily; an arm that has lost is tried no more

Each round pairs one step of every challenger with the incumbent's of the same round. A pair is *faster* where the
challenger took less time by more than `least_gain`. The signs go through Wald's sequential test of a proportion (Wald
1945, Annals of Mathematical Statistics 16), which needs fewest pairs of all tests of its error probabilities. It asks
nothing of the distribution of step times, whose tail is heavy, but that equal arms be faster as likely as slower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Arm = TypeVar("Arm", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class SequentialSignTest:
    """A sequential test of how often a challenger's pairs are faster.

        evidence = sum over pairs of    log(2 p) if faster, log(2 (1 - p)) if slower          p -> share_if_faster

    It wins once that reaches log((1 - miss) / error), and has lost at log(miss / (1 - error)) or after `most_pairs`.

    Args:
        error: probability that one wins whose pairs are faster in half of the cases.
        miss: that one does not whose pairs are faster in `share_if_faster` of them, were there no `most_pairs`.
        share_if_faster: 0.8: of two plans whose steps scatter by 2 % (standard deviation) the one that takes 3 % less
            time is faster by half a percent in 0.81 of the pairs.
        most_pairs: of each challenger.
        least_gain: what part of the incumbent's time a pair must save to count as faster; below, changing is not worth
            it.

    Both probabilities hold up to the overshoot at the limits; `outcome` is exact. All five values are our choice: a
    plan that is 3 % better is what must be found.

    Raises:
        ValueError: if a value is outside these.

    >>> test = SequentialSignTest()
    >>> for share in (0.2, 0.5, 0.8, 0.95):
    ...     wins, num_pairs = test.outcome(share)
    ...     print(f"{share}: wins {wins:.3f} after {num_pairs:.0f} pairs")
    0.2: wins 0.000 after 5 pairs
    0.5: wins 0.008 after 14 pairs
    0.8: wins 0.908 after 23 pairs
    0.95: wins 1.000 after 12 pairs
    """

    error: float = 0.01
    miss: float = 0.05
    share_if_faster: float = 0.8
    most_pairs: int = 48
    least_gain: float = 0.005

    def __post_init__(self) -> None:
        for name, least, most in (("error", 0, 0.5), ("miss", 0, 0.5), ("share_if_faster", 0.5, 1)):
            if not least < getattr(self, name) < most:
                raise ValueError(f"`{name}` (={getattr(self, name)}) must be a probability between {least} and {most}.")
        if not 0 <= self.least_gain < 1:
            raise ValueError(f"`least_gain` (={self.least_gain}) must be a part of a step's time, from 0 to below 1.")
        if self.most_pairs < 1:
            raise ValueError(f"`most_pairs` (={self.most_pairs}) must be 1 or more: nothing follows from no pair.")

    def decide(self, num_faster: int, num_slower: int) -> bool | None:
        """Return whether a challenger with so many pairs has won (True) or lost (False); None: not decided yet."""
        p = self.share_if_faster
        evidence = num_faster * math.log(2 * p) + num_slower * math.log(2 * (1 - p))
        if evidence >= math.log((1 - self.miss) / self.error):
            return True
        if evidence <= math.log(self.miss / (1 - self.error)) or num_faster + num_slower >= self.most_pairs:
            return False
        return None

    def outcome(self, share_faster: float) -> tuple[float, float]:
        """Compute for a challenger of whose pairs this share is faster: probability that it wins, pairs on average."""
        wins = mean_pairs = 0.0
        chances = {0: 1.0}  # number of faster pairs so far -> probability of being there, undecided
        # Exact, by going through all numbers of faster pairs: Wald's limits are exact without overshoot only.
        for num_pairs in range(1, self.most_pairs + 1):
            following: dict[int, float] = {}  # chances after one pair more
            for num_faster, chance in chances.items():
                for is_faster, share in ((1, share_faster), (0, 1 - share_faster)):
                    now = num_faster + is_faster
                    has_won = self.decide(now, num_pairs - now)
                    if has_won is None:
                        following[now] = following.get(now, 0.0) + chance * share
                    else:
                        wins += chance * share * has_won
                        mean_pairs += chance * share * num_pairs  # decided after this pair
            chances = following
        return wins, mean_pairs


SIGN_TEST = SequentialSignTest()


@dataclass
class _Count:
    num_faster: int = 0
    num_slower: int = 0
    log_ratios: list[float] = field(default_factory=list)  # of its times to the incumbent's, pair by pair


class PairedComparison(Generic[Arm]):
    """A comparison of one incumbent with challengers.

    >>> comparison, takes_s = PairedComparison("a", ["b", "c"]), {"a": 1.0, "b": 0.5, "c": 2.0}
    >>> while order := comparison.order():
    ...     comparison.record([takes_s[arm] for arm in order])
    >>> comparison.winner, comparison.ratio("b"), comparison.num_steps
    ('b', 0.5, 24)
    """

    def __init__(self, incumbent: Arm, challengers: Sequence[Arm], test: SequentialSignTest = SIGN_TEST) -> None:
        self.incumbent = incumbent
        self.test = test
        self._counts = {challenger: _Count() for challenger in challengers}
        self.num_steps = self._num_rounds = 0

    def order(self) -> tuple[Arm, ...]:
        """Return the arms of the next round, one step each; empty where all is decided."""
        if not self._open:
            return ()
        arms = (self.incumbent, *self._open)
        return arms[::-1] if self._num_rounds % 2 else arms

    @property
    def _open(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in self._counts if self._has_won(arm) is None)

    def _has_won(self, arm: Arm) -> bool | None:
        return self.test.decide(self._counts[arm].num_faster, self._counts[arm].num_slower)

    def record(self, times_s: Sequence[float]) -> None:
        """Record the times of a round, in its order. A time that is not above zero and finite counts as slower.

        Raises:
            ValueError: for another number of times.
        """
        arms = self.order()
        if len(times_s) != len(arms):
            raise ValueError(f"`times_s` (={list(times_s)}) must hold a time for each of {arms}")
        self._num_rounds += 1
        self.num_steps += len(arms)
        taken_s = dict(zip(arms, times_s, strict=True))
        of_incumbent_s = taken_s.pop(self.incumbent)  # of the same round: one pair for each challenger
        for arm, time_s in taken_s.items():
            count = self._counts[arm]
            is_time = 0 < time_s < math.inf and 0 < of_incumbent_s < math.inf
            if is_time and time_s < (1 - self.test.least_gain) * of_incumbent_s:
                count.num_faster += 1
            else:
                count.num_slower += 1  # ties too: a change must pay
            if is_time:
                count.log_ratios.append(math.log(time_s / of_incumbent_s))

    @property
    def winner(self) -> Arm:
        """The arm that saves most by the median of its pairs, of those that have won; else the incumbent."""
        won = [arm for arm in self._counts if self._has_won(arm)]
        return min(won, key=self.ratio, default=self.incumbent)

    def ratio(self, arm: Arm) -> float:
        """Return the time of a challenger over the incumbent's: the median of their pairs; 1 where there are none."""
        log_ratios = self._counts[arm].log_ratios if arm in self._counts else []
        return math.exp(statistics.median(log_ratios)) if log_ratios else 1.0
