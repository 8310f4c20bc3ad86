"""Tables and picture of a study: accuracy against batch, one line per arm; tuned rates; differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recipes.cli.markdown import markdown_table
from recipes.cli.results import write_json
from recipes.hyperparams.study import Cell, Study
from recipes.hyperparams.trial_log import TrialLog, TrialOutcome

TEST_ACC = "test/acc"


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Accuracy over several seeds.

    Attributes:
        mean: Mean of all runs.
        deviation: Sample standard deviation (n - 1 in the denominator); 0 for one run.
        num_runs: Number of runs.
        num_lost: Number of runs that diverged or failed; they count as chance.
    """

    mean: float
    deviation: float
    num_runs: int
    num_lost: int

    @classmethod
    def of(cls, outcomes: Sequence[TrialOutcome], *, chance: float) -> Accuracy | None:
        """Make it from outcomes; None if there is no run.

        >>> runs = [TrialOutcome(overrides=(), status="done", metrics={"test/acc": acc}) for acc in (0.9, 0.8, 0.7)]
        >>> accuracy = Accuracy.of([*runs, TrialOutcome(overrides=(), status="diverged")], chance=0.1)
        >>> round(accuracy.mean, 3), round(accuracy.deviation, 4), accuracy.num_runs, accuracy.num_lost
        (0.625, 0.3594, 4, 1)
        """
        if not outcomes:
            return None
        lost = [outcome for outcome in outcomes if outcome.status != "done"]
        found = [chance if outcome.status != "done" else outcome.metrics[TEST_ACC] for outcome in outcomes]
        return cls(
            mean=statistics.mean(found),
            deviation=statistics.stdev(found) if len(found) > 1 else 0.0,
            num_runs=len(found),
            num_lost=len(lost),
        )

    def __str__(self) -> str:
        lost = f", {self.num_lost} of {self.num_runs} lost" if self.num_lost else ""
        return f"{100 * self.mean:.1f} ± {100 * self.deviation:.1f}{lost}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference of two mean accuracies.

    Attributes:
        mean: First less second.
        standard_error: `sqrt(s1^2 / n1 + s2^2 / n2)`.
    """

    mean: float
    standard_error: float

    @classmethod
    def of(cls, one: Accuracy, other: Accuracy) -> Difference:
        """Subtract the second from the first.

        >>> one = Accuracy(mean=0.9, deviation=0.03, num_runs=9, num_lost=0)
        >>> str(Difference.of(one, Accuracy(mean=0.8, deviation=0.04, num_runs=16, num_lost=0)))
        '+10.0 ± 1.4'
        """
        variance = one.deviation**2 / one.num_runs + other.deviation**2 / other.num_runs
        return cls(mean=one.mean - other.mean, standard_error=math.sqrt(variance))

    def __str__(self) -> str:
        return f"{100 * self.mean:+.1f} ± {100 * self.standard_error:.1f}"


def accuracies(study: Study, log: TrialLog) -> dict[Cell, Accuracy]:
    """Return the accuracy of every cell whose tests have all ended."""
    results = {cell: study.results(cell, log) for cell in study.cells()}
    found = {
        cell: Accuracy.of(outcomes, chance=study.chance)
        for cell, outcomes in results.items()
        if len(outcomes) == len(study.seeds)
    }
    return {cell: accuracy for cell, accuracy in found.items() if accuracy is not None}


def _lines(study: Study) -> list[tuple[str, str]]:
    """Return arm and precision of each line, in the order of the configuration."""
    there = {(cell.arm, cell.precision) for cell in study.cells()}
    return [(arm, precision) for arm in study.arms for precision in study.precisions if (arm, precision) in there]


def _batch_names(study: Study) -> list[str]:
    return [f"{size} ({100 * size / study.num_train:.3g} %)" for size in study.batch_sizes]


def markdown(study: Study, log: TrialLog) -> str:
    """Format accuracies, rates, and the differences that the claims are about."""
    found = accuracies(study, log)

    def row(arm: str, precision: str, text: Any) -> list[str]:
        cells = [Cell(arm=arm, precision=precision, batch_size=size) for size in study.batch_sizes]
        return [arm, precision, *(text(cell) for cell in cells)]

    def rate(cell: Cell) -> str:
        lr = study.lr(cell, log) if cell in found else None
        if lr is None:
            return ""
        is_tuned = study.arms[cell.arm].lr_of is None
        return f"{lr:.3g}" + (" (end of what was tried)" if is_tuned and study.is_end(cell, lr, log) else "")

    header = ["arm", "precision", *_batch_names(study)]
    accuracy_rows = [row(arm, precision, lambda cell: str(found.get(cell, ""))) for arm, precision in _lines(study)]
    rate_rows = [row(arm, precision, rate) for arm, precision in _lines(study)]
    num_seeds = len(study.seeds)
    return "\n\n".join(
        [
            f"Test accuracy in %, mean ± standard deviation of {num_seeds} seeds; runs that diverged count as chance:",
            markdown_table(header, accuracy_rows),
            "Differences of test accuracy in points, ± standard error of the difference:",
            markdown_table(["difference", "precision", *_batch_names(study)], _difference_rows(study, found)),
            "Learning rate, chosen by validation loss:",
            markdown_table(header, rate_rows),
        ]
    )


def _difference_rows(study: Study, found: dict[Cell, Accuracy]) -> list[list[str]]:
    def cell(arm: str, precision: str, size: int) -> Accuracy | None:
        return found.get(Cell(arm=arm, precision=precision, batch_size=size))

    def row(name: str, one: tuple[str, str], other: tuple[str, str], precision: str) -> list[str]:
        pairs = [(cell(*one, size), cell(*other, size)) for size in study.batch_sizes]
        return [name, precision, *(str(Difference.of(a, b)) if a and b else "" for a, b in pairs)]

    arms = list(study.arms)
    main = study.main_arms
    rows = [
        row(f"{one} - {other}", (one, precision), (other, precision), precision)
        for index, one in enumerate(main)
        for other in main[:index]
        for precision in study.precisions
    ]
    precisions = list(study.precisions)
    rows += [
        row(arm, (arm, one), (arm, precisions[0]), f"{one} - {precisions[0]}") for arm in main for one in precisions[1:]
    ]
    rows += [
        row(f"{arm} - {main[-1]}", (arm, precision), (main[-1], precision), precision)
        for arm in arms
        if arm not in main
        for precision in study.arms[arm].precisions or ()
    ]
    return [line for line in rows if any(line[2:])]


def picture(study: Study, log: TrialLog) -> Figure:
    """Draw a panel per precision, a line per arm; bars are standard deviations. One more panel for ablations."""
    found = accuracies(study, log)
    main = study.main_arms
    others = [arm for arm in study.arms if arm not in main]
    panels = [(precision, main, precision) for precision in study.precisions]
    if others:
        where = (study.arms[others[0]].precisions or tuple(study.precisions))[0]
        panels.append((where, [main[-1], *others], f"{main[-1]}, {where}: one part taken out"))
    figure = Figure(figsize=(5 * len(panels), 4.6), layout="constrained")
    figure.suptitle(study.title)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (precision, arms, title) in zip(all_axes, panels, strict=True):
        for place, arm in enumerate(arms):
            cells = [Cell(arm=arm, precision=precision, batch_size=size) for size in study.batch_sizes]
            cells = [cell for cell in cells if cell in found]
            if not cells:
                continue
            x = [cell.batch_size * 1.03 ** (place - len(arms) / 2) for cell in cells]  # bars side by side
            y = [100 * found[cell].mean for cell in cells]
            error = [100 * found[cell].deviation for cell in cells]
            axes.errorbar(x, y, yerr=error, marker="o", markersize=4, capsize=3, label=arm, color=f"C{place}")
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(study.batch_sizes, list(map(str, study.batch_sizes)))
        axes.set_xlabel("batch, images per step")
        axes.grid(alpha=0.3)
        if axes.containers:
            axes.legend(fontsize=8)
    all_axes[0].set_ylabel(f"test accuracy, %; mean, deviation of {len(study.seeds)} seeds")
    return figure


def write_study(folder: Path, study: Study, log: TrialLog, *, environment: dict[str, Any]) -> None:
    """Write `table.md`, `accuracy.png` and `environment.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(f"{study.title}\n\n{markdown(study, log)}\n")
    write_json(folder / "environment.json", environment)
    picture(study, log).savefig(folder / "accuracy.png", dpi=100)
