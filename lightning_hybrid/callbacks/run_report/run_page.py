"""The pictures and the page of a run, from its curves and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report import html_page
from lightning_hybrid.callbacks.run_report.figure import FAINT, SERIES, Panel, in_units
from lightning_hybrid.comm.stats.summary import CommSummary

Curves = Mapping[str, Sequence[tuple[int, float]]]
MOST_BARS = 12  # of buckets; where there are more, those that were exposed longest


def _last(values: Sequence[float]) -> float:
    return values[-1]


# Title with what it says of the first metric that was measured; metrics with their names; unit, factor, log base.
PANELS: tuple[tuple[str, Any, dict[str, str], str, float, int], ...] = (
    ("Loss: {:.3g} at the end", _last, {m.TRAIN_LOSS: "training", m.VAL_LOSS: "validation"}, "", 1.0, 0),
    ("Accuracy: {:.2%} at best", max, {m.VAL_ACC: "validation", m.TEST_ACC: "test"}, "%", 100.0, 0),
    ("Learning rate: {:.3g} at most", max, {m.TRAIN_LR: "_"}, "", 1.0, 0),
    ("Loss scale: {:,.0f} at the end", _last, {m.TRAIN_LOSS_SCALE: "_"}, "", 1.0, 2),
    ("Waiting for gradients, share of each logged step", _last, {m.COMM_EXPOSED_SHARE: "_"}, "%", 100.0, 0),
)  # fmt: skip


def panels_of(curves: Curves, comm: CommSummary | None) -> list[Panel]:
    """Return a panel for each thing that was measured, its title what it shows."""
    panels = list[Panel]()
    for title, statistic, names, unit, factor, log_base in PANELS:
        lines = {words: curves[name] for name, words in names.items() if curves.get(name)}
        if lines:
            found = statistic([value for _, value in next(iter(lines.values()))])
            panels.append((partial(_draw, title.format(found), lines, unit, factor, log_base), 220))
    return panels + _buckets(comm)


def _draw(
    title: str, lines: Mapping[str, Any], unit: str, factor: float, log_base: int, axes: Axes
) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    for words, points in lines.items():
        steps, values = zip(*points, strict=True)
        marker = "o" if len(steps) < 40 else ""
        axes.plot(steps, [factor * value for value in values], marker=marker, label=words)
    if log_base:
        axes.set_yscale("log", base=log_base)
    elif "_" in lines:
        axes.set_ylim(bottom=0)
    in_units(axes, x="", y=unit)


def _buckets(comm: CommSummary | None) -> list[Panel]:
    # DDP makes its buckets again after its first step: those of the first step alone are left out.
    buckets = () if comm is None else comm.buckets
    most_times = max((bucket.num_times for bucket in buckets), default=0)
    timed = [
        (bucket, bucket.exposed_s / bucket.num_times, bucket.in_flight_s / bucket.num_times)
        for bucket in buckets
        if 10 * bucket.num_times > most_times
        and bucket.exposed_s is not None
        and bucket.in_flight_s is not None
    ]
    longest = sorted(timed, key=lambda each: -each[1])
    shown = [each for each in timed if each in longest[:MOST_BARS]]

    def draw(axes: Axes) -> None:
        bucket, exposed_s, _ = longest[0]
        axes.set_title(
            f"Bucket {bucket.index} is waited for longest: {html_page.format_value(exposed_s, 's')}, mean"
        )
        places = [-place for place in range(len(shown))]
        axes.barh(places, [in_flight_s for _, _, in_flight_s in shown], color=FAINT)
        axes.barh(places, [exposed_s for _, exposed_s, _ in shown], height=0.4, color=SERIES[0])
        axes.set_yticks(
            places, [f"{bucket.index}: {bucket.num_bytes / 2**20:.2g} MiB" for bucket, *_ in shown]
        )
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(
            "grey: in flight; blue: waited for"
            + ("" if len(shown) == len(timed) else "; the longest")
        )
        in_units(axes, x="s")

    return [(draw, 100 + 20 * len(shown))] if timed else []


SHOWN_ABOVE = (m.IMAGES_PER_S, m.COMM_EXPOSED_S, m.COMM_EXPOSED_SHARE, m.TRAIN_SKIPPED_STEPS)
"""Metrics of which the page shows one figure for the whole run, in its first table, and not the last one logged."""


def html_of(
    summary: Mapping[str, Any], panels: Sequence[Panel], findings: Mapping[str, tuple[bool, str]]
) -> str:
    """Return the page of a run.

    Args:
        summary: Content of `summary.json`.
        panels: Pictures.
        findings: By name whether a result is good, and the result as text.
    """
    good = [
        ("✓", name, html_page.Good(text)) for name, (is_good, text) in findings.items() if is_good
    ]
    others = [("", name, text) for name, (is_good, text) in findings.items() if not is_good]
    environment = [("folder", summary["run_dir"])]
    environment += [
        (name, value) for name, value in summary["environment"].items() if value is not None
    ]
    plan = summary["communication_plan"] if summary["communication"] is not None else None
    return html_page.render(
        html_page.TEMPLATES / "run.html",
        title=f"Run {Path(summary['run_dir']).name}",
        findings=[*good, *others],
        plan=plan,
        pictures=html_page.pictures(panels),
        metrics=_metric_rows(summary["metrics"], summary["best"]),
        overrides=summary["overrides"],
        environment=environment,
        config=html_page.flatten(summary["config"] or {}),
    )


def _metric_rows(
    last: Mapping[str, float], best: Mapping[str, float]
) -> list[tuple[str, str, str, str]]:
    """Return name, last value, best value and meaning of each metric that is not shown above."""
    rows = []
    for name, value in last.items():
        if name.startswith(SHOWN_ABOVE):
            continue
        metric = m.metric_of(name)
        unit = "1"
        meaning = ""
        if metric is not None:
            unit = metric.unit
            meaning = metric.meaning
        last_text = html_page.format_value(value, unit)
        best_text = html_page.format_value(best.get(name), unit)
        rows.append((name, last_text, best_text, meaning))
    return rows
