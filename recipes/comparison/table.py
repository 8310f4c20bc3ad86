"""Result table of a study, with accuracies and paired differences between variants."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from lightning_hybrid.formatting import markdown_table
from recipes.comparison.arms import Cell, StudyPlan
from recipes.comparison.journal import CellResult
from recipes.comparison.paired import Interval, paired_difference, verdict

HEADER = [
    "arm",
    "images per update",
    "updates",
    "chosen",
    "test accuracy, %",
    "difference from base",
    "difference from `like`",
]


def table_of(plan: StudyPlan, tested: Mapping[Cell, CellResult]) -> str:
    """Format the results of all finished variants as a Markdown table with an explanation."""
    rows = []
    for cell, result in tested.items():
        like = plan.like(cell)
        rows.append(
            [
                f"`{cell.arm}`",
                f"{plan.global_batch_size(cell, plan.testing.num_images):,} ({100 * cell.share:.3g} %)",
                f"{result.num_steps:,}",
                ", ".join(f"{axis} {value:g}" for axis, value in result.point.items()),
                _accuracy(result),
                _difference(plan, tested, cell, plan.base_cell),
                "" if like is None else _difference(plan, tested, cell, like),
            ]
        )
    words = (
        f"The test accuracy of the final weights is given as mean ± standard deviation over {len(plan.testing.seeds)} "
        "seeds. Runs that diverged count as guessing. Differences are in percentage points, paired by seed, with 90 % "
        f"intervals. The reference is `{plan.base}`, or the variant that differs in one component, at the same batch "
        f"size. A difference is equal if its interval is within ± {plan.margin:g} points (two one-sided tests), better "
        "or worse if the interval does not contain zero, and open otherwise."
    )
    return f"{words}\n\n{markdown_table(HEADER, rows)}"


def _accuracy(result: CellResult) -> str:
    values = list(result.accuracies.values())
    text = f"{statistics.mean(values):.2f}"
    if len(values) > 1:
        text = f"{text} ± {statistics.stdev(values):.2f}"
    if result.num_diverged:
        text = f"{text}, {result.num_diverged} of {len(values)} diverged"
    return text


def _difference(
    plan: StudyPlan, tested: Mapping[Cell, CellResult], cell: Cell, reference: Cell
) -> str:
    if cell == reference or reference not in tested:
        return ""
    difference = paired_difference(tested[cell].accuracies, tested[reference].accuracies)
    if difference is None:
        return ""
    return f"{_interval(difference)} {verdict(difference, plan.margin)}"


def _interval(difference: Interval) -> str:
    if difference.half == float("inf"):
        return f"{difference.mean:+.2f} (one seed)"
    return f"{difference.mean:+.2f} ± {difference.half:.2f}"
