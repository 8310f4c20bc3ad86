"""Tables and picture of a study: accuracies, paired differences with their intervals, chosen points."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from scipy.stats import t as student

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report.figure import FAINT, MUTED, SERIES, Panel, write_svg
from recipes.cli.markdown import markdown_table
from recipes.cli.results import write_json
from recipes.hyperparams.study import Cell, Study
from recipes.hyperparams.trial_log import TrialLog, TrialOutcome, is_at_chance

TEST_ACC = "test/acc"
RUNNING_ACC = "test/acc_running"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Mean of a sample and its 90 % interval, by Student's t.

        mean ± t(0.95, n - 1) * s / sqrt(n)

    Attributes:
        mean: Mean.
        half: Half the length of the interval; nan for fewer than two values.
        num: Number of values.
    """

    mean: float
    half: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Make it from a sample.

        >>> print(Interval.of([0.9, 0.8, 0.7]))
        80.0 ± 16.9
        """
        half = float("nan")
        if len(values) > 1:
            half = float(student.ppf(0.95, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
        return cls(mean=statistics.mean(values), half=half, num=len(values))

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} ± {100 * self.half:.1f}"

    def verdict(self, margin: float) -> str:
        """Say what a paired difference shows: two one-sided tests (TOST) at 5 % each, and the sign.

        >>> [Interval(mean=mean, half=0.002, num=10).verdict(0.005) for mean in (0.001, -0.02)]
        ['equal', 'worse']
        >>> Interval(mean=0.0, half=0.02, num=10).verdict(0.005)
        'open'
        """
        low, high = self.mean - self.half, self.mean + self.half
        if -margin < low and high < margin:
            return "equal"
        if low > 0:
            return "better"
        return "worse" if high < 0 else "open"


def accuracies_by_seed(
    outcomes: Mapping[int, TrialOutcome], *, chance: float, metric: str = TEST_ACC
) -> dict[int, float]:
    """Return the test accuracy of each seed; runs that diverged or failed count as chance."""
    return {seed: one.metrics[metric] if one.status == "done" else chance for seed, one in outcomes.items()}


def complete(study: Study, log: TrialLog, metric: str = TEST_ACC) -> dict[Cell, dict[int, float]]:
    """Return the accuracies of every cell whose tests have all ended, by seed."""
    results = {cell: study.results(cell, log) for cell in study.cells}
    return {
        cell: accuracies_by_seed(outcomes, chance=study.chance, metric=metric)
        for cell, outcomes in results.items()
        if len(outcomes) == len(study.seeds)
    }


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """Return the interval of the differences of two cells, seed by seed.

    >>> print(paired({1: 0.9, 2: 0.8}, {1: 0.8, 2: 0.7}))
    10.0 ± 0.0
    """
    return Interval.of([one[seed] - other[seed] for seed in one])


def _lines(study: Study) -> list[tuple[str, str]]:
    """Return arm and precision of each line, in the order of the configuration."""
    there = {(cell.arm, cell.precision) for cell in study.cells}
    return [(arm, precision) for arm in study.arms for precision in study.precisions if (arm, precision) in there]


def markdown(study: Study, log: TrialLog) -> str:
    """Format accuracies with both kinds of statistics, paired differences, and the chosen points."""
    found, running = complete(study, log), complete(study, log, RUNNING_ACC)
    header = ["arm", "precision", *(f"{size} ({100 * size / study.num_train:.3g} %)" for size in study.batch_sizes)]

    def table(text: Any) -> str:
        rows = [
            [arm, precision, *(text(Cell(arm=arm, precision=precision, batch_size=size)) for size in study.batch_sizes)]
            for arm, precision in _lines(study)
        ]
        return markdown_table(header, [row for row in rows if any(row[2:])])

    def accuracy(cell: Cell) -> str:
        if cell not in found:
            return ""
        lost = sum(is_at_chance(value, study.chance) for value in found[cell].values())
        text = f"{Interval.of(list(found[cell].values()))} ({100 * statistics.mean(running[cell].values()):.1f})"
        return text + (f", {lost} of {len(study.seeds)} lost" if lost else "")

    def difference(cell: Cell, other: Cell) -> str:
        if cell == other or cell not in found or other not in found:
            return ""
        interval = paired(found[cell], found[other])
        return f"{100 * interval.mean:+.1f} ± {100 * interval.half:.1f} {interval.verdict(study.margin)}"

    def to_reference(cell: Cell) -> str:
        arm, precision = study.reference
        return difference(cell, Cell(arm=arm, precision=precision, batch_size=study.smallest))

    def to_reference_arm(cell: Cell) -> str:
        return difference(cell, Cell(arm=study.reference[0], precision=cell.precision, batch_size=cell.batch_size))

    def to_source(cell: Cell) -> str:
        arm = study.arms[cell.arm]
        return (
            difference(cell, Cell(arm=arm.like, precision=cell.precision, batch_size=cell.batch_size))
            if arm.like
            else ""
        )

    def point(cell: Cell) -> str:
        values = study.chosen_point(cell, log) if cell in found else None
        return "" if values is None else ", ".join(f"{name} {value:.3g}" for name, value in values.items())

    def rounding(cell: Cell) -> str:
        metrics = [one.metrics for one in study.results(cell, log).values()] if cell in found else []
        errors = [one[m.COMM_QUANTISATION_NMSE] for one in metrics if m.COMM_QUANTISATION_NMSE in one]
        return f"{statistics.median(errors):.2g} ({min(errors):.2g} to {max(errors):.2g})" if errors else ""

    def skipped(cell: Cell) -> str:
        metrics = [one.metrics for one in study.results(cell, log).values()] if cell in found else []
        return ", ".join(f"{one[m.TRAIN_SKIPPED_STEPS]:.0f}" for one in metrics if m.TRAIN_SKIPPED_STEPS in one)

    reference = f"`{study.reference[0]}` in {study.reference[1]} at {study.smallest} images"
    margin = f"{100 * study.margin:g} points"
    parts = [
        f"Test accuracy in %, mean ± half of the 90 % interval over {len(study.seeds)} seeds, BatchNorm statistics "
        "of the final weights; in brackets the mean with running statistics. Runs that diverged count as "
        "chance; lost are those, and those that ended at chance:",
        table(accuracy),
        f"Paired differences to {reference}, in points, with their 90 % intervals; `equal`: the interval is within "
        f"± {margin} (TOST); `better`, `worse`: it does not hold zero; `open`: neither:",
        table(to_reference),
        f"Paired differences to `{study.reference[0]}` at the same batch and precision:",
        table(to_reference_arm),
    ]
    if any(arm.like for arm in study.arms.values()):
        parts += ["One part changed, paired differences to the arm that it is taken from:", table(to_source)]
    if any(map(rounding, study.cells)):
        parts += [
            "Error of what was rounded between nodes, as a part of its sum of squares: median over a run's windows, of "
            "it the median over seeds, the least and the most:",
            table(rounding),
            "Skipped steps, by seed:",
            table(skipped),
        ]
    return "\n\n".join([*parts, "Chosen points:", table(point)])


def panels_of(study: Study, log: TrialLog) -> list[Panel]:
    """Return a panel for each batch: how far each arm is from the reference, paired by seed, with the margin."""
    found, panels = complete(study, log), list[Panel]()
    reference = found.get(Cell(arm=study.reference[0], precision=study.reference[1], batch_size=study.smallest))
    for size in study.batch_sizes if reference else ():
        cells = [cell for cell in found if cell.batch_size == size and study.arms[cell.arm].like is None]
        if cells:
            pairs = [(f"{cell.arm}, {cell.precision}", paired(found[cell], reference or {})) for cell in cells]
            lines = [(name, interval) for name, interval in pairs if interval.mean or interval.half]  # not itself
            updates = max(o.metrics.get("num_steps", 1) for cell in cells for o in study.results(cell, log).values())
            num_equal = sum(interval.verdict(study.margin) in ("equal", "better") for _, interval in lines)
            title = f"{100 * size / study.num_train:.3g} % of the set in one update, {updates:,.0f} updates: "
            title += f"{num_equal} of {len(lines)} equal the small batch"
            panels += [(partial(_draw, study, title, lines), 100 + 22 * len(lines))] if lines else []
    return panels


def _draw(study: Study, title: str, lines: Sequence[tuple[str, Interval]], axes: Axes) -> None:
    axes.set_title(title)
    axes.axvspan(-100 * study.margin, 100 * study.margin, color=FAINT, alpha=0.5)
    for place, (_, interval) in enumerate(lines):
        colour = {"worse": SERIES[1], "open": MUTED}.get(interval.verdict(study.margin), SERIES[0])
        middle, half = 100 * interval.mean, 100 * interval.half
        axes.plot([middle - half, middle + half], [-place, -place], color=colour)
        axes.plot([middle], [-place], "o", color=colour)
    axes.set_yticks([-place for place in range(len(lines))], [name for name, _ in lines])
    axes.set_ylim(0.6 - len(lines), 0.6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -300 * study.margin), max(high, 300 * study.margin))  # the margin shows what is noise
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel(f"points from {study.reference[0]} at {study.smallest} images\n90 % interval; grey: equal")


def write_study(folder: Path, study: Study, log: TrialLog, *, environment: dict[str, Any]) -> None:
    """Write `table.md`, `accuracy.svg` and `environment.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(f"{study.title}\n\n{markdown(study, log)}\n")
    write_json(folder / "environment.json", environment)
    write_svg(folder / "accuracy.svg", panels_of(study, log))
