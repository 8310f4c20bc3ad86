"""Optuna sampler that starts with a coarse grid and refines it around the best trial."""

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
    """Optuna sampler that starts with a coarse grid, then searches finer grids around the best trial (Jia et al. 2018).

    The authors (arXiv:1807.11205) report that they first used large steps to find a good region and refined the search
    there, but give no number or size of steps. Grid, zoom and rounds are therefore options, and the defaults are our
    choice.

    The rounds depend only on the trials in the study, so a resumed search continues at the same point. A round begins
    when all trials of the previous round have ended.

    Args:
        axes: Axes to search.
        num_rounds: Number of rounds, including the first grid.
        zoom: Factor by which each round is finer than the previous one. An integer of at least 2.

    Raises:
        ValueError: `num_rounds` is below 1, or `zoom` is below 2.
    """

    def __init__(self, axes: Sequence[Axis], *, num_rounds: int = 3, zoom: int = 2) -> None:
        _require_at_least("num_rounds", num_rounds, 1)
        _require_at_least("zoom", zoom, 2)
        self.axes = axes
        self.num_rounds = num_rounds
        self.zoom = zoom
        num_neighbors = 3 ** len(axes) - 1
        num_in_grid = math.prod(axis.num for axis in axes)
        self.num_trials = num_in_grid + (num_rounds - 1) * num_neighbors

    def rounds(self, study: Study) -> list[list[FrozenTrial]]:
        """Return the finished trials of this search, grouped by round."""
        trials = study.get_trials(deepcopy=False)
        rounds_of_points = self._rounds_of_points(study)
        return [_ended_at(points, trials) for points in rounds_of_points]

    def has_next(self, study: Study) -> bool:
        """Return whether the current round has a grid point for which no trial has been started."""
        return bool(self._free_points(study))

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the distributions of all keys, because the sampler chooses their values together."""
        return {axis.key: axis.distribution() for axis in self.axes}

    def sample_relative(
        self,
        study: Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return the first grid point of the current round for which no trial has been started."""
        return self._free_points(study)[0]

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Raise an error, because Optuna calls this method only for keys that are not search axes.

        Raises:
            ValueError: Always.
        """
        keys = [axis.key for axis in self.axes]
        raise ValueError(
            f"`{param_name}` must be one of the axes {keys} of this search. Add it to `axes`."
        )

    def _free_points(self, study: Study) -> list[Point]:
        """Return the grid points of the current round for which no trial has been started."""
        rounds_of_points = self._rounds_of_points(study)
        current_points = rounds_of_points[-1]
        started = set()
        for trial in study.get_trials(deepcopy=False):
            if not was_interrupted(trial):
                started.add(_key(trial.params))
        return [point for point in current_points if _key(point) not in started]

    def _rounds_of_points(self, study: Study) -> list[list[Point]]:
        """Return the grid points of each round that has begun, where a round begins when the previous one ends."""
        trials = study.get_trials(deepcopy=False)
        values = [axis.values() for axis in self.axes]
        grid = _product(self.axes, values)
        rounds = [grid]
        ended = _ended_at(grid, trials)
        for level in range(1, self.num_rounds):
            num_points = sum(len(points) for points in rounds)
            best = best_of(ended, study.direction)
            if best is None or len(ended) < num_points:
                break
            neighbors = self._neighbors(best.params, level)
            rounds.append(neighbors)
            ended.extend(_ended_at(neighbors, trials))
        return rounds

    def _neighbors(self, center: Point, level: int) -> list[Point]:
        """Return the neighbors of a grid point at a distance of `1 / zoom**level` steps of the first grid."""
        step = 1 / self.zoom**level
        values = []
        for axis in self.axes:
            value = center[axis.key]
            below = axis.shifted(value, -step)
            above = axis.shifted(value, step)
            values.append([below, value, above])
        points = _product(self.axes, values)
        return [point for point in points if point != center]


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or value < minimum:
        raise ValueError(
            f"`sampler.{name}` (={value}) must be an integer of at least {minimum}. Set "
            f"sampler.{name}={minimum}, for example."
        )


def _product(axes: Sequence[Axis], values: Iterable[Iterable[float]]) -> list[Point]:
    """Return all grid points, given the values of each axis."""
    keys = [axis.key for axis in axes]
    points = []
    for combination in itertools.product(*values):
        point = dict(zip(keys, combination, strict=True))
        points.append(point)
    return points


def _ended_at(points: Sequence[Point], trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Return the finished trials at the given grid points, in the order of the points."""
    trial_at: dict[frozenset[tuple[str, float]], FrozenTrial] = {}
    for trial in trials:
        if has_ended(trial):
            trial_at.setdefault(_key(trial.params), trial)

    ended = []
    for point in points:
        key = _key(point)
        if key in trial_at:
            ended.append(trial_at[key])
    return ended


def _key(point: Point) -> frozenset[tuple[str, float]]:
    return frozenset(point.items())
