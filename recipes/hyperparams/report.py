"""Report of a hyper-parameter search, with rows for the terminal, a table and a figure."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from optuna.exceptions import ExperimentalWarning
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial
from optuna.visualization.matplotlib import plot_slice

from lightning_hybrid.formatting import markdown_table
from recipes.hyperparams.axes import Axis
from recipes.hyperparams.outcome import best_of, sort_key, status_of

Rounds = Sequence[Sequence[FrozenTrial]]
"""Ended trials, grouped by round."""

WIDTH = 11
"""Minimum width of a column on the terminal."""


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """Formatter of the trials of a hyper-parameter search as rows, a table and a figure.

    Attributes:
        axes: Axes of the search.
        objective: Name of the metric that is compared.
        direction: Better direction of the objective.
    """

    axes: Sequence[Axis]
    objective: str
    direction: StudyDirection

    def header(self) -> str:
        """Return the header line of the rows that `row` formats."""
        return self._line(["trial", *self._keys(), self.objective, "status", "seconds", "reason"])

    def row(self, trial: FrozenTrial, *, num_ended: int, num_trials: int) -> str:
        """Format one trial that has ended as a row for the terminal."""
        return self._line([f"{num_ended} of {num_trials}", *self._cells(trial)])

    def table(self, rounds: Rounds) -> str:
        """Format all trials as a Markdown table, best first."""
        round_of = {}
        for number, trials in enumerate(rounds, start=1):
            for trial in trials:
                round_of[trial.number] = number

        rows = []
        for rank, trial in enumerate(self._sorted(rounds), start=1):
            rows.append([str(rank), str(round_of[trial.number]), *self._cells(trial)])
        return markdown_table(
            ["rank", "round", *self._keys(), self.objective, "status", "seconds", "reason"], rows
        )

    def best(self, rounds: Rounds) -> FrozenTrial | None:
        """Return the best completed trial, or None if there is none."""
        return best_of(self._sorted(rounds), self.direction)

    def edges(self, best: FrozenTrial) -> list[str]:
        """Return the keys for which the best trial has a value at an end of the search range or beyond."""
        return [axis.key for axis in self.axes if axis.is_edge(best.params[axis.key])]

    def write(self, folder: Path, study: Study, rounds: Rounds) -> None:
        """Write the table and the figure of the search, `table.md` and `search.svg`, into a folder."""
        (folder / "table.md").write_text(self.table(rounds) + "\n")
        with matplotlib.rc_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            axes: Any = plot_slice(study, params=self._keys(), target_name=self.objective)
        first_axes = np.ravel(axes)[0]
        first_axes.figure.savefig(folder / "search.svg", bbox_inches="tight")
        plt.close(first_axes.figure)

    def _keys(self) -> list[str]:
        return [axis.key for axis in self.axes]

    def _sorted(self, rounds: Rounds) -> list[FrozenTrial]:
        trials = [trial for trials in rounds for trial in trials]
        return sorted(trials, key=lambda trial: sort_key(trial, self.direction))

    def _cells(self, trial: FrozenTrial) -> list[str]:
        values = [f"{trial.params[axis.key]:.6g}" for axis in self.axes]
        objective = ""
        if trial.value is not None and status_of(trial) in ("done", "stopped"):
            objective = f"{trial.value:.5g}"
        seconds = ""
        if trial.duration is not None:
            seconds = f"{trial.duration.total_seconds():.1f}"
        return [*values, objective, status_of(trial), seconds, trial.user_attrs["reason"]]

    def _line(self, cells: Sequence[str]) -> str:
        names = ["trial", *self._keys(), self.objective, "status", "seconds", "reason"]
        padded = [
            cell.ljust(max(WIDTH, len(name))) for cell, name in zip(cells, names, strict=True)
        ]
        return "  ".join(padded).rstrip()
