"""Execution of a study's training runs, with an Optuna journal from which a study can resume."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from recipes.comparison.arms import Cell, Point, StudyPlan, point_overrides
from recipes.comparison.fits import FitPool, FitRequest, FitResult, Stage, fit

INDEX = "index"
CORE_S = "core_s"
NUM_STEPS = "num_steps"
DIVERGENCE = "divergence"
SETTINGS = "settings"
"""Name of the attribute of a study in the journal. The other names above are attributes of a trial."""


@contextmanager
def only_user_of(folder: Path) -> Iterator[None]:
    """Context manager that locks the folder of a study, so that only this process uses it.

    Raises:
        ValueError: Another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            # released when the process ends for any reason
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"`hydra.run.dir` (={folder}) is in use by another study. Wait until that study "
                "ends, or set another hydra.run.dir."
            ) from None
        yield


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """Test results of a variant at one batch size, after all its final runs have finished.

    Attributes:
        point: Tuned values that were selected.
        accuracies: Test accuracy in %, by seed.
        num_steps: Number of optimizer steps of a final run.
        num_diverged: Number of final runs that diverged. Their accuracy counts as that of guessing.
        core_s: Processor time of all tuning and final runs in seconds.
    """

    point: Point
    accuracies: Mapping[int, float]
    num_steps: int
    num_diverged: int
    core_s: float


class StudyJournal:
    """Journal that records the training runs of a study, and starts those that are still missing.

    Only one process may use a folder at a time. Each variant and batch size has two Optuna studies, `<cell>/tuning` and
    `<cell>/testing`. All their trials are enqueued in advance, so that the tuned values are the same for every variant,
    and do not depend on the number of workers or on interruptions.

    Args:
        folder: Folder of the journal and of the training runs.
        plan: Plan of the study.
        pool: Pool that executes the training runs.
        tell: Function called with a line for each finished run.
        run: Function that executes one training run in a process of the pool.
    """

    def __init__(
        self,
        folder: Path,
        plan: StudyPlan,
        pool: FitPool,
        *,
        tell: Callable[[str], None] = print,
        run: Callable[[FitRequest], FitResult] = fit,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        self.plan = plan
        self.pool = pool
        self.tell = tell
        self.run = run
        path = folder / "journal.jsonl"
        _drop_half_line(path)
        self.storage = JournalStorage(JournalFileBackend(str(path)))

    def tune(self, cell: Cell) -> Point:
        """Execute the missing tuning runs of a variant, and return the best hyper-parameters."""
        overrides = self.plan.tuning_overrides(cell)
        study = self._study(cell, "tuning", self._tuning_settings(cell))
        _enqueue(study, dict(enumerate(self.plan.points(cell))))

        def request(trial: optuna.Trial) -> FitRequest:
            point = {}
            for axis, (low, high) in self.plan.arms[cell.arm].axes.items():
                point[axis] = trial.suggest_float(axis, low, high, log=True)
            return self._request(cell, trial, (*overrides, *point_overrides(point)), "validate")

        self._run_waiting(study, request)
        trials = list(_complete(study).values())
        best = max(trials, key=lambda trial: (trial.value, -trial.user_attrs[INDEX]))
        return dict(best.params)

    def test(self, cell: Cell, point: Point) -> CellResult:
        """Execute the missing final runs of a variant, and return the results of all seeds."""
        overrides = self.plan.testing_overrides(cell, point)
        study = self._study(cell, "testing", {"overrides": list(overrides)})
        _enqueue(study, {seed: {"seed": seed} for seed in self.plan.testing.seeds})

        def request(trial: optuna.Trial) -> FitRequest:
            seed = trial.suggest_int("seed", 0, 2**31)
            return self._request(cell, trial, (*overrides, f"seed={seed}"), "test")

        self._run_waiting(study, request)
        trials = _complete(study)
        accuracies = {}
        for seed in self.plan.testing.seeds:
            accuracies[seed] = 100 * float(trials[seed].value or 0.0)
        tests = [trials[seed] for seed in self.plan.testing.seeds]
        tuning = optuna.load_study(study_name=f"{cell.name}/tuning", storage=self.storage)
        core_s = 0.0
        for trial in [*tests, *_complete(tuning).values()]:
            core_s += trial.user_attrs[CORE_S]
        return CellResult(
            point=point,
            accuracies=accuracies,
            num_steps=max(trial.user_attrs[NUM_STEPS] for trial in tests),
            num_diverged=sum(1 for trial in tests if trial.user_attrs[DIVERGENCE]),
            core_s=core_s,
        )

    def check(self) -> None:
        """Raise if the folder contains tuning runs whose settings differ from those of the plan.

        Call it before the first run, because an error after some runs would waste them.

        Raises:
            ValueError: The number of trials, the seed or another setting differs.
        """
        names = set(optuna.get_all_study_names(self.storage))
        for name in sorted(names):
            if name.endswith("/tuning"):
                is_tuned = name.replace("/tuning", "/testing") in names
                self._check_tuning(self._load(name), is_tuned=is_tuned)
        for cell in self.plan.cells:
            name = f"{cell.name}/tuning"
            if name in names:
                self._check_settings(self._load(name), self._tuning_settings(cell))

    def _load(self, name: str) -> optuna.Study:
        return optuna.load_study(study_name=name, storage=self.storage)

    def _check_tuning(self, study: optuna.Study, *, is_tuned: bool) -> None:
        """Raise if the number of trials or the seed of an Optuna study differs from the plan.

        Args:
            study: Optuna study of the tuning runs of a cell.
            is_tuned: Whether all its trials have been enqueued.
        """
        tuning = self.plan.tuning
        saved_settings = dict(study.user_attrs.get(SETTINGS, {}))
        if "num_trials" not in saved_settings and is_tuned:
            # Journals of earlier versions do not contain the number.
            indices = {trial.user_attrs[INDEX] for trial in study.get_trials(deepcopy=False)}
            saved_settings["num_trials"] = len(indices)
        for name, value in (("num_trials", tuning.num_trials), ("seed", tuning.seed)):
            saved_value = saved_settings.get(name, value)
            if saved_value != value:
                key = f"study.tuning.{name}"
                raise ValueError(
                    f"`{key}` (={value}) differs from the value of `{study.study_name}` in "
                    f"{self.folder} (={saved_value}), but all variants must be tuned alike. Set "
                    f"{key}={saved_value}, or set another hydra.run.dir."
                )

    def _tuning_settings(self, cell: Cell) -> dict[str, Any]:
        tuning = self.plan.tuning
        return {
            "overrides": list(self.plan.tuning_overrides(cell)),
            "axes": dict(self.plan.arms[cell.arm].axes),
            "num_trials": tuning.num_trials,
            "seed": tuning.seed,
        }

    def _study(self, cell: Cell, phase: str, settings: Mapping[str, Any]) -> optuna.Study:
        name = f"{cell.name}/{phase}"
        study = optuna.create_study(
            study_name=name, storage=self.storage, direction="maximize", load_if_exists=True
        )
        self._check_settings(study, settings)
        if study.user_attrs.get(SETTINGS) != _plain(settings):
            study.set_user_attr(SETTINGS, _plain(settings))
        return study

    def _check_settings(self, study: optuna.Study, settings: Mapping[str, Any]) -> None:
        """Raise if the saved settings of an Optuna study differ from the given ones."""
        saved_settings = study.user_attrs.get(SETTINGS)
        if saved_settings is None:
            return
        # Journals of earlier versions do not contain the number of trials and the seed.
        now = _plain(settings)
        if saved_settings != {key: now[key] for key in now if key in saved_settings}:
            raise ValueError(
                f"`hydra.run.dir` (={self.folder}) contains training runs of `{study.study_name}` "
                f"with other settings ({saved_settings}, now {now}), and runs with different "
                "settings cannot be compared. Use the same settings as before, or set another "
                "hydra.run.dir."
            )

    def _request(
        self, cell: Cell, trial: optuna.Trial, overrides: tuple[str, ...], stage: Stage
    ) -> FitRequest:
        run_dir = self.folder / "fits" / cell.name / f"{stage}_{trial.user_attrs[INDEX]}"
        return FitRequest(overrides=overrides, run_dir=str(run_dir), stage=stage)

    def _run_waiting(
        self, study: optuna.Study, request: Callable[[optuna.Trial], FitRequest]
    ) -> None:
        """Run all enqueued Optuna trials in the pool, and record their results."""
        trials: dict[Future[FitResult], optuna.Trial] = {}
        for _ in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            trial = study.ask()
            future = self.pool.executor.submit(self.pool.call, self.run, request(trial))
            trials[future] = trial
        for future in as_completed(trials):
            result = future.result()
            trial = trials[future]
            trial.set_user_attr(CORE_S, result.core_s)
            trial.set_user_attr(NUM_STEPS, result.num_steps)
            trial.set_user_attr(DIVERGENCE, result.divergence)
            study.tell(trial, result.accuracy)
            self.tell(
                f"{study.study_name} {trial.user_attrs[INDEX]} {trial.params}: {result.accuracy:.2%} "
                f"{result.divergence} {result.core_s:.0f} s"
            )


def _enqueue(study: optuna.Study, trials: Mapping[int, Mapping[str, Any]]) -> None:
    """Enqueue all trials that are neither finished nor already enqueued.

    Trials whose process was killed are enqueued again.
    """
    indices = set()
    for trial in study.get_trials(deepcopy=False):
        # Its process was killed: this process holds the lock of the folder, so no other one is running.
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        elif trial.state in (TrialState.COMPLETE, TrialState.WAITING):
            indices.add(trial.user_attrs[INDEX])
    for index, params in trials.items():
        if index not in indices:
            study.enqueue_trial(dict(params), user_attrs={INDEX: index})


def _complete(study: optuna.Study) -> dict[int, FrozenTrial]:
    """Return the finished trials of an Optuna study, keyed by the index given when they were enqueued."""
    trials = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        trials[trial.user_attrs[INDEX]] = trial
    return trials


def _plain(value: Any) -> Any:
    """Convert nested tuples to lists, as a round trip through JSON would."""
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    return value


def _drop_half_line(path: Path) -> None:
    """Remove the last line of a journal if it is incomplete because a process was killed.

    Optuna would reject the journal once another line follows.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1
    if length < len(content):
        os.truncate(path, length)
