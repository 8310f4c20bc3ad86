"""Trials of a study, in their order: tune each arm at the same points of its space, then test it over paired seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import ConfigDict
from torch.quasirandom import SobolEngine

from recipes.cli.config_check import made
from recipes.hyperparams.trial_log import Mode, TrialLog, TrialOutcome, rank_of
from recipes.hyperparams.trial_pool import TrialPool

STRICT = ConfigDict(extra="forbid")
UNTESTED = "trainer.limit_test_batches=0"  # of every tuning trial


@dataclass(frozen=True, kw_only=True)
class TunedAxis:
    """Hyper-parameter that tuning chooses.

    Attributes:
        override: Override of `recipes/train.py` that sets it, with `{}` for the value.
        low, high: Values at 0 and 1 of the unit interval.
        scale: How the interval is divided.
        is_one_minus: Whether the value is 1 less what is drawn, as a momentum is.
        grows_with_batch: Whether the linear rule multiplies it, like rate (Goyal et al. 2017, arXiv:1706.02677) and
            length of the warm-up (LEGW, You et al. 2019, arXiv:1901.08256).
        most: Limit of what the linear rule makes of it; None = none.
    """

    __pydantic_config__ = STRICT

    override: str
    low: float = 0.0
    high: float = 0.0
    scale: Literal["log", "linear"] = "log"
    is_one_minus: bool = False
    grows_with_batch: bool = False
    most: float | None = None

    def value(self, unit: float) -> float:
        """Return the value at a point of the unit interval, to six digits.

        >>> TunedAxis(override="optim.momentum={}", low=0.01, high=0.1, is_one_minus=True).value(0.5)
        0.968377
        """
        if self.scale == "log":
            found = self.low * (self.high / self.low) ** unit
        else:
            found = self.low + (self.high - self.low) * unit
        return float(f"{1 - found if self.is_one_minus else found:.6g}")


@dataclass(frozen=True, kw_only=True)
class StudyArm:
    """Way to train.

    Attributes:
        overrides: Overrides that make it.
        lr: Least and largest learning rate of the tuning.
        axes: For some axes of the study, another in its place; None = this arm leaves the axis out.
        point: Instead of tuning, values of the axes that were chosen before.
        point_of: Instead of tuning, the arm whose point it takes.
        rule: With `point_of`: `same`, at the same batch, or `linear`, scaled from the smallest batch.
        like: The arm from which this one differs in one part, with which the tables compare it.
        precisions, batch_sizes: Precisions and sizes to run; None = all of the study.
    """

    __pydantic_config__ = STRICT

    overrides: tuple[str, ...] = ()
    lr: tuple[float, float] | None = None
    axes: Mapping[str, TunedAxis | None] = field(default_factory=dict)
    point: Mapping[str, float] | None = None
    point_of: str | None = None
    rule: Literal["same", "linear"] = "same"
    like: str | None = None
    precisions: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Arm at one precision and batch: a mean of the table."""

    arm: str
    precision: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.arm}, {self.precision}, batch {self.batch_size}"


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Options of the tuning, equal for every arm.

    Attributes:
        objective: Name of a metric that validation logs.
        mode: Which way is better.
        num_points: Points of a scrambled Sobol sequence in the unit cube of all axes: the same ones for every arm.
        seeds: All points run with the first seed, and the `num_finalists` best with the others; their mean decides.
        num_finalists: See `seeds`.
    """

    __pydantic_config__ = STRICT

    objective: str
    mode: Mode
    num_points: int
    seeds: tuple[int, ...]
    num_finalists: int


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms by precisions by batches, each cell tuned at the same points and tested with the same seeds.

    Attributes:
        recipe: Recipe of a trial.
        title: Title of its picture.
        chance: Accuracy of a run that diverged.
        num_train: Training images.
        batch_sizes: Images per step, and for each the images of one micro-batch (ghost batch).
        precisions: Overrides of each.
        arms: See `StudyArm`.
        axes: What tuning chooses, in the order of the Sobol sequence; `lr` takes its ends from the arm.
        tuning: See `Tuning`.
        seeds: Of the tests, the same for every cell, so that differences are paired.
        num_folds: Parts of the data set that are test images in turn, by `seed % num_folds`; None = one split.
        margin: Loss of accuracy that counts as none.
        reference: Arm and precision whose smallest batch others are compared with.
        first: Cells that run first, as `[arm, precision, batch]`: those that decide.

    Raises:
        ValueError: A seed of tuning is among those of the tests, or an arm, a precision, a batch or an axis is unknown.
    """

    __pydantic_config__ = STRICT

    recipe: str
    title: str
    chance: float
    num_train: int
    batch_sizes: Mapping[int, int]
    precisions: Mapping[str, tuple[str, ...]]
    arms: Mapping[str, StudyArm]
    axes: Mapping[str, TunedAxis]
    tuning: Tuning
    seeds: tuple[int, ...]
    num_folds: int | None = None
    margin: float
    reference: tuple[str, str]
    first: tuple[tuple[str, str, int], ...] = ()

    def __post_init__(self) -> None:
        if both := set(self.tuning.seeds) & set(self.seeds):
            raise ValueError(
                f"`tuning.seeds` (={list(self.tuning.seeds)}) must not have {sorted(both)} of `seeds`: a point was "
                "chosen for that run. Set other tuning.seeds."
            )
        known: list[tuple[str, Any, Any]] = [
            ("study.reference", [self.reference[0]], self.arms),
            ("study.reference", [self.reference[1]], self.precisions),
        ]
        with_point = [name for name, arm in self.arms.items() if arm.point_of is None]
        for name, arm in self.arms.items():
            key = f"study.arms.{name}"
            if sum(one is not None for one in (arm.lr, arm.point, arm.point_of)) != 1:
                raise ValueError(
                    f"`{key}` must have either `lr`, to be tuned, `point` or `point_of`. Set one of the three."
                )
            known += [
                (f"{key}.point_of", [arm.point_of] if arm.point_of else [], with_point),
                (f"{key}.like", [arm.like] if arm.like else [], self.arms),
                (f"{key}.precisions", arm.precisions or (), self.precisions),
                (f"{key}.batch_sizes", arm.batch_sizes or (), self.batch_sizes),
                (f"{key}.axes", arm.axes, self.axes),
                (f"{key}.point", arm.point or (), self.axes),
            ]
        for key, given, there in known:
            for value in given:
                if value not in there:
                    raise ValueError(f"`{key}` (={value}) must be one of the study's: {', '.join(map(str, there))}.")
        cells = list(self._all_cells())
        for one, precision, size in self.first:
            if Cell(arm=one, precision=precision, batch_size=size) not in cells:
                raise ValueError(f"`study.first` (={[one, precision, size]}) must be a cell of the study.")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Study:
        """Make a study from the keys `study`, `tuning` and `seeds` of a configuration as plain data.

        Raises:
            ValueError: As the class, or a key is missing, unknown or of the wrong type.
        """
        made(Tuning, config["tuning"], "tuning")
        study = made(cls, config["study"] | {"tuning": config["tuning"], "seeds": config["seeds"]}, "study")
        return replace(study, batch_sizes=dict(sorted(study.batch_sizes.items())))

    @property
    def smallest(self) -> int:
        """The smallest batch."""
        return min(self.batch_sizes)

    def _all_cells(self) -> Iterator[Cell]:
        for batch_size in self.batch_sizes:
            for precision in self.precisions:
                for name, arm in self.arms.items():
                    if precision in (arm.precisions or self.precisions) and batch_size in (
                        arm.batch_sizes or self.batch_sizes
                    ):
                        yield Cell(arm=name, precision=precision, batch_size=batch_size)

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells in the order of running: `first`, then by batch; each after the one it takes a point of."""
        wanted = [Cell(arm=arm, precision=precision, batch_size=size) for arm, precision, size in self.first]
        wanted += [cell for cell in self._all_cells() if cell not in wanted]
        cells: list[Cell] = []
        for cell in wanted:
            source = self.source_of(cell)
            cells += [one for one in (source, cell) if one is not None and one not in cells]
        return cells

    def source_of(self, cell: Cell) -> Cell | None:
        """Return the cell whose point a cell takes, or None if it has one of its own."""
        arm = self.arms[cell.arm]
        if arm.point_of is None:
            return None
        batch_size = self.smallest if arm.rule == "linear" else cell.batch_size
        return Cell(arm=arm.point_of, precision=cell.precision, batch_size=batch_size)

    # ---- trials ----------------------------------------------------------------------------------------------------

    def overrides(self, cell: Cell) -> tuple[str, ...]:
        """Return what all runs of a cell share."""
        batch = (f"global_batch_size={cell.batch_size}", f"batch_size_per_rank={self.batch_sizes[cell.batch_size]}")
        return (*batch, *self.precisions[cell.precision], *self.arms[cell.arm].overrides)

    def of_seed(self, seed: int) -> tuple[str, ...]:
        """Return the overrides of a seed."""
        fold = () if self.num_folds is None else (f"data.fold={seed % self.num_folds}",)
        return (f"seed={seed}", *fold)

    @cached_property
    def _units(self) -> list[list[float]]:
        engine = SobolEngine(len(self.axes), scramble=True, seed=0)
        units: list[list[float]] = engine.draw(self.tuning.num_points).tolist()
        return units

    def _axes_of(self, arm: StudyArm) -> dict[str, TunedAxis | None]:
        lr = {} if arm.lr is None else {"lr": replace(self.axes["lr"], low=arm.lr[0], high=arm.lr[1])}
        return {**self.axes, **lr, **arm.axes}

    def point(self, cell: Cell, index: int) -> dict[str, float]:
        """Return the values of the point of this number for the arm of a tuned cell."""
        axes = self._axes_of(self.arms[cell.arm])
        pairs = zip(axes.items(), self._units[index], strict=True)
        return {name: axis.value(unit) for (name, axis), unit in pairs if axis is not None}

    def point_overrides(self, cell: Cell, point: Mapping[str, float]) -> tuple[str, ...]:
        """Return a point as overrides for the arm of a cell."""
        axes = self._axes_of(self.arms[cell.arm])
        return tuple(
            axis.override.format(f"{point[name]:.6g}") for name, axis in axes.items() if axis and name in point
        )

    def tuning_trials(self, cell: Cell, index: int) -> list[tuple[str, ...]]:
        """Return the trials of a point, one for each seed of the tuning."""
        shared = (*self.overrides(cell), *self.point_overrides(cell, self.point(cell, index)), UNTESTED)
        return [(*shared, *self.of_seed(seed)) for seed in self.tuning.seeds]

    def tests(self, cell: Cell, point: Mapping[str, float]) -> list[tuple[str, ...]]:
        """Return the trials behind a mean of the table, by seed."""
        shared = (*self.overrides(cell), *self.point_overrides(cell, point))
        return [(*shared, *self.of_seed(seed)) for seed in self.seeds]

    # ---- what the log says -----------------------------------------------------------------------------------------

    def finalists(self, cell: Cell, log: TrialLog) -> list[int] | None:
        """Return the points that go on to the other seeds, best first; None before all have run with the first."""
        found = [log.of(self.tuning_trials(cell, index)[0]) for index in range(self.tuning.num_points)]
        done = [(rank_of(one, mode=self.tuning.mode), index) for index, one in enumerate(found) if one is not None]
        return None if len(done) < len(found) else [index for _, index in sorted(done)[: self.tuning.num_finalists]]

    def chosen(self, cell: Cell, log: TrialLog) -> int | None:
        """Return the number of the point of a tuned cell; None before its tuning is complete, or if no run was done."""
        means = []
        for index in self.finalists(cell, log) or ():
            outcomes = [log.of(trial) for trial in self.tuning_trials(cell, index)]
            if any(outcome is None for outcome in outcomes):
                return None
            ranks = [rank_of(outcome, mode=self.tuning.mode) for outcome in outcomes if outcome is not None]
            means.append((max(rank for rank, _ in ranks), sum(value for _, value in ranks) / len(ranks), index))
        best = min(means, default=None)
        return None if best is None or best[0] > 0 else best[2]

    def chosen_point(self, cell: Cell, log: TrialLog) -> dict[str, float] | None:
        """Return the values with which a cell is tested: its own, or those of the cell it takes them from."""
        source = self.source_of(cell)
        tuned = cell if source is None else source
        if (given := self.arms[tuned.arm].point) is not None:
            point = dict(given)
        elif (index := self.chosen(tuned, log)) is not None:
            point = self.point(tuned, index)
        else:
            return None
        if source is not None and self.arms[cell.arm].rule == "linear":
            factor = cell.batch_size / source.batch_size
            for name, axis in self.axes.items():
                if axis.grows_with_batch and name in point:
                    scaled = point[name] * factor
                    point[name] = float(f"{scaled if axis.most is None else min(scaled, axis.most):.6g}")
        return point

    def results(self, cell: Cell, log: TrialLog) -> dict[int, TrialOutcome]:
        """Return the outcomes of those tests that have ended, by seed."""
        point = self.chosen_point(cell, log)
        trials = [] if point is None else self.tests(cell, point)
        found = zip(self.seeds, (log.of(trial) for trial in trials), strict=False)
        return {seed: outcome for seed, outcome in found if outcome is not None}

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(self, pool: TrialPool, log: TrialLog, tell: Callable[[str, TrialOutcome], None]) -> bool:
        """Run everything that is not in the log; return false if the time ended before."""
        for cell in self.cells:

            def run_all(trials: list[tuple[str, ...]], cell: Cell = cell) -> bool:
                waiting = list(dict.fromkeys(trial for trial in trials if log.of(trial) is None))
                for outcome in pool.run(waiting):
                    log.append(outcome)
                    tell(str(cell), outcome)
                return all(log.of(trial) is not None for trial in waiting)

            if self.arms[cell.arm].lr is not None:
                if not run_all([self.tuning_trials(cell, index)[0] for index in range(self.tuning.num_points)]):
                    return False
                finalists = self.finalists(cell, log) or []
                if not run_all([trial for index in finalists for trial in self.tuning_trials(cell, index)[1:]]):
                    return False
            point = self.chosen_point(cell, log)
            if point is not None and not run_all(self.tests(cell, point)):
                return False
        return True
