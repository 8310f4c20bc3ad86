"""Paired differences of accuracies with confidence intervals, and a test of equivalence."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import t as student_t

Verdict = Literal["equal", "better", "worse", "open"]


@dataclass(frozen=True)
class Interval:
    """90 % confidence interval of a mean, from Student's t distribution.

    The interval is mean ± t(0.95, n - 1) * s / sqrt(n).

    Attributes:
        mean: Mean.
        half: Half the width. Infinite for a single value, which has no spread.
    """

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half


def interval_of(values: Sequence[float]) -> Interval:
    """Return the 90 % confidence interval of the mean of a sample.

    >>> interval = interval_of([0.1, 0.2, 0.3])
    >>> round(interval.mean, 6), round(interval.half, 6)
    (0.2, 0.168585)
    """
    half = float("inf")
    if len(values) > 1:
        half = (
            float(student_t.ppf(0.95, len(values) - 1))
            * statistics.stdev(values)
            / len(values) ** 0.5
        )
    return Interval(mean=statistics.mean(values), half=half)


def paired_difference(
    values: Mapping[int, float], reference: Mapping[int, float]
) -> Interval | None:
    """Return the confidence interval of the mean difference from a reference, with values paired by seed.

    Seeds without a reference value are left out. None if there are no common seeds.
    """
    differences = [values[seed] - reference[seed] for seed in sorted(values) if seed in reference]
    if differences:
        return interval_of(differences)
    return None


def verdict(difference: Interval, margin: float) -> Verdict:
    """Classify a paired difference as equal, better, worse or open (inconclusive), at the 5 % level.

    `equal`: the interval is within ± `margin`, which is TOST, two one-sided tests (Schuirmann 1987). `better` or
    `worse`: the interval does not contain zero. `open`: there are too few runs for a conclusion. A small difference
    may be `equal` and yet not zero.

    >>> [verdict(Interval(mean, 0.2), margin=0.3) for mean in (0.05, 1.0, -1.0, 0.15)]
    ['equal', 'better', 'worse', 'open']
    """
    if -margin < difference.low and difference.high < margin:
        return "equal"
    if difference.low > 0:
        return "better"
    if difference.high < 0:
        return "worse"
    return "open"
