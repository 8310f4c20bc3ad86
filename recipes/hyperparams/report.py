"""Result of a search: a table of all trials, best first, and a picture of each round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from lightning_hybrid.callbacks.run_report.figure import MUTED, SERIES, Panel, write_svg
from recipes.cli.markdown import markdown_table
from recipes.hyperparams.coarse_to_fine import Axis, axis_values_of
from recipes.hyperparams.trial_log import Mode, TrialOutcome, best_of, rank_of


def markdown(rounds: Sequence[Sequence[TrialOutcome]], axes: Sequence[Axis], *, objective: str, mode: Mode) -> str:
    """Format a row for each trial, best first; a trial of several rounds stands under its first."""
    keys = [axis.key for axis in axes]
    first_round: dict[str, int] = {}
    outcomes: dict[str, TrialOutcome] = {}
    for number, found in enumerate(rounds, start=1):
        for outcome in found:
            first_round.setdefault(outcome.key, number)
            outcomes[outcome.key] = outcome
    rows = []
    for place, outcome in enumerate(sorted(outcomes.values(), key=lambda o: rank_of(o, mode=mode)), start=1):
        point = axis_values_of(outcome.overrides, keys)
        value = "" if outcome.value is None else f"{outcome.value:.5g}"
        rows.append(
            [
                str(place),
                *(f"{point[key]:.6g}" for key in keys),
                value,
                outcome.status,
                str(first_round[outcome.key]),
                f"{outcome.wall_s:.1f}",
                outcome.reason,
            ]
        )
    return markdown_table(["rank", *keys, objective, "status", "round", "s", "reason"], rows)


def edges(rounds: Sequence[Sequence[TrialOutcome]], axes: Sequence[Axis], *, mode: Mode) -> list[str]:
    """Return the keys whose best value lies at an end of the range, or beyond it: the range should be wider."""
    best = best_of([outcome for found in rounds for outcome in found], mode=mode)
    if best is None:
        return []
    point = axis_values_of(best.overrides, [axis.key for axis in axes])
    return [axis.key for axis in axes if axis.is_edge(point[axis.key])]


def panels_of(
    rounds: Sequence[Sequence[TrialOutcome]], axes: Sequence[Axis], *, objective: str, mode: Mode
) -> list[Panel]:
    """Return a panel for each round and axis: objective against value; a cross at the top: no value."""
    return [
        (partial(_draw, f"Round {number}, {axis.key}", found, axis, objective, mode), 220)
        for number, found in enumerate([found for found in rounds if found] or [[]], start=1)
        for axis in axes
    ]


def _draw(title: str, found: Sequence[TrialOutcome], axis: Axis, objective: str, mode: Mode, panel: Axes) -> None:
    def x_of(outcome: TrialOutcome) -> float:
        return axis_values_of(outcome.overrides, [axis.key])[axis.key]

    for status, style in (("done", "o"), ("stopped", "v")):
        some = [(x_of(o), o.value) for o in found if o.status == status and o.value is not None]
        panel.plot([x for x, _ in some], [value for _, value in some], style, color=SERIES[0])
    best = best_of(found, mode=mode)
    if best is not None and best.value is not None:
        panel.plot([x_of(best)], [best.value], "*", markersize=13, color=SERIES[1])
        title += f": best at {x_of(best):.3g}"
    lost = [outcome for outcome in found if outcome.status in ("diverged", "failed")]
    panel.plot([x_of(o) for o in lost], [0.95] * len(lost), "x", color=MUTED, transform=panel.get_xaxis_transform())
    if axis.scale == "log":
        panel.set_xscale("log")
    values = [o.value for o in found if o.value is not None and math.isfinite(o.value)]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        panel.set_yscale("log")
    panel.set_title(title)
    panel.set_ylabel(objective)
    panel.set_xlabel(f"{axis.key}; triangle: stopped; cross: lost")


def write_search(
    folder: Path,
    rounds: Sequence[Sequence[TrialOutcome]],
    axes: Sequence[Axis],
    *,
    objective: str,
    mode: Mode,
) -> None:
    """Write `table.md` and `search.svg` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(markdown(rounds, axes, objective=objective, mode=mode) + "\n")
    write_svg(folder / "search.svg", panels_of(rounds, axes, objective=objective, mode=mode))
