"""Curves with as many points as a picture can show, however long the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Points of a curve: four to a pixel of a panel of the picture of a run.
MAX_POINTS = 2000

Point = tuple[int, float]


class Curve(Sequence[Point]):
    """Values of a metric by steps, at most `MAX_POINTS`: a curve that has become too long is thinned.

    Args:
        points: first points: pairs, or the tensor of another curve.

    >>> curve = Curve()
    >>> for step in range(5000):
    ...     curve.append(step, float(step == 17))
    >>> len(curve) <= MAX_POINTS, curve[0], curve[-1], (17, 1.0) in curve
    (True, (0, 0.0), (4999, 0.0), True)
    >>> Curve(curve.tensor()) == curve
    True
    """

    def __init__(self, points: Tensor | Iterable[Point] = ()) -> None:
        # One array, 16 bytes a point: as tuples, 40,000 of them (20 metrics) would be copied and pickled at every
        # checkpoint, while training waits.
        self._points = np.empty((MAX_POINTS, 2))  # steps, exact up to 2^53, and values
        self._num_points = 0
        for step, value in points.tolist() if isinstance(points, Tensor) else points:
            self.append(step, value)

    def append(self, step: int, value: float) -> None:
        """Add a point, which is later than all others."""
        if self._num_points == MAX_POINTS:
            fewer = thinned(list(self), num_points=MAX_POINTS // 2)
            self._points[: len(fewer)] = fewer
            self._num_points = len(fewer)
        self._points[self._num_points] = step, value
        self._num_points += 1

    def tensor(self) -> Tensor:
        """Return a copy for a checkpoint, float64, `"points 2"`: steps and values.

        >>> Curve([(0, 0.5), (7, -1.0)]).tensor().tolist()
        [[0.0, 0.5], [7.0, -1.0]]
        """
        return torch.tensor(self._points[: self._num_points])

    def __len__(self) -> int:
        return self._num_points

    def __iter__(self) -> Iterator[Point]:
        return ((int(step), value) for step, value in self._points[: self._num_points].tolist())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        step, value = self._points[: self._num_points][index].tolist()
        return int(step), value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Curve) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def thinned(curve: Sequence[Point], *, num_points: int) -> list[Point]:
    """Pick at most so many points, spread evenly over the steps, with the least and the largest value.

    >>> thinned([(step, -1.0 if step == 5 else float(step)) for step in range(100)], num_points=6)
    [(0, 0.0), (5, -1.0), (33, 33.0), (66, 66.0), (99, 99.0)]
    """
    values = [value for _, value in curve]
    # By the points alone: a resumed run has the curve of one that went through.
    extremes = {0, values.index(min(values)), values.index(max(values))}
    first, last = curve[0][0], curve[-1][0]
    num_intervals = num_points - len(extremes)
    # One point of each interval, its last: later ones overwrite earlier ones of the same key.
    ends = {(step - first) * num_intervals // (last - first + 1): index for index, (step, _) in enumerate(curve)}
    return [curve[index] for index in sorted({*extremes, *ends.values()})]
