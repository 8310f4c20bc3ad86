"""Which trials answer the question, and in which order: tune each arm's learning rate, then test it over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ConfigDict

from recipes.cli.config_check import made
from recipes.hyperparams.coarse_to_fine import Axis, CoarseToFine, TrialRunner, overrides_of, point_of
from recipes.hyperparams.trial_log import Mode, Outcome, TrialLog, best_of
from recipes.hyperparams.trial_pool import TrialPool

LR = "optim.lr"
STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Attributes:
        overrides: What makes it.
        low, high: Ends of the first grid of learning rates.
        lr_of: Instead of all of these, the arm whose overrides it shares, and whose rate at the smallest batch it
            scales linearly with the batch (Goyal et al. 2017, arXiv:1706.02677).
        precisions, batch_sizes: Those it is run with; None = all of the study.
    """

    __pydantic_config__ = STRICT

    overrides: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    lr_of: str | None = None
    precisions: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One way to compute.

    Attributes:
        overrides: What makes it.
        batch_sizes: Those it is run with; None = all of the study.
    """

    __pydantic_config__ = STRICT

    overrides: tuple[str, ...]
    batch_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """An arm at one precision and batch: a mean and a deviation of the table."""

    arm: str
    precision: str
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How every learning rate is tuned; see `coarse_to_fine.CoarseToFine`."""

    __pydantic_config__ = STRICT

    objective: str
    mode: Mode
    num: int
    num_rounds: int
    zoom: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms by precisions by batches.

    Raises:
        ValueError: The seed of tuning is among those of the tests, or an arm, a precision or a batch is not known.
    """

    __pydantic_config__ = STRICT

    recipe: str
    title: str
    chance: float
    num_train: int
    batch_sizes: tuple[int, ...]
    precisions: Mapping[str, Precision]
    arms: Mapping[str, Arm]
    tuning: Tuning
    seeds: tuple[int, ...] = field(default=(1, 2, 3, 4, 5))

    def __post_init__(self) -> None:
        if self.tuning.seed in self.seeds:
            raise ValueError(
                f"`tuning.seed` (={self.tuning.seed}) must not be among `seeds` (={list(self.seeds)}): the rate was "
                "chosen for that run. Set another tuning.seed."
            )
        smallest = min(self.batch_sizes)
        for name, arm in self.arms.items():
            for precision in arm.precisions or self.precisions if arm.lr_of else ():
                if smallest not in (self.precisions[precision].batch_sizes or self.batch_sizes):
                    raise ValueError(
                        f"`study.arms.{name}.lr_of` (={arm.lr_of}) must have a rate at the smallest batch "
                        f"(={smallest}), and {precision!r} has none there. Leave {precision!r} out of "
                        f"study.arms.{name}.precisions."
                    )
            known: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
                ("lr_of", [arm.lr_of] if arm.lr_of else [], list(self.arms)),
                ("precisions", arm.precisions or (), list(self.precisions)),
                ("batch_sizes", arm.batch_sizes or (), self.batch_sizes),
            )
            for key, given, there in known:
                for value in given:
                    if value not in there:
                        raise ValueError(
                            f"`study.arms.{name}.{key}` (={value}) must be one of the study's: "
                            f"{', '.join(map(str, there))}."
                        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Study:
        """From the keys `study`, `tuning` and `seeds` of a configuration as plain data.

        Raises:
            ValueError: As the class, or a key is missing, unknown or of the wrong type.
        """
        made(Tuning, config["tuning"], "tuning")
        study = made(cls, config["study"] | {"tuning": config["tuning"], "seeds": config["seeds"]}, "study")
        return replace(study, batch_sizes=tuple(sorted(study.batch_sizes)))

    @property
    def main_arms(self) -> list[str]:
        """Those that are run in every precision, or take another's rate; the others take a part out."""
        return [name for name, arm in self.arms.items() if arm.precisions is None or arm.lr_of is not None]

    def cells(self) -> Iterator[Cell]:
        """In the order in which they are run: tuned arms before those that take their rates over; parts out last."""
        main = self.main_arms
        in_order = sorted(main, key=lambda name: self.arms[name].lr_of is not None)
        for names in (in_order, [name for name in self.arms if name not in main]):
            for precision_name, precision in self.precisions.items():
                for batch_size in self.batch_sizes:
                    for name in names:
                        arm = self.arms[name]
                        is_in = precision_name in (arm.precisions or self.precisions)
                        sizes = (arm.batch_sizes or self.batch_sizes, precision.batch_sizes or self.batch_sizes)
                        if is_in and all(batch_size in of for of in sizes):
                            yield Cell(arm=name, precision=precision_name, batch_size=batch_size)

    def overrides(self, cell: Cell) -> tuple[str, ...]:
        """What all runs of a cell share."""
        arm = self.arms[cell.arm]
        arm = self.arms[arm.lr_of] if arm.lr_of else arm
        return (*arm.overrides, *self.precisions[cell.precision].overrides, f"global_batch_size={cell.batch_size}")

    def axis(self, cell: Cell) -> Axis:
        """Of the learning rate."""
        arm = self.arms[cell.arm]
        return Axis(key=LR, low=arm.low, high=arm.high, num=self.tuning.num)

    def run_tuning(self, cell: Cell, pool: TrialPool, log: TrialLog, tell: Callable[[Outcome], None]) -> bool:
        """Search the learning rate of a cell; false if the time ended before."""
        fixed = (*self.overrides(cell), f"seed={self.tuning.seed}", "trainer.limit_test_batches=0")
        run = TrialRunner(pool, log, fixed=fixed, mode=self.tuning.mode, tell=tell)
        backend = CoarseToFine(num_rounds=self.tuning.num_rounds, zoom=self.tuning.zoom)
        return backend.search([self.axis(cell)], run, self.tuning.mode)

    def tuned(self, cell: Cell, log: TrialLog) -> Outcome | None:
        """The best tuning trial of a cell that the log knows."""
        return best_of(self._tried(cell, log), mode=self.tuning.mode)

    def is_end(self, cell: Cell, lr: float, log: TrialLog) -> bool:
        """Whether no rate beyond ``lr``, on one side, was tried for a cell: the best may lie there."""
        rates = [point_of(outcome.overrides, [LR])[LR] for outcome in self._tried(cell, log)]
        return lr <= min(rates) or lr >= max(rates)

    def _tried(self, cell: Cell, log: TrialLog) -> list[Outcome]:
        """The tuning trials of a cell that the log knows."""
        fixed = {*self.overrides(cell), f"seed={self.tuning.seed}", "trainer.limit_test_batches=0"}
        return [o for o in log.outcomes.values() if len(o.overrides) == len(fixed) + 1 and fixed <= set(o.overrides)]

    def lr(self, cell: Cell, log: TrialLog) -> float | None:
        """The rate of a cell: tuned, or scaled from one that was; None if no trial of the tuning was done."""
        arm = self.arms[cell.arm]
        if arm.lr_of is not None:
            smallest = min(self.batch_sizes)
            base = self.lr(Cell(arm=arm.lr_of, precision=cell.precision, batch_size=smallest), log)
            return None if base is None else base * cell.batch_size / smallest
        best = self.tuned(cell, log)
        return None if best is None else point_of(best.overrides, [LR])[LR]

    def tests(self, cell: Cell, lr: float) -> list[tuple[str, ...]]:
        """The trials behind a mean of the table."""
        return [(*self.overrides(cell), *overrides_of({LR: lr}), f"seed={seed}") for seed in self.seeds]

    def results(self, cell: Cell, log: TrialLog) -> list[Outcome]:
        """Those of them that have ended."""
        lr = self.lr(cell, log)
        trials = [] if lr is None else self.tests(cell, lr)
        return [outcome for trial in trials if (outcome := log.of(trial)) is not None]

    def run(self, pool: TrialPool, log: TrialLog, tell: Callable[[str, Outcome], None]) -> bool:
        """Everything that the log does not know yet; false if the time ended before."""
        for cell in self.cells():
            name = f"{cell.arm}, {cell.precision}, batch {cell.batch_size}"

            def told(outcome: Outcome, name: str = name) -> None:
                tell(name, outcome)

            if self.arms[cell.arm].lr_of is None and not self.run_tuning(cell, pool, log, told):
                return False
            lr = self.lr(cell, log)
            if lr is None:
                continue
            waiting = [trial for trial in self.tests(cell, lr) if log.of(trial) is None]
            for outcome in pool.run(waiting):
                log.append(outcome)
                told(outcome)
            if any(log.of(trial) is None for trial in waiting):
                return False
        return True
