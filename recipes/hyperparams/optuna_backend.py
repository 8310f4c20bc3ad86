"""Optuna as the back end of a search: it proposes points and receives outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.cli.ranges import CountOrZero, Seed
from recipes.hyperparams.coarse_to_fine import Axis, Point
from recipes.hyperparams.trial_log import Mode, TrialOutcome, rank_of


@dataclass(frozen=True, kw_only=True)
class OptunaSearch:
    """Search by Optuna's default sampler (TPE) between `low` and `high` of each axis; `num` is not used.

    A search that resumes asks from the beginning, with the same seed, and reports what the log has, so that nothing
    runs twice. A trial that diverged or failed is reported as infinitely bad, one that was stopped as pruned.

    Attributes:
        num_trials: Trials in all.
        seed: Seed of the sampler.
        num_at_a_time: Points asked for before any outcome is reported: as many as there are workers.

    Raises:
        ValueError: Not a whole number of trials above zero, or optuna is not there.
    """

    num_trials: int = 12
    seed: Seed = 0
    num_at_a_time: CountOrZero = 1

    def __post_init__(self) -> None:
        if not isinstance(self.num_trials, int) or self.num_trials < 1:
            raise ValueError(f"`backend.num_trials` (={self.num_trials}) must be a whole number, at least 1.")
        _optuna()

    def search(self, axes: Sequence[Axis], run: Callable[[list[Point]], list[TrialOutcome] | None], mode: Mode) -> bool:
        """Run the search; return false if the time ended before. Arguments as in `CoarseToFine.search`."""
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            direction="minimize" if mode == "min" else "maximize", sampler=optuna.samplers.TPESampler(seed=self.seed)
        )
        worst = math.inf if mode == "min" else -math.inf
        at_a_time = max(1, self.num_at_a_time)
        for first in range(0, self.num_trials, at_a_time):
            asked = [study.ask() for _ in range(min(at_a_time, self.num_trials - first))]
            points: list[Point] = [
                {axis.key: trial.suggest_float(axis.key, axis.low, axis.high, log=axis.scale == "log") for axis in axes}
                for trial in asked
            ]
            outcomes = run(points)
            if outcomes is None:
                return False
            for trial, outcome in zip(asked, outcomes, strict=True):
                if outcome.status == "stopped" and outcome.value is not None:
                    trial.report(outcome.value, step=round(100 * outcome.curve[-1][0]))
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                else:
                    study.tell(trial, outcome.value if rank_of(outcome, mode=mode)[0] == 0 else worst)
        return True


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError(
            "`backend` (=optuna) needs the package optuna, which is not installed: pip install "
            "'lightning-hybrid[search]'. backend=coarse_to_fine needs nothing."
        ) from None
    return optuna
