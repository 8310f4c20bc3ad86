"""Optuna sampler that searches from coarse to fine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from recipes.hyperparams.axes import Axis, Point
from recipes.hyperparams.outcome import best_of, has_ended, was_interrupted


class CoarseToFine(BaseSampler):
    """Wide grid over all axes, then ever finer ones around the best (Jia et al. 2018, arXiv:1807.11205).

    The authors say that they first took large steps to find a good region and refined there, not how many or how
    large. Grid, zoom and rounds are therefore the user's, and the defaults our choice.

    The rounds follow from the trials in the study alone, so that a resumed search continues where it was. A round
    begins when all trials of the round before have ended.

    Args:
        axes: What to search.
        num_rounds: Number of rounds, the first grid included.
        zoom: How many times finer each round is than the one before. A whole number, at least 2.

    Raises:
        ValueError: There is no round, or no zoom.
    """

    def __init__(self, axes: Sequence[Axis], *, num_rounds: int = 3, zoom: int = 2) -> None:
        for name, value, least in (("num_rounds", num_rounds, 1), ("zoom", zoom, 2)):
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"`sampler.{name}` (={value}) must be a whole number, at least {least}."
                )
        self.axes = axes
        self.num_rounds = num_rounds
        self.zoom = zoom
        num_neighbours = 3 ** len(axes) - 1
        num_in_grid = math.prod(axis.num for axis in axes)
        self.num_trials = num_in_grid + (num_rounds - 1) * num_neighbours

    def rounds(self, study: Study) -> list[list[FrozenTrial]]:
        """Return the trials of this search that have ended, by round."""
        trials = study.get_trials(deepcopy=False)
        return [_ended_at(points, trials) for points in self._rounds_of_points(study)]

    def has_next(self, study: Study) -> bool:
        """Return whether a point of the last round has no trial yet."""
        return bool(self._free_points(study))

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all keys: a point is chosen as a whole."""
        return {axis.key: axis.distribution() for axis in self.axes}

    def sample_relative(
        self,
        study: Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return the first point that has no trial yet."""
        return self._free_points(study)[0]

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse a key that is no axis."""
        raise ValueError(
            f"`{param_name}` must be one of the axes {[axis.key for axis in self.axes]}."
        )

    def _free_points(self, study: Study) -> list[Point]:
        points = self._rounds_of_points(study)[-1]
        taken = set()
        for trial in study.get_trials(deepcopy=False):
            if not was_interrupted(trial):
                taken.add(_key(trial.params))
        return [point for point in points if _key(point) not in taken]

    def _rounds_of_points(self, study: Study) -> list[list[Point]]:
        """Return the points of the first round, and of all rounds that follow from the trials so far."""
        trials = study.get_trials(deepcopy=False)
        rounds = [_product(self.axes, [axis.values() for axis in self.axes])]
        ended = _ended_at(rounds[0], trials)
        for level in range(1, self.num_rounds):
            best = best_of(ended, study.direction)
            if best is None or len(ended) < sum(len(points) for points in rounds):
                break
            points = self._neighbours(best.params, level)
            ended = ended + _ended_at(points, trials)
            rounds.append(points)
        return rounds

    def _neighbours(self, centre: Point, level: int) -> list[Point]:
        """Return the points around `centre`, `zoom ** level` times closer to it than points of the first grid."""
        step = 1 / self.zoom**level
        values = []
        for axis in self.axes:
            value = centre[axis.key]
            values.append([axis.shifted(value, -step), value, axis.shifted(value, step)])
        points = _product(self.axes, values)
        return [point for point in points if point != centre]


def _product(axes: Sequence[Axis], values: Iterable[Iterable[float]]) -> list[Point]:
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, combination, strict=True)) for combination in itertools.product(*values)]


def _ended_at(points: Sequence[Point], trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trial of each point that has one that ended, in the order of the points."""
    trial_at: dict[frozenset[tuple[str, float]], FrozenTrial] = {}
    for trial in trials:
        if has_ended(trial):
            trial_at.setdefault(_key(trial.params), trial)
    return [trial_at[_key(point)] for point in points if _key(point) in trial_at]


def _key(point: Point) -> frozenset[tuple[str, float]]:
    return frozenset(point.items())
