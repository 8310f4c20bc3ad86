"""Curves with as many points as a picture can show, however long the run."""

from __future__ import annotations

from collections.abc import Sequence

# Points of a curve: four to a pixel of a panel of the picture of a run.
MAX_POINTS = 2000

Point = tuple[int, float]


def append_(curve: list[Point], step: int, value: float) -> None:
    """Add a point, which is later than all others; a curve that has become too long is thinned.

    >>> curve = list[Point]()
    >>> for step in range(5000):
    ...     append_(curve, step, float(step == 17))
    >>> len(curve) <= MAX_POINTS, curve[0], curve[-1], (17, 1.0) in curve
    (True, (0, 0.0), (4999, 0.0), True)
    """
    if len(curve) >= MAX_POINTS:
        curve[:] = thinned(curve, num_points=MAX_POINTS // 2)
    curve.append((step, value))


def thinned(curve: Sequence[Point], *, num_points: int) -> list[Point]:
    """Pick at most so many points, spread evenly over the steps, with the least and the largest value.

    >>> thinned([(step, -1.0 if step == 5 else float(step)) for step in range(100)], num_points=6)
    [(0, 0.0), (5, -1.0), (33, 33.0), (66, 66.0), (99, 99.0)]
    """
    values = [value for _, value in curve]
    # By the points alone: a resumed run has the curve of one that went through.
    extremes = {0, values.index(min(values)), values.index(max(values))}
    first = curve[0][0]
    last = curve[-1][0]
    num_intervals = num_points - len(extremes)
    # One point of each interval, its last: later ones overwrite earlier ones of the same key.
    ends = {
        (step - first) * num_intervals // (last - first + 1): index
        for index, (step, _) in enumerate(curve)
    }
    return [curve[index] for index in sorted({*extremes, *ends.values()})]
