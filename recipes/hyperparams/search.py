"""Hyper-parameter search in an Optuna study on disk, which several processes can share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from recipes.hyperparams.axes import Axis
from recipes.hyperparams.coarse_to_fine import CoarseToFine
from recipes.hyperparams.locks import TrialLocks
from recipes.hyperparams.outcome import STATES, Outcome, has_ended, was_interrupted

Mode = Literal["min", "max"]

STUDY_NAME = "search"


DIRECTIONS = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}
"""Optuna's direction for each mode."""


class Search:
    """Hyper-parameter search whose trials are stored in an Optuna study in a directory.

    Several searches with the same directory, one after the other or in parallel, share the trials.

    Args:
        folder: Directory of the journal, which is created if missing.
        axes: Axes to search.
        sampler: Optuna's sampler of points.
        num_trials: Total number of trials. `CoarseToFine` determines its own.
        pruner: Optuna's pruner, or None to let every trial run to its end. A trial reports the percentage of its run as
            its step.
        mode: `min` for a loss, `max` for an accuracy.
        settings: Hash of the configuration that all trials share.

    Raises:
        ValueError: The journal has trials with other settings.
    """

    def __init__(
        self,
        folder: Path,
        axes: Sequence[Axis],
        *,
        sampler: BaseSampler,
        num_trials: int = 12,
        pruner: BasePruner | None = None,
        mode: Mode = "min",
        settings: str,
    ) -> None:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.study = optuna.create_study(
            storage=_journal(folder / "journal.jsonl"),
            study_name=STUDY_NAME,
            direction=DIRECTIONS[mode],
            sampler=sampler,
            pruner=pruner or NopPruner(),
            load_if_exists=True,
        )
        self._check_settings(folder, settings)
        self._locks = TrialLocks(folder / "running.lock")
        self._held: set[int] = set()
        self._coarse_to_fine: CoarseToFine | None = None
        self.num_trials = num_trials
        if isinstance(sampler, CoarseToFine):
            self._coarse_to_fine = sampler
            self.num_trials = sampler.num_trials
            # a round around a point at the edge of the grid goes beyond the edge
            axes = [axis.widened() for axis in axes]
        self._distributions: dict[str, BaseDistribution] = {
            axis.key: axis.distribution() for axis in axes
        }
        if self.study.trials:
            sampler.reseed_rng()  # with the same seed the sampler would propose the first points again

    def _check_settings(self, folder: Path, settings: str) -> None:
        saved_settings = self.study.user_attrs.get("settings")
        if saved_settings is None:
            self.study.set_user_attr("settings", settings)
        elif saved_settings != settings:
            raise ValueError(
                f"`hydra.run.dir` (={folder}) contains trials with other settings ({saved_settings}, "
                f"now {settings}). Use the same configuration, or set another hydra.run.dir."
            )

    def rounds(self) -> list[list[FrozenTrial]]:
        """Return the finished trials, grouped by round (a single group unless `CoarseToFine` is used)."""
        if self._coarse_to_fine is not None:
            return self._coarse_to_fine.rounds(self.study)
        return [[trial for trial in self.study.get_trials(deepcopy=False) if has_ended(trial)]]

    def num_ended(self) -> int:
        """Return the number of finished trials."""
        return sum(len(trials) for trials in self.rounds())

    def start_trial(self) -> Trial | None:
        """Start and return the next trial, or return None if there is no trial to start."""
        with self._locks.starting():
            self._fail_interrupted()
            if not self._has_next():
                return None
            trial = self.study.ask(self._distributions)
            self._locks.hold(trial.number)
            self._held.add(trial.number)
            return trial

    def end_trial(self, trial: Trial, outcome: Outcome) -> FrozenTrial:
        """Record the outcome of a trial in the study, and return the finished trial."""
        trial.set_user_attr("status", outcome.status)
        trial.set_user_attr("reason", outcome.reason)
        trial.set_user_attr("metrics", dict(outcome.metrics))
        ended = self.study.tell(trial, outcome.value, state=STATES[outcome.status])
        self._held.discard(trial.number)
        self._locks.release(trial.number)
        return ended

    def others_run(self) -> bool:
        """Return whether another process is running a trial of this search."""
        with self._locks.starting():
            self._fail_interrupted()
            return any(trial.number not in self._held for trial in self._running_trials())

    def is_complete(self) -> bool:
        """Return whether all trials have been run and no other process is running a trial."""
        return not self.others_run() and not self._has_next()

    def _has_next(self) -> bool:
        if self._coarse_to_fine is not None:
            return self._coarse_to_fine.has_next(self.study)
        trials = self.study.get_trials(deepcopy=False)
        return sum(not was_interrupted(trial) for trial in trials) < self.num_trials

    def _running_trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _fail_interrupted(self) -> None:
        """Mark running trials as failed if their process no longer exists, so that they run again."""
        for trial in self._running_trials():
            if trial.number not in self._held and not self._locks.is_held_elsewhere(trial.number):
                self.study.tell(trial.number, state=TrialState.FAIL)


def _journal(path: Path) -> JournalStorage:
    """Open an Optuna journal, and first remove its last line if a killed process left it incomplete."""
    lock = JournalFileOpenLock(str(path))
    lock.acquire()
    try:
        if path.exists():
            content = path.read_bytes()
        else:
            content = b""
        whole_lines = content[: content.rfind(b"\n") + 1]
        if whole_lines != content:
            path.write_bytes(whole_lines)
    finally:
        lock.release()
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
