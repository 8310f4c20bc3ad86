"""What a benchmark found: one row per measurement; a table, a picture and JSON of all rows."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_hybrid.callbacks.run_report.environment import environment as environment_of

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True)
class Row:
    """Times of one arm in one case.

    ``section``: ``allreduce``, ``step`` or ``overlap``. ``case``: dtype or gradient set. ``num_bytes``: of the buffer,
    or of all gradients of a step, as they travel. ``times_s``: every sample, of the slowest rank. ``backward_s``: how
    long backward waited on purpose.

    >>> row = Row(section="step", case="x", arm="auto", num_bytes=100, num_nodes=2, times_s=(1.0, 9.0, 2.0))
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

    @property
    def median_s(self) -> float:
        """Of the samples."""
        return statistics.median(self.times_s)

    def bound_s(self, link_bytes_per_s: float | None) -> float | None:
        """The least time: ``2 (N - 1) / N`` of the bytes must leave each of N nodes over its link.

        No all-reduce among the nodes' own processors sends less from its busiest node (Patarasu and Yuan 2009). Headers
        are left out, so not even the bound is reached.
        """
        if link_bytes_per_s is None or self.num_nodes == 1:
            return None
        return 2 * (self.num_nodes - 1) / self.num_nodes * self.num_bytes / link_bytes_per_s


def hidden_share(rows: Sequence[Row]) -> float:
    """The share of the communication that a backward as long hides; 1 = all of it.

        1 - (step with backward - the same without communication) / (step - the same without communication)

    ``rows``: the step, without communication, with backward, with backward and without communication.

    >>> times_s = (3.0, 1.0, 3.5, 3.0)
    >>> rows = [Row(section="overlap", case="", arm="", num_bytes=1, num_nodes=2, times_s=(t,)) for t in times_s]
    >>> hidden_share(rows)
    0.75
    """
    bare_s, silent_s, both_s, silent_both_s = (row.median_s for row in rows)
    return 1 - (both_s - silent_both_s) / (bare_s - silent_s)


# ---- table -----------------------------------------------------------------------------------------------------------

HEADER = ("case", "bytes", "arm", "median ms", "min ms", "max ms", "samples", "x reference", "x byte bound")


def cells(rows: Sequence[Row], link_bytes_per_s: float | None) -> list[list[str]]:
    """One list per row; the reference of a case is its first row: torch's own all-reduce, or the first strategy."""
    references: dict[tuple[str, str, int], float] = {}
    table = []
    for row in rows:
        key = (row.section, row.case, row.num_bytes if row.section == "allreduce" else 0)
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
            ]
        )
    return table


def markdown(rows: Sequence[Row], link_bytes_per_s: float | None) -> str:
    """The table as Markdown, columns aligned, and what of the communication was hidden."""
    lines = [list(HEADER), *cells(rows, link_bytes_per_s)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    overlap = [row for row in rows if row.section == "overlap"]
    for of_case in (overlap[first : first + 4] for first in range(0, len(overlap), 4)):
        hidden, step, silent = hidden_share(of_case), of_case[0].median_s, of_case[1].median_s
        text.append(f"\n{of_case[0].case}, {of_case[0].arm}: {hidden:.1%} of {1e3 * (step - silent):.4g} ms hidden")
    return "\n".join(text)


def size(num_bytes: int) -> str:
    """4 KiB, 8 MiB, 97.5 MiB, 1000 B.

    >>> size(4096), size(8 * MIB), size(102_228_128), size(1000)
    ('4 KiB', '8 MiB', '97.5 MiB', '1000 B')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


# ---- picture ---------------------------------------------------------------------------------------------------------


def picture(rows: Sequence[Row], link_bytes_per_s: float | None, title: str) -> Figure:
    """One panel per section and case: all-reduce time against size, step time by strategy."""
    cases = list(dict.fromkeys((row.section, row.case) for row in rows))
    figure = Figure(figsize=(6 * max(1, len(cases)), 5), layout="constrained")
    figure.suptitle(title)
    for axes, (section, case) in zip(figure.subplots(1, max(1, len(cases)), squeeze=False)[0], cases, strict=False):
        of_case = [row for row in rows if (row.section, row.case) == (section, case)]
        axes.set_title(f"{section}: {case}")
        if len({row.num_bytes for row in of_case}) > 1 and section == "allreduce":
            _draw_sizes(axes, of_case, link_bytes_per_s)
        else:
            _draw_bars(axes, of_case, link_bytes_per_s)
    return figure


def _draw_sizes(axes: Any, rows: Sequence[Row], link_bytes_per_s: float | None) -> None:
    for arm in dict.fromkeys(row.arm for row in rows):
        of_arm = [row for row in rows if row.arm == arm]
        axes.loglog([r.num_bytes for r in of_arm], [r.median_s * 1e3 for r in of_arm], marker="o", label=arm, alpha=0.8)
    bounds = {row.num_bytes: bound_s for row in rows if (bound_s := row.bound_s(link_bytes_per_s)) is not None}
    if bounds:
        axes.loglog(list(bounds), [1e3 * bound_s for bound_s in bounds.values()], "k--", label="byte bound")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes")
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_bars(axes: Any, rows: Sequence[Row], link_bytes_per_s: float | None) -> None:
    medians_ms = [1e3 * row.median_s for row in rows]
    below = [1e3 * (row.median_s - min(row.times_s)) for row in rows]
    above = [1e3 * (max(row.times_s) - row.median_s) for row in rows]
    names = [row.arm.replace(", ", ",\n") + f"\n{time_ms:.4g}" for row, time_ms in zip(rows, medians_ms, strict=True)]
    bars = axes.bar(names, medians_ms, yerr=[below, above], capsize=4, color="tab:blue", alpha=0.8)
    for bar, row in zip(bars, rows, strict=True):
        if (bound_s := row.bound_s(link_bytes_per_s)) is not None:
            axes.hlines(1e3 * bound_s, bar.get_x(), bar.get_x() + bar.get_width(), "black", "dashed")
    axes.set_ylabel("ms: median, least and most" + ("; dashed: byte bound" if link_bytes_per_s else ""))


# ---- files -----------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Versions and machine; ``commit`` where this is a checkout, with a ``+`` where files differ from it."""
    return environment_of(Path(__file__).parent)


def write(
    folder: Path, rows: Iterable[Row], *, link_bytes_per_s: float | None, config: dict[str, Any], title: str
) -> None:
    """``rows.jsonl`` (every sample), ``table.csv``, ``table.md`` and ``bench.png`` in ``folder``."""
    rows = list(rows)
    folder.mkdir(parents=True, exist_ok=True)
    head = {"title": title, "config": config, "environment": environment()}
    lines = [head, *(asdict(row) | {"median_s": row.median_s} for row in rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([HEADER, *cells(rows, link_bytes_per_s)])
    (folder / "table.md").write_text(markdown(rows, link_bytes_per_s) + "\n")
    picture(rows, link_bytes_per_s, title).savefig(folder / "bench.png", dpi=90)
