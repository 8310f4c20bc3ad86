"""Report of a benchmark: a table, a figure and a JSON file of all measurements."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lightning_hybrid.callbacks.run_report.figure import (
    INK,
    MUTED,
    SERIES,
    Panel,
    in_units,
    write_svg,
)
from lightning_hybrid.formatting import markdown_table, size, time_text
from recipes.cli.results import environment

PEERS = ("ddp", "fp16_compress", "torch")  # variants that are not part of this library


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Timing results of one variant in one benchmark case.

    `section`: `allreduce`, `parts`, `step` or `overlap`. `case`: dtype or gradient set. `num_bytes`: size of the
    buffer, or of all gradients of a step, as it is sent. `times_s`: seconds of each sample on the slowest rank.
    `backward_s`: seconds that backward slept on purpose. `cpu_s`: total processor time of all ranks for each sample.
    `predicted_s`: the planner's prediction in seconds. `load_average`: load average over one minute on rank zero's
    machine when the row was finished.

    >>> row = Timing(section="step", case="x", arm="auto", num_bytes=100, num_nodes=2, times_s=(1.0, 9.0, 2.0))
    >>> row.median_s, row.bound_s(link_bytes_per_s=100.0)
    (2.0, 1.0)
    """

    section: str
    case: str
    arm: str
    num_bytes: int
    num_nodes: int
    times_s: tuple[float, ...]
    backward_s: float = 0.0
    cpu_s: tuple[float, ...] = ()
    predicted_s: float | None = None
    load_average: float | None = None

    @property
    def median_s(self) -> float:
        """Median of the samples in seconds."""
        return statistics.median(self.times_s)

    def bound_s(self, link_bytes_per_s: float | None) -> float | None:
        """Return a lower bound on the all-reduce time in seconds, given the link bandwidth of each node.

        Each of N nodes must send `2 (N - 1) / N` of the bytes: no all-reduce among the nodes' own processors sends less
        from its busiest node (Patarasuk & Yuan 2009). Headers are not included, so real times are longer than the
        bound. None if there is one node or the bandwidth is unknown.
        """
        if link_bytes_per_s is None or self.num_nodes == 1:
            return None
        return 2 * (self.num_nodes - 1) / self.num_nodes * self.num_bytes / link_bytes_per_s


def hidden_share(rows: Sequence[Timing]) -> float:
    """Return the fraction of communication time that an equally long backward pass hides.

        1 - (with_backward - with_backward_silent) / (without_backward - without_backward_silent)

    `rows`: steps without backward, without backward and silent, with backward, with backward and silent. Silent steps
    have no communication.

    >>> times_s = (3.0, 1.0, 3.5, 3.0)
    >>> rows = [Timing(section="overlap", case="", arm="", num_bytes=1, num_nodes=2, times_s=(t,)) for t in times_s]
    >>> hidden_share(rows)
    0.75
    """
    bare_s, silent_s, both_s, silent_both_s = (row.median_s for row in rows)
    return 1 - (both_s - silent_both_s) / (bare_s - silent_s)


# ---- table -----------------------------------------------------------------------------------------------------------

HEADER = (
    "case",
    "bytes",
    "arm",
    "median ms",
    "min ms",
    "max ms",
    "samples",
    "x reference",
    "x byte bound",
)
PARTS_HEADER = (*HEADER, "predicted ms", "x predicted", "CPU s")
"""Columns of a table with rows of the section `parts`. `CPU s` is the processor time of all ranks."""


def header(rows: Sequence[Timing]) -> tuple[str, ...]:
    """Return the column names of the result table for these timings."""
    if any(row.section == "parts" for row in rows):
        return PARTS_HEADER
    return HEADER


def cells(rows: Sequence[Timing], link_bytes_per_s: float | None) -> list[list[str]]:
    """Format each timing as a row of table cells.

    The reference of a case is its first row: torch's own all-reduce, or the first strategy.
    """
    num_columns = len(header(rows))
    references: dict[tuple[str, str, int], float] = {}
    table = []
    for row in rows:
        key = (row.section, row.case, row.num_bytes if row.section == "allreduce" else 0)
        # All-reduces are compared with the first one of the same size. Steps are compared with the first step, because
        # their number of bytes depends on the precision.
        reference_s = references.setdefault(key, row.median_s)
        bound_s = row.bound_s(link_bytes_per_s)
        times_ms = [1e3 * time_s for time_s in (row.median_s, min(row.times_s), max(row.times_s))]
        table.append(
            [
                f"{row.section} {row.case}",
                size(row.num_bytes),
                row.arm,
                *(f"{time_ms:.4g}" for time_ms in times_ms),
                str(len(row.times_s)),
                f"{reference_s / row.median_s:.2f}",
                "" if bound_s is None else f"{row.median_s / bound_s:.3f}",
                *_predicted_cells(row),
            ][:num_columns]
        )
    return table


def _predicted_cells(row: Timing) -> list[str]:
    predicted_ms = ""
    ratio = ""
    cpu_s = ""
    if row.predicted_s is not None:
        predicted_ms = f"{1e3 * row.predicted_s:.4g}"
        ratio = f"{row.median_s / row.predicted_s:.2f}"
    if row.cpu_s:
        cpu_s = f"{statistics.median(row.cpu_s):.3g}"
    return [predicted_ms, ratio, cpu_s]


WIDTHS = (32, 9, 24, 10, 10, 10, 8, 12, 13, 13, 12, 8)
"""Width in characters of each column of the table that is printed while the benchmark runs."""


def aligned(texts: Sequence[str]) -> str:
    """Format a row of cells with fixed column widths, so that rows printed one by one are aligned.

    Text is left-aligned, and numbers are right-aligned.

    >>> aligned(["step", "1 KiB", "ddp"])
    'step                                1 KiB  ddp'
    """
    columns = []
    for index, (text, width) in enumerate(zip(texts, WIDTHS, strict=False)):
        is_number = index == 1 or index > 2
        columns.append(text.rjust(width) if is_number else text.ljust(width))
    return "  ".join(columns).rstrip()


def markdown(rows: Sequence[Timing], link_bytes_per_s: float | None) -> str:
    """Format all timings as a Markdown table, followed by the share of communication time that backward hides."""
    text = [markdown_table(header(rows), cells(rows, link_bytes_per_s))]
    overlap = [row for row in rows if row.section == "overlap"]
    for of_case in (overlap[first : first + 4] for first in range(0, len(overlap), 4)):
        hidden = hidden_share(of_case)
        step = of_case[0].median_s
        silent = of_case[1].median_s
        text.append(
            f"\n{of_case[0].case}, {of_case[0].arm}: {hidden:.1%} of {1e3 * (step - silent):.4g} ms hidden"
        )
    return "\n".join(text)


# ---- figure ----------------------------------------------------------------------------------------------------------


def panels_of(rows: Sequence[Timing], link_bytes_per_s: float | None) -> list[Panel]:
    """Return one figure panel for each benchmark and case.

    All-reduce times are plotted against size, and step times are bars by strategy.
    """
    panels = list[Panel]()
    for section, case in dict.fromkeys((row.section, row.case) for row in rows):
        of_case = [row for row in rows if (row.section, row.case) == (section, case)]
        if len({row.num_bytes for row in of_case}) > 1 and section == "allreduce":
            title = f"All-reduce of {case} by size"
            panels.append((partial(_draw_sizes, title, of_case, link_bytes_per_s), 300))
        else:
            first = of_case[0]
            best = min(of_case, key=lambda row: row.median_s)
            share = best.median_s / first.median_s
            title = f"{section}, {case}: {best.arm} takes {share:.2f} of the time of {first.arm}"
            if section == "overlap" and len(of_case) == 4:
                title = (
                    f"{section}, {case}: {hidden_share(of_case):.0%} of the communication is hidden"
                )
            names = {row.arm: row.arm for row in of_case}
            panels.append(
                (
                    partial(draw_bars, title, of_case, names, link_bytes_per_s),
                    90 + 42 * len(of_case),
                )
            )
    return panels


def _draw_sizes(
    title: str, rows: Sequence[Timing], link_bytes_per_s: float | None, axes: Axes
) -> None:
    axes.set_title(title)
    for arm in dict.fromkeys(row.arm for row in rows):
        of_arm = [row for row in rows if row.arm == arm]
        axes.loglog(
            [r.num_bytes for r in of_arm], [r.median_s for r in of_arm], marker="o", label=arm
        )
    bounds = {
        row.num_bytes: bound_s
        for row in rows
        if (bound_s := row.bound_s(link_bytes_per_s)) is not None
    }
    if bounds:
        axes.loglog(list(bounds), list(bounds.values()), "--", color=MUTED, label="byte bound")
    in_units(axes, x="B", y="s")


def draw_bars(
    title: str,
    rows: Sequence[Timing],
    names: Mapping[str, str],
    link_bytes_per_s: float | None,
    axes: Axes,
) -> None:
    """Draw a bar chart of the median time of each variant.

    A thin line shows the minimum and maximum time, and a tick shows the lower bound.
    """
    axes.set_title(title)
    rows = [row for arm in names for row in rows if row.arm == arm]
    most_s = max(max(row.times_s) for row in rows)
    for position, row in enumerate(rows):
        is_first = row is rows[0]
        if is_first:
            times = ""
        else:
            times = f", {rows[0].median_s / row.median_s:.2f} x"
        axes.barh(
            -position, row.median_s, height=0.34, color=MUTED if row.arm in PEERS else SERIES[0]
        )
        axes.plot(
            [min(row.times_s), max(row.times_s)], [-position - 0.24] * 2, color=INK, linewidth=1
        )
        if (bound_s := row.bound_s(link_bytes_per_s)) is not None:
            axes.plot([bound_s] * 2, [-position - 0.17, -position + 0.17], color=SERIES[1])
        axes.text(
            0, -position + 0.22, f"{names[row.arm]}: {time_text(row.median_s)}{times}", va="bottom"
        )
    axes.set_xlim(0, 1.02 * most_s)
    axes.set_ylim(0.6 - len(rows), 0.7)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xticks([])
    axes.set_xlabel(
        "median; line: minimum to maximum" + ("; orange: byte bound" if link_bytes_per_s else "")
    )


# ---- files -----------------------------------------------------------------------------------------------------------


def write_bench(
    folder: Path,
    rows: Iterable[Timing],
    *,
    link_bytes_per_s: float | None,
    config: dict[str, Any],
    title: str,
) -> None:
    """Write all samples, the table and the figure of a benchmark into a folder.

    The files are `rows.jsonl` with every sample, `table.csv`, `table.md` and `bench.svg`.
    """
    rows = list(rows)
    folder.mkdir(parents=True, exist_ok=True)
    head = {"title": title, "config": config, "environment": environment()}
    lines = [head, *(asdict(row) | {"median_s": row.median_s} for row in rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([header(rows), *cells(rows, link_bytes_per_s)])
    (folder / "table.md").write_text(markdown(rows, link_bytes_per_s) + "\n")
    write_svg(folder / "bench.svg", panels_of(rows, link_bytes_per_s))
