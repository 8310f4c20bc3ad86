"""Report of a hyper-parameter search, with rows for the terminal, a table and a figure."""

from __future__ import annotations

import itertools
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
        return self._line(self._columns())

    def row(self, trial: FrozenTrial, *, num_ended: int, num_trials: int) -> str:
        """Format one trial that has ended as a row for the terminal."""
        progress = f"{num_ended} of {num_trials}"
        cells = self._cells(trial)
        return self._line([progress, *cells])

    def table(self, rounds: Rounds) -> str:
        """Format all trials as a Markdown table, best first."""
        round_of = {}
        for number, trials in enumerate(rounds, start=1):
            for trial in trials:
                round_of[trial.number] = number

        rows = []
        for rank, trial in enumerate(self._sorted(rounds), start=1):
            round_number = round_of[trial.number]
            cells = self._cells(trial)
            rows.append([str(rank), str(round_number), *cells])
        header = ["rank", "round", *self._cell_names()]
        return markdown_table(header, rows)

    def best(self, rounds: Rounds) -> FrozenTrial | None:
        """Return the best completed trial, or None if there is none."""
        trials = self._sorted(rounds)
        return best_of(trials, self.direction)

    def edges(self, best: FrozenTrial) -> list[str]:
        """Return the keys for which the best trial has a value at an end of the search range or beyond."""
        keys = []
        for axis in self.axes:
            value = best.params[axis.key]
            if axis.is_edge(value):
                keys.append(axis.key)
        return keys

    def write(self, folder: Path, study: Study, rounds: Rounds) -> None:
        """Write the table and the figure of the search, `table.md` and `search.svg`, into a folder."""
        table = self.table(rounds)
        (folder / "table.md").write_text(f"{table}\n")
        with matplotlib.rc_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            axes: Any = plot_slice(study, params=self._keys(), target_name=self.objective)
        # `plot_slice` returns one Axes object, or an array if several keys are searched.
        first_axes = np.ravel(axes)[0]
        figure = first_axes.figure
        figure.savefig(folder / "search.svg", bbox_inches="tight")
        plt.close(figure)

    def _keys(self) -> list[str]:
        return [axis.key for axis in self.axes]

    def _columns(self) -> list[str]:
        """Return the header cells of the rows for the terminal."""
        return ["trial", *self._cell_names()]

    def _cell_names(self) -> list[str]:
        """Return the names of the cells that `_cells` formats."""
        return [*self._keys(), self.objective, "status", "seconds", "reason"]

    def _sorted(self, rounds: Rounds) -> list[FrozenTrial]:
        """Return the trials of all rounds, best first."""
        trials = list(itertools.chain.from_iterable(rounds))
        return sorted(trials, key=lambda trial: sort_key(trial, self.direction))

    def _cells(self, trial: FrozenTrial) -> list[str]:
        values = [f"{trial.params[key]:.6g}" for key in self._keys()]
        status = status_of(trial)
        objective = ""
        if trial.value is not None and status in ("done", "stopped"):
            objective = f"{trial.value:.5g}"
        seconds = ""
        if trial.duration is not None:
            seconds = f"{trial.duration.total_seconds():.1f}"
        reason = trial.user_attrs["reason"]
        return [*values, objective, status, seconds, reason]

    def _line(self, cells: Sequence[str]) -> str:
        padded_cells = []
        for cell, column in zip(cells, self._columns(), strict=True):
            width = max(WIDTH, len(column))
            padded_cells.append(cell.ljust(width))
        return "  ".join(padded_cells).rstrip()
