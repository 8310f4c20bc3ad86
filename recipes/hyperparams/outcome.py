"""Outcome of a trial, and ranking of trials from best to worst."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

Status = Literal["done", "stopped", "diverged", "failed"]

STATES: dict[Status, TrialState] = {
    "done": TrialState.COMPLETE,
    "stopped": TrialState.PRUNED,
    "diverged": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
"""Optuna's trial state for each status."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one trial, with its status, objective and metrics.

    Attributes:
        status: `done`, `stopped` (by the pruner), `diverged` (the loss is not finite, or the final accuracy is no
            better than guessing) or `failed` (an error).
        reason: Reason why the trial was stopped, diverged or failed. Empty if it is done.
        value: Objective of a trial that is done. None for other trials.
        metrics: All metrics at the end of the trial.
    """

    status: Status
    reason: str = ""
    value: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def status_of(trial: FrozenTrial) -> Status:
    """Return the recorded status of a trial that has ended, such as `done` or `failed`."""
    status: Status = trial.user_attrs["status"]
    return status


def was_interrupted(trial: FrozenTrial) -> bool:
    """Return whether the process of a trial was killed, so that the trial has to run again."""
    # A trial that fails because of an error records that before its state changes.
    return trial.state == TrialState.FAIL and trial.user_attrs.get("status") != "failed"


def has_ended(trial: FrozenTrial) -> bool:
    """Return whether a trial has ended with a result or an error, and was not interrupted."""
    return trial.state.is_finished() and not was_interrupted(trial)


def sort_key(trial: FrozenTrial, direction: StudyDirection) -> tuple[int, float]:
    """Return a key that sorts trials from best to worst, first by status and then by objective."""
    status = status_of(trial)
    if status in ("diverged", "failed") or trial.value is None or not math.isfinite(trial.value):
        return 2, 0.0
    value = trial.value
    if direction == StudyDirection.MAXIMIZE:
        value = -value
    return int(status == "stopped"), value


def best_of(trials: Iterable[FrozenTrial], direction: StudyDirection) -> FrozenTrial | None:
    """Return the best completed trial (the first of equal ones), or None if there is none."""
    done = [trial for trial in trials if sort_key(trial, direction)[0] == 0]
    return min(done, key=lambda trial: sort_key(trial, direction), default=None)
