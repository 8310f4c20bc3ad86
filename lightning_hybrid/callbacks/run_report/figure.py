"""The picture and the page of a run, from its curves and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_hybrid.callbacks import comm_report
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report import html_page
from lightning_hybrid.comm.stats.summary import CommSummary

Curves = Mapping[str, Sequence[tuple[int, float]]]


def figure_of(curves: Curves, comm: CommSummary | None, lines: Sequence[str]) -> Figure:
    """Draw six panels, and lines of text under them."""
    figure = Figure(figsize=(15, 9), layout="constrained")
    panels, text = figure.subfigures(2, 1, height_ratios=(5, 1))  # type: ignore[misc]
    loss, accuracy, rate, scale, share, buckets = panels.subplots(2, 3).flat
    _draw(curves, loss, "loss", (m.TRAIN_LOSS, m.VAL_LOSS))
    _draw(curves, accuracy, "accuracy", (m.VAL_ACC, m.VAL_ACC_TOP5, m.TEST_ACC))
    _draw(curves, rate, "learning rate", (m.TRAIN_LR,))
    _draw(curves, scale, "loss scale", (m.TRAIN_LOSS_SCALE,))
    if m.TRAIN_LOSS_SCALE in curves:
        scale.set_yscale("log", base=2)
    _draw(curves, share, "exposed communication, share of step", (m.COMM_EXPOSED_SHARE,))
    share.set_ylim(bottom=0)
    comm_report.draw_buckets(buckets, comm)
    text.text(0.03, 0.95, "\n".join(lines), family="monospace", va="top")
    return figure


def _draw(curves: Curves, axes: Axes, title: str, names: tuple[str, ...]) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    drawn = [name for name in names if curves.get(name)]
    for name in drawn:
        steps, values = zip(*curves[name], strict=True)
        axes.plot(steps, values, marker="o" if len(steps) < 40 else "", markersize=3, label=name)
    if drawn:
        axes.grid(alpha=0.3)
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not measured in this run", ha="center", va="center", transform=axes.transAxes)


def html_of(summary: Mapping[str, Any], png: bytes, lines: Sequence[str]) -> str:
    """Return the page of a run. `summary` is what `summary.json` holds, `lines` the table as text."""
    rows = [(name, value) for name, _, value in (line.partition("  ") for line in lines)]
    sections = [html_page.table(["", ""], [(name, value.strip()) for name, value in rows])]
    sections.append(html_page.png_picture(png, alt="loss, accuracy, learning rate, loss scale, communication"))
    sections.append(html_page.section("Metrics", _metrics(summary)))
    sections.append(html_page.section("Communication", _communication(summary)))
    overrides = summary["overrides"]
    words = "not given" if overrides is None else " ".join(overrides) or "none"
    sections.append(html_page.section("Overrides of the configuration", html_page.paragraph(words)))
    sections.append(html_page.section("Environment", html_page.table(["", ""], summary["environment"].items())))
    config = html_page.flatten(summary["config"] or {})
    shown = html_page.table(["key", "value"], config.items()) if config else html_page.paragraph("not given")
    sections.append(html_page.section("Configuration", shown, is_open=False))
    return html_page.page(f"Run {summary['run_dir']}", sections)


def _metrics(summary: Mapping[str, Any]) -> str:
    rows = []
    for name, value in summary["metrics"].items():
        known = m.metric_of(name)
        best = summary["best"].get(name)
        unit, meaning = ("", "") if known is None else (known.unit, known.meaning)
        rows.append((name, value, best, unit, meaning))
    return html_page.table(["metric", "last", "best", "unit", "meaning"], rows)


def _communication(summary: Mapping[str, Any]) -> str:
    comm = summary["communication"]
    if comm is None:
        return html_page.paragraph("The strategy has no counters.")
    plan = summary["communication_plan"]
    parts = [] if plan is None else [html_page.paragraph(plan)]
    totals = [(name, value) for name, value in comm.items() if name != "per_bucket"]
    parts.append(html_page.table(["of all steps (bytes, seconds)", ""], totals))
    if comm["per_bucket"]:
        parts.append(html_page.table(list(comm["per_bucket"][0]), [bucket.values() for bucket in comm["per_bucket"]]))
    return "\n".join(parts)
