"""Plots and HTML page of a run, created from its curves and its summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report import html_page
from lightning_hybrid.callbacks.run_report.curve import finite_values
from lightning_hybrid.callbacks.run_report.figure import FAINT, SERIES, Panel, in_units
from lightning_hybrid.comm.stats.summary import BucketSummary, CommSummary

Points = Sequence[tuple[int, float]]
Curves = Mapping[str, Points]

MOST_BARS = 12
"""Maximum number of buckets in the picture.

If there are more buckets, those with the longest exposed times are shown.
"""


def _last(curve: Points) -> float:
    return curve[-1][1]


def _largest(curve: Points) -> float:
    """Return the largest finite value of a curve, or nan if there is none."""
    return max(finite_values(curve), default=math.nan)


@dataclass(frozen=True, kw_only=True)
class CurvePanel:
    """Definition of a plot of one or more metrics, with a statistic in its title.

    Attributes:
        title: Title, as a format string for the statistic.
        metrics: Labels of the metrics, by name. The label `_` is not shown.
        statistic: Function that computes the number in the title from the curve of the first
            metric that was measured.
        unit: Unit of the y-axis.
        factor: Factor that converts the logged values to `unit`.
        log_base: Base of a logarithmic y-axis, or 0 for a linear one.
    """

    title: str
    metrics: Mapping[str, str]
    statistic: Callable[[Points], float] = _last
    unit: str = ""
    factor: float = 1.0
    log_base: int = 0


CURVE_PANELS = (
    CurvePanel(
        title="Loss: {:.3g} at the end",
        metrics={m.TRAIN_LOSS: "training", m.VAL_LOSS: "validation"},
    ),
    CurvePanel(
        title="Accuracy: {:.2%} at best",
        metrics={m.VAL_ACC: "validation", m.TEST_ACC: "test"},
        statistic=_largest,
        unit="%",
        factor=100.0,
    ),
    CurvePanel(
        title="Learning rate: {:.3g} at most",
        metrics={m.TRAIN_LR: "_"},
        statistic=_largest,
    ),
    CurvePanel(
        title="Loss scale: {:,.0f} at the end",
        metrics={m.TRAIN_LOSS_SCALE: "_"},
        log_base=2,
    ),
    CurvePanel(
        title="Waiting for gradients, share of each logged step",
        metrics={m.COMM_EXPOSED_SHARE: "_"},
        unit="%",
        factor=100.0,
    ),
    CurvePanel(
        title="Waiting for the slowest rank: {:.1%} of a step at most",
        metrics={m.STRAGGLER_COST_SHARE: "for a rank", m.STRAGGLER_WAIT_SHARE: "for the network"},
        statistic=_largest,
        unit="%",
        factor=100.0,
    ),
    CurvePanel(
        title="Phases of the slowest rank, beyond those of the median",
        metrics={name: phase for phase, name in m.STRAGGLER_EXCESS_S.items()},
        unit="s",
    ),
)


def panels_of(curves: Curves, comm: CommSummary | None) -> list[Panel]:
    """Return a panel for each group of metrics that was measured, and one for gradient buckets."""
    panels: list[Panel] = []
    for curve_panel in CURVE_PANELS:
        lines = {}
        for name, label in curve_panel.metrics.items():
            if curves.get(name):
                lines[label] = curves[name]
        if lines:
            first_line = next(iter(lines.values()))
            number = curve_panel.statistic(first_line)
            title = curve_panel.title.format(number)
            panels.append((partial(_draw_curves, curve_panel, title, lines), 220))

    buckets = _timed_buckets(comm)
    if buckets:
        num_bars = min(len(buckets), MOST_BARS)
        panels.append((partial(_draw_buckets, buckets), 100 + 20 * num_bars))
    return panels


def _draw_curves(panel: CurvePanel, title: str, lines: Curves, axes: Axes) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    for label, points in lines.items():
        steps = tuple(step for step, _ in points)
        # A curve has a gap where its value is inf or nan.
        values = [panel.factor * value if math.isfinite(value) else math.nan for _, value in points]
        marker = "o" if len(steps) < 40 else ""
        axes.plot(steps, values, marker=marker, label=label)
    if panel.log_base:
        axes.set_yscale("log", base=panel.log_base)
    elif "_" in lines:
        axes.set_ylim(bottom=0)
    in_units(axes, x="", y=panel.unit)


@dataclass(frozen=True)
class _TimedBucket:
    """Gradient bucket with its mean exposed time and mean time in flight, in seconds per step."""

    bucket: BucketSummary
    exposed_s: float
    in_flight_s: float


def _timed_buckets(comm: CommSummary | None) -> list[_TimedBucket]:
    """Return the gradient buckets for which times were measured.

    Buckets of the first step are left out, because DDP rebuilds its buckets after this step.
    """
    buckets = () if comm is None else comm.buckets
    most_times = max((bucket.num_times for bucket in buckets), default=0)
    timed = []
    for bucket in buckets:
        is_of_first_step = 10 * bucket.num_times <= most_times
        if is_of_first_step or bucket.exposed_s is None or bucket.in_flight_s is None:
            continue
        exposed_s = bucket.exposed_s / bucket.num_times
        in_flight_s = bucket.in_flight_s / bucket.num_times
        timed.append(_TimedBucket(bucket, exposed_s, in_flight_s))
    return timed


def _draw_buckets(buckets: Sequence[_TimedBucket], axes: Axes) -> None:
    """Draw a bar chart of the gradient buckets with the longest exposed times.

    The bars are in the order in which the buckets are reduced.
    """
    longest = sorted(buckets, key=lambda timed: -timed.exposed_s)
    shown = [timed for timed in buckets if timed in longest[:MOST_BARS]]
    wait = html_page.format_value(longest[0].exposed_s, "s")
    axes.set_title(f"Bucket {longest[0].bucket.index} has the longest mean wait: {wait}")

    positions = [-index for index in range(len(shown))]
    axes.barh(positions, [timed.in_flight_s for timed in shown], color=FAINT)
    axes.barh(positions, [timed.exposed_s for timed in shown], height=0.4, color=SERIES[0])
    labels = []
    for timed in shown:
        labels.append(f"{timed.bucket.index}: {timed.bucket.num_bytes / 2**20:.2g} MiB")
    axes.set_yticks(positions, labels)
    axes.grid(axis="y", visible=False)

    legend = "gray: in flight; blue: waited for"
    if len(shown) < len(buckets):
        legend += "; the longest"
    axes.set_xlabel(legend)
    in_units(axes, x="s")


SHOWN_ABOVE = (m.IMAGES_PER_S, m.COMM_EXPOSED_S, m.COMM_EXPOSED_SHARE, m.TRAIN_SKIPPED_STEPS)
"""Metrics that the page's first table shows as one figure for the whole run, instead of the last logged value."""


def html_of(
    summary: Mapping[str, Any], panels: Sequence[Panel], findings: Mapping[str, tuple[bool, str]]
) -> str:
    """Render the HTML report of a run.

    Args:
        summary: Content of `summary.json`.
        panels: Panels of the plots.
        findings: Main results as `{name: (is good, text)}`.
    """
    good_rows = []
    other_rows = []
    for name, (is_good, text) in findings.items():
        if is_good:
            good_rows.append(("✓", name, html_page.Good(text)))
        else:
            other_rows.append(("", name, text))

    environment = [("folder", summary["run_dir"])]
    for name, value in summary["environment"].items():
        if value is not None:
            environment.append((name, value))

    plan = None
    if summary["communication"] is not None:
        plan = summary["communication_plan"]
    return html_page.render(
        html_page.TEMPLATES / "run.html",
        title=f"Run {Path(summary['run_dir']).name}",
        findings=[*good_rows, *other_rows],
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
    """Return a table row for each metric, with its name, last value, best value and meaning.

    Metrics in the first table of the page are left out.
    """
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
