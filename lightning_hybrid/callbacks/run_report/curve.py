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
    values = [value for _, value in curve]
    # The selection depends only on the points, so that a resumed run has the same curve as an
    # uninterrupted run.
    extremes = {0}
    finite = finite_values(curve)
    if finite:
        extremes |= {values.index(min(finite)), values.index(max(finite))}
    first = curve[0][0]
    last = curve[-1][0]
    num_intervals = num_points - len(extremes)
    # This keeps the last point of each interval, because later points overwrite earlier ones.
    interval_ends = {}
    for index, (step, _) in enumerate(curve):
        interval = (step - first) * num_intervals // (last - first + 1)
        interval_ends[interval] = index
    return [curve[index] for index in sorted({*extremes, *interval_ends.values()})]
