"""Comparison of runs: curves over steps and over time, final metrics, differing configurations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report import html_page
from recipes.cli.results import write_json
from recipes.cli.usage import command

FILES = ("summary.json", "curves.json")
PANELS = (
    ("training loss", m.TRAIN_LOSS),
    ("validation loss", m.VAL_LOSS),
    ("validation accuracy", m.VAL_ACC),
    ("learning rate", m.TRAIN_LR),
    ("images per second", m.IMAGES_PER_S),
)
_OF_THE_PLACE = ("run_dir", "default_root_dir", "dirpath", "save_dir")
"""Keys that hold where a run was written: they differ between any two."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Finished run: `summary.json` and `curves.json` of its directory."""

    name: str
    folder: Path
    summary: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]

    @property
    def config(self) -> dict[str, Any]:
        """Flat configuration, keys as on the command line."""
        return html_page.flatten(self.summary["config"] or {})

    def over_time(self, name: str) -> list[tuple[float, float]]:
        """Return a curve against seconds since training began, interpolated between steps whose time is known."""
        known = self.curves.get(m.ELAPSED_S, ())
        if not known:
            return []
        steps, times_s = zip(*known, strict=True)
        points = [(step, value) for step, value in self.curves.get(name, ()) if steps[0] <= step <= steps[-1]]
        return [(float(np.interp(step, steps, times_s)), value) for step, value in points]


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_runs(folders: Sequence[Path], *, names: Sequence[str] | None = None) -> list[Run]:
    """Read the runs of these folders, in their order.

    Raises:
        ValueError: No folder, one that is given twice or is no run's, a file that is torn, a name too few or too many.
    """
    if not folders:
        raise ValueError(
            "`runs` (=[]) must name at least one run directory: there is nothing to lay side by side. Give "
            "runs=[outputs/a,outputs/b]."
        )
    places = [folder.resolve() for folder in folders]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"`runs` (={place}) must name each run once: it would be compared with itself.")
    if names is not None and len(set(names)) != len(folders):
        raise ValueError(
            f"`names` (={list(names)}) must hold one name of its own for each of {len(folders)} runs, in the order of "
            "`runs`. Leave it out to have the folders' names."
        )
    labels = names if names is not None else short_names(places)
    return [read_run(place, name=name) for place, name in zip(places, labels, strict=True)]


def read_run(folder: Path, *, name: str) -> Run:
    """Read one run.

    Raises:
        ValueError: The folder is none, or no run's; a file is torn or not a run's.
    """
    found = []
    for file in FILES:
        path = folder / file
        try:
            content = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            state = "there is no such folder" if not folder.is_dir() else f"it holds no {file}"
            raise ValueError(
                f"`runs` (={folder}) must name directories that a finished run wrote: {state}. The callback RunReport "
                f"writes {' and '.join(FILES)} when training ends; `{command('train')}` prints the directory."
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`runs` (={path}) must be whole: {error}. The file was cut or changed after the run had written it; "
                "leave this run out, or run it again with resume=auto, which writes it again."
            ) from error
        found.append(content)
    summary, curves = found
    if not isinstance(summary, dict) or not isinstance(curves, dict) or "metrics" not in summary:
        raise ValueError(f"`runs` (={folder}) must hold a run's summary: {FILES[0]} has no `metrics`. Leave it out.")
    points = {name: [(int(step), float(value)) for step, value in curve] for name, curve in curves.items()}
    return Run(name=name, folder=folder, summary={"config": None, "best": {}} | summary, curves=points)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return names that distinguish folders: their paths below the one that contains all.

    >>> short_names([Path("/runs/a/0"), Path("/runs/b/0")]), short_names([Path("/runs/a")])
    (['a/0', 'b/0'], ['a'])
    """
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    return [str(folder.relative_to(common)) for folder in folders]


# ---- comparing -------------------------------------------------------------------------------------------------------


def differing_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return configuration keys whose values differ, None where a run has none; not those of the place."""
    configs = [run.config for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    found = {}
    for key in keys:
        values = [config.get(key) for config in configs]
        is_of_place = key.split(".")[-1] in _OF_THE_PLACE
        if not is_of_place and any(value != values[0] for value in values[1:]):
            found[key] = values
    return found


def final_metrics(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return, by metric, each run's last value, and its best where one is best; None where a run has none."""
    names = dict.fromkeys(name for run in runs for name in run.summary["metrics"])
    found = {}
    for name in names:
        found[name] = [run.summary["metrics"].get(name) for run in runs]
        if any(name in run.summary["best"] for run in runs):
            found[f"{name}, best"] = [run.summary["best"].get(name) for run in runs]
    return found


def text_table(runs: Sequence[Run]) -> str:
    """Format final accuracy, throughput and time for the terminal."""
    rows: list[tuple[str, ...]] = [("run", "steps", "val/acc best", "test/acc", "images/s", "time s")]
    for run in runs:
        best, metrics = run.summary["best"], run.summary["metrics"]
        values = [best.get(m.VAL_ACC), metrics.get(m.TEST_ACC), run.summary.get("images_per_s")]
        values.append(metrics.get(m.ELAPSED_S))
        rows.append(
            (
                run.name,
                html_page.format_value(run.summary.get("num_steps")),
                *(html_page.format_value(value) for value in values),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


# ---- writing ---------------------------------------------------------------------------------------------------------


def picture(runs: Sequence[Run]) -> Figure:
    """Draw each curve over steps in the upper row, over seconds in the lower."""
    figure = Figure(figsize=(4.5 * len(PANELS), 8), layout="constrained")
    panels = figure.subplots(2, len(PANELS))
    for column, (title, name) in enumerate(PANELS):
        by_step, by_time = panels[0][column], panels[1][column]
        by_step.set_title(title)
        _draw(by_step, "step", [(run.name, run.curves.get(name, [])) for run in runs])
        _draw(by_time, "seconds of training and validation", [(run.name, run.over_time(name)) for run in runs])
    legends = [axes.get_legend_handles_labels() for axes in panels.flat]
    handles = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncol=min(4, len(runs)))
    return figure


def _draw(axes: Axes, label: str, curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> None:
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
    for index, (name, points) in enumerate(curves):
        if points:
            places, values = zip(*points, strict=True)
            marker = "o" if len(points) < 40 else ""
            axes.plot(places, values, marker=marker, markersize=3, label=name, color=f"C{index % 10}")
    if not any(points for _, points in curves):
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)


def html(runs: Sequence[Run], png: bytes, *, title: str) -> str:
    """Format the page: picture, final metrics, differing keys, the runs' folders."""
    names = [run.name for run in runs]
    metrics = [(name, *values) for name, values in final_metrics(runs).items()]
    differing = [(key, *values) for key, values in differing_keys(runs).items()]
    same = "The configurations are the same." if all(run.config for run in runs) else "Not every run saved its own."
    folders = [(run.name, run.folder, run.summary.get("environment", {}).get("commit")) for run in runs]
    sections = [
        html_page.png_picture(png, alt="curves of all runs over steps and over seconds"),
        html_page.section("Final metrics", html_page.table(["metric", *names], metrics)),
        html_page.section(
            "Differing keys", html_page.table(["key", *names], differing) if differing else html_page.paragraph(same)
        ),
        html_page.section("Runs", html_page.table(["name", "folder", "commit"], folders)),
    ]
    return html_page.page(title, sections)


def write_comparison(folder: Path, runs: Sequence[Run], *, title: str) -> None:
    """Write `report.html`, which needs no other file, `report.png` and `report.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    png = html_page.png_of(picture(runs))
    content = {
        "runs": [{"name": run.name, "folder": str(run.folder)} for run in runs],
        "final_metrics": final_metrics(runs),
        "differing_keys": differing_keys(runs),
    }
    (folder / "report.png").write_bytes(png)
    write_json(folder / "report.json", content)
    (folder / "report.html").write_text(html(runs, png, title=title))
