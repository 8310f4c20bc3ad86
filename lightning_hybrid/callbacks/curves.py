"""Curves that stay small: as many points as a picture can show, however long the run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor

MAX_POINTS = 2000
"""Of a curve: four to a pixel of a panel of the picture of a run."""

Curve = list[tuple[int, float]]


def append(curve: Curve, step: int, value: float) -> None:
    """Add a point; a curve that has become too long is thinned first.

    A run's points without a bound grow with its steps, in memory and in every checkpoint.

    >>> curve: Curve = []
    >>> for step in range(5000):
    ...     append(curve, step, value=float(step == 17))
    >>> len(curve) <= MAX_POINTS, curve[0], curve[-1], (17, 1.0) in curve
    (True, (0, 0.0), (4999, 0.0), True)
    """
    if len(curve) >= MAX_POINTS:
        curve[:] = thinned(curve, num_points=MAX_POINTS // 2)
    curve.append((step, value))


def thinned(curve: Curve, *, num_points: int) -> Curve:
    """At most so many points, spread evenly over the steps, and the least and the largest value.

    It depends on the points alone, so a resumed run has the curve of one that went through.

    >>> thinned([(step, -1.0 if step == 5 else float(step)) for step in range(100)], num_points=6)
    [(0, 0.0), (5, -1.0), (33, 33.0), (66, 66.0), (99, 99.0)]
    """
    values = [value for _, value in curve]
    kept = {0, values.index(min(values)), values.index(max(values))}
    first, last = curve[0][0], curve[-1][0]
    num_stretches = num_points - len(kept)
    ends = {(step - first) * num_stretches // (last - first + 1): index for index, (step, _) in enumerate(curve)}
    return [curve[index] for index in sorted({*kept, *ends.values()})]


def packed(curve: Curve) -> Tensor:
    """The points as one float64 tensor, `"points 2"`, for a checkpoint; steps are exact up to 2^53.

    Of twenty curves a checkpoint would hold 40,000 tuples: to copy them, to pickle them and to clear them away again
    stopped training for 0.2 s at each, on one core.

    >>> packed([(0, 0.5), (7, -1.0)])
    tensor([[ 0.0000,  0.5000],
            [ 7.0000, -1.0000]], dtype=torch.float64)
    """
    return torch.from_numpy(np.fromiter(chain.from_iterable(curve), np.float64, 2 * len(curve)).reshape(-1, 2))


def unpacked(points: Tensor | Iterable[tuple[int, float]]) -> Curve:
    """The curve of `packed(curve)`; also of pairs, as checkpoints held them before.

    >>> unpacked(packed([(0, 0.5), (7, -1.0)])) == unpacked([[0, 0.5], [7, -1.0]]) == [(0, 0.5), (7, -1.0)]
    True
    """
    pairs = points.tolist() if isinstance(points, Tensor) else points
    return [(int(step), float(value)) for step, value in pairs]
