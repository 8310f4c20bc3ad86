"""Coarse-to-fine search: a wide grid, then ever finer ones around the best (Jia et al. 2018, arXiv:1807.11205).

The authors say that they first took large steps to find a good region and refined there, not how many or how large;
grid, zoom and rounds are therefore the user's, and the defaults our choice.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from recipes.hyperparams.trial_log import Mode, TrialLog, TrialOutcome, best_of
from recipes.hyperparams.trial_pool import Limits, TrialPool

MAX_VALUES = 1000
"""Most values of an axis (our choice): no search trains as often."""

Point = Mapping[str, float]
"""A value for each key that is searched."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Evenly spaced values of one configuration key, on a logarithmic or a linear scale.

    Raises:
        ValueError: An empty range, a single value, or a logarithm of what is not above zero.

    >>> Axis(key="optim.lr", low=0.01, high=100.0, num=5).values()
    (0.01, 0.1, 1.0, 10.0, 100.0)
    """

    key: str
    low: float
    high: float
    num: int
    scale: Literal["log", "linear"] = "log"

    def __post_init__(self) -> None:
        if self.scale not in ("log", "linear"):
            raise ValueError(f"`axes.{self.key}.scale` (={self.scale!r}) must be log or linear.")
        if not self.low < self.high:
            raise ValueError(
                f"`axes.{self.key}.low` (={self.low}) must be below `high` (={self.high}): there is nothing to search. "
                f"To fix the key, give it to the trials: trial=[...,{self.key}={self.low}]."
            )
        if not isinstance(self.num, int) or not 2 <= self.num <= MAX_VALUES:
            raise ValueError(
                f"`axes.{self.key}.num` (={self.num}) must be a whole number of values from 2 to {MAX_VALUES}: each is "
                f"a training run. Set axes.{self.key}.num=4."
            )
        if self.scale == "log" and self.low <= 0:
            raise ValueError(
                f"`axes.{self.key}.low` (={self.low}) must be above zero on a logarithmic scale. Raise it, or set "
                f"axes.{self.key}.scale=linear."
            )

    @property
    def spacing(self) -> float:
        """Step from one value to the next: a factor on the logarithmic scale, else a difference."""
        if self.scale == "log":
            return float((self.high / self.low) ** (1 / (self.num - 1)))
        return (self.high - self.low) / (self.num - 1)

    def values(self) -> tuple[float, ...]:
        """Return the values from `low` to `high`, to six digits."""
        return tuple(self._at(self.low, index, self.spacing) for index in range(self.num))

    def _at(self, start: float, index: int, spacing: float) -> float:
        value = start * spacing**index if self.scale == "log" else start + spacing * index
        return float(f"{value:.6g}")

    def around(self, centre: float, *, level: int, zoom: int) -> tuple[float, float, float]:
        """Return `centre` and one finer value on each side: the grid's spacing, divided `zoom ** level` times.

        >>> Axis(key="lr", low=0.01, high=100.0, num=3).around(1.0, level=1, zoom=2)
        (0.1, 1.0, 10.0)
        """
        parts = zoom**level
        spacing = self.spacing ** (1 / parts) if self.scale == "log" else self.spacing / parts
        return self._at(centre, -1, spacing), centre, self._at(centre, 1, spacing)

    def is_edge(self, value: float) -> bool:
        """Return whether the best of the first grid may lie outside of it."""
        return value <= self.low or value >= self.high


def axes_from(config: Mapping[str, Any], *, above: str = "") -> list[Axis]:
    """Make axes from nested keys, as in a configuration: what has `low` and `high` is one.

    Raises:
        ValueError: There is none, or a value where an axis should be.

    >>> axes_from({"optim": {"lr": {"low": 0.1, "high": 10.0, "num": 3}}})
    [Axis(key='optim.lr', low=0.1, high=10.0, num=3, scale='log')]
    """
    axes: list[Axis] = []
    for name, value in config.items():
        key = f"{above}{name}"
        if not isinstance(value, Mapping):
            raise ValueError(f"`axes.{key}` (={value}) must be an axis, such as {{low: 0.1, high: 10.0, num: 3}}.")
        if not {"low", "high"} & set(value):
            axes += axes_from(value, above=f"{key}.")
            continue
        wrong = sorted({"low", "high", "num"} - set(value)) + sorted(set(value) - {"low", "high", "num", "scale"})
        if wrong:
            raise ValueError(f"`axes.{key}` (={value}) must have low, high and num, may have scale; see {wrong[0]}.")
        axes.append(Axis(key=key, **value))
    if not above and not axes:
        raise ValueError("`axes` (={}) must name what to search, such as +axes.optim.lr={low:0.1,high:10.0,num:3}.")
    return axes


def overrides_of(point: Point) -> tuple[str, ...]:
    """Format a point as overrides of the command line.

    >>> overrides_of({"optim.lr": 0.5, "optim.weight_decay": 1e-4})
    ('optim.lr=0.5', 'optim.weight_decay=0.0001')
    """
    return tuple(f"{key}={value:.6g}" for key, value in point.items())


def axis_values_of(overrides: Iterable[str], keys: Iterable[str]) -> dict[str, float]:
    """Parse overrides into values of the searched keys, as `overrides_of` made them; the last of several wins.

    >>> axis_values_of(["seed=3", "optim.lr=0.5"], ["optim.lr"])
    {'optim.lr': 0.5}
    """
    given = dict(override.split("=", 1) for override in overrides)
    return {key: float(given[key]) for key in keys}


def grid(axes: Sequence[Axis]) -> list[Point]:
    """Return every combination of the axes' values."""
    return _product(axes, [axis.values() for axis in axes])


def finer_grid(axes: Sequence[Axis], best: Point, *, level: int, zoom: int) -> list[Point]:
    """Return the neighbours of `best` on a grid `zoom ** level` times finer than the first, and `best` itself.

    It goes past the ends of the first grid if the best was there.
    """
    return _product(axes, [axis.around(best[axis.key], level=level, zoom=zoom) for axis in axes])


def _product(axes: Sequence[Axis], values: Iterable[Iterable[float]]) -> list[Point]:
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, point, strict=True)) for point in itertools.product(*values)]


def median_limits(
    outcomes: Iterable[TrialOutcome], *, fractions: Sequence[float], mode: Mode, min_trials: int
) -> Limits:
    """Return the median rule: the objective below which a trial is stopped, after each fraction of its run.

    The limit is the median of the objectives, at their first validation at or after the fraction, of all trials that
    ended before, the stopped ones included (Golovin et al. 2017, "Google Vizier"). Where fewer than `min_trials` of
    them got that far there is no limit. The rule compares runs in the middle of their schedules, where a high learning
    rate may look worse than it ends: late fractions are safe ones.

    >>> runs = [TrialOutcome(overrides=(), status="done", curve=((0.5, loss), (1.0, 0.1))) for loss in (1.0, 2.0, 9.0)]
    >>> median_limits(runs, fractions=[0.5], mode="min", min_trials=3)
    ((0.5, 2.0),)
    >>> median_limits(runs, fractions=[0.5], mode="min", min_trials=4)
    ()
    """
    outcomes = list(outcomes)
    limits = []
    for fraction in sorted(fractions):
        there = [next((value for at, value in o.curve if at >= fraction), math.nan) for o in outcomes]
        # A trial that diverged before has no value there: nan and inf would move the median.
        there = [value for value in there if math.isfinite(value)]
        if len(there) >= max(1, min_trials):
            limits.append((fraction, statistics.median(there)))
    return tuple(limits)


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """Options of early stopping; see `median_limits`.

    Raises:
        ValueError: A fraction that is not between 0 and 1.
    """

    fractions: tuple[float, ...] = ()
    min_trials: int = 3

    def __post_init__(self) -> None:
        for fraction in self.fractions:
            if not 0 < fraction < 1:
                raise ValueError(
                    f"`stopping.fractions` (={fraction}) must lie between 0 and 1, both excluded: they are parts of a "
                    "trial's run. stopping.fractions=[] lets every trial run to its end."
                )


@dataclass(frozen=True, kw_only=True)
class CoarseToFine:
    """Grid over all axes; then rounds on the neighbours of the best so far, `zoom` times finer each.

    Attributes:
        num_rounds: The first included.
        zoom: Whole number, at least 2.

    Raises:
        ValueError: No round, or no zoom.
    """

    num_rounds: int = 3
    zoom: int = 2

    def __post_init__(self) -> None:
        for name, least in (("num_rounds", 1), ("zoom", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"`backend.{name}` (={value}) must be a whole number, at least {least}.")

    def search(self, axes: Sequence[Axis], run: Callable[[list[Point]], list[TrialOutcome] | None], mode: Mode) -> bool:
        """Run the search; return false if the time ended before.

        Args:
            axes: What to search.
            run: Outcomes of these points, from memory where they were run before; None = there is no time for more.
            mode: Which way is better.
        """
        seen: list[TrialOutcome] = []
        for level in range(self.num_rounds):
            best = best_of(seen, mode=mode)
            if level and best is None:
                return True  # nothing to zoom in on: all of the grid failed
            keys = [axis.key for axis in axes]
            points = (
                finer_grid(axes, axis_values_of(best.overrides, keys), level=level, zoom=self.zoom)
                if best
                else grid(axes)
            )
            found = run(points)
            if found is None:
                return False
            seen += found
        return True


class TrialRunner:
    """Callable that runs points through a pool, except those in the log, and stops losers by the median rule.

    Args:
        pool: Runs trials.
        log: Log of this search, and of others with the same settings.
        fixed: Overrides of all points.
        mode: Which way is better.
        stopping: When losers are stopped.
        tell: Called with each outcome that is new.
    """

    def __init__(
        self,
        pool: TrialPool,
        log: TrialLog,
        *,
        fixed: Sequence[str] = (),
        mode: Mode = "min",
        stopping: Stopping | None = None,
        tell: Callable[[TrialOutcome], None] = lambda outcome: None,
    ) -> None:
        self.pool, self.log, self.fixed, self.mode = pool, log, tuple(fixed), mode
        self.stopping = stopping or Stopping()
        self.tell = tell
        self.rounds: list[list[TrialOutcome]] = []

    def seen(self) -> list[TrialOutcome]:
        """Return every outcome of this search so far, once each."""
        return list({outcome.key: outcome for outcomes in self.rounds for outcome in outcomes}.values())

    def _limits(self) -> Limits:
        stop = self.stopping
        if not stop.fractions:
            return ()
        return median_limits(self.seen(), fractions=stop.fractions, mode=self.mode, min_trials=stop.min_trials)

    def __call__(self, points: Sequence[Point]) -> list[TrialOutcome] | None:
        """Run a round; return the outcomes of all points in their order, or None if the time ended before."""
        trials = [(*self.fixed, *overrides_of(point)) for point in points]
        known = [outcome for trial in trials if (outcome := self.log.of(trial)) is not None]
        self.rounds.append(known)
        for outcome in self.pool.run([trial for trial in trials if self.log.of(trial) is None], self._limits):
            self.log.append(outcome)
            known.append(outcome)
            self.tell(outcome)
        self.rounds[-1] = found = [outcome for trial in trials if (outcome := self.log.of(trial)) is not None]
        return found if len(found) == len(trials) else None
