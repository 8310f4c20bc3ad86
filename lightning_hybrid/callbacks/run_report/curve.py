"""Metric curves with a limited number of points, even for long runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_POINTS = 2000
"""Maximum number of points of a curve.

A plot in the run's picture has one pixel for every four points.
"""

Point = tuple[int, float]
"""Step and value."""


def append_(curve: list[Point], step: int, value: float) -> None:
    """Append a point to a curve, and drop some earlier points if there are too many.

    Steps must increase.

    >>> curve = list[Point]()
    >>> for step in range(5000):
    ...     append_(curve, step, float(step == 17))
    >>> len(curve) <= MAX_POINTS, curve[0], curve[-1], (17, 1.0) in curve
    (True, (0, 0.0), (4999, 0.0), True)
    """
    if len(curve) >= MAX_POINTS:
        curve[:] = thinned(curve, num_points=MAX_POINTS // 2)
    curve.append((step, value))


def finite_values(curve: Sequence[Point]) -> list[float]:
    """Return the values of a curve that are neither inf nor nan.

    >>> finite_values([(1, 0.5), (2, float("nan")), (3, float("inf"))])
    [0.5]
    """
    return [value for _, value in curve if math.isfinite(value)]


def thinned(curve: Sequence[Point], *, num_points: int) -> list[Point]:
    """Return at most `num_points` points of a curve, spread evenly over the steps.

    The first and the last point, and the points with the smallest and the largest value, are kept.

    >>> thinned([(step, -1.0 if step == 5 else float(step)) for step in range(100)], num_points=6)
    [(0, 0.0), (5, -1.0), (33, 33.0), (66, 66.0), (99, 99.0)]
    """
    # The selection depends only on the points, so that a resumed run has the same curve as an
    # uninterrupted run.
    kept = _extremes(curve)
    num_intervals = num_points - len(kept)
    kept |= _last_of_intervals(curve, num_intervals)
    return [curve[index] for index in sorted(kept)]


def _extremes(curve: Sequence[Point]) -> set[int]:
    """Return the indices of the first point, and of the points with the smallest and the largest value."""
    indices = {0}
    finite = finite_values(curve)
    if finite:
        values = [value for _, value in curve]
        indices.add(values.index(min(finite)))
        indices.add(values.index(max(finite)))
    return indices


def _last_of_intervals(curve: Sequence[Point], num_intervals: int) -> set[int]:
    """Divide the steps into intervals of equal length, and return the index of each interval's last point."""
    first_step, _ = curve[0]
    last_step, _ = curve[-1]
    num_steps = last_step - first_step + 1
    last_of_interval = {}
    for index, (step, _) in enumerate(curve):
        interval = (step - first_step) * num_intervals // num_steps
        last_of_interval[interval] = index  # later points overwrite earlier ones
    return set(last_of_interval.values())
