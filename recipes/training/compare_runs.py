"""Comparison of training runs by their curves, final metrics and configurations."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report import html_page
from lightning_hybrid.callbacks.run_report.figure import Panel, in_units
from recipes.cli.results import write_json
from recipes.cli.usage import command

TEMPLATE = Path(__file__).parent / "templates" / "comparison.html"
FILES = ("summary.json", "curves.json")
# Title, metric, unit, and whether the curve is also drawn over time.
PANELS = (
    ("Training loss", m.TRAIN_LOSS, "", True),
    ("Validation loss", m.VAL_LOSS, "", True),
    ("Validation accuracy", m.VAL_ACC, "", True),
    ("Learning rate", m.TRAIN_LR, "", False),
    ("Images per second", m.IMAGES_PER_S, "", False),
)
RESULTS = ("test", "val")
"""Groups of metrics that are listed first."""
MOST_POINTS = 80  # per curve in a figure; longer curves are drawn as averages of several points
_OF_THE_PLACE = ("run_dir", "default_root_dir", "dirpath", "save_dir")
"""Keys that contain the output directory of a run, and therefore differ between any two runs."""
_OF_HYDRA = ("_partial_", "_recursive_", "_convert_", "_args_")
"""Keys that tell Hydra how to build an object."""
_COPY = ".kept."
"""Group of keys under which checkpoints contain a copy of other keys."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Finished training run, with the summary and curves read from its directory.

    The files are `summary.json` and `curves.json`.
    """

    name: str
    folder: Path
    summary: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]

    @property
    def config(self) -> dict[str, Any]:
        """Flat configuration with dotted keys, in which each `_target_` is replaced by its class name."""
        config = {}
        for key, value in html_page.flatten(self.summary["config"] or {}).items():
            parent, _, name = key.rpartition(".")
            if name in _OF_HYDRA or _COPY in key:
                continue
            if name == "_target_":
                config[parent] = str(value).rpartition(".")[2]
            else:
                config[key] = value
        return config

    def over_time(self, name: str) -> list[tuple[float, float]]:
        """Return a curve as pairs of (seconds since the start of training, value).

        Times are interpolated between steps whose time is known.
        """
        elapsed = self.curves.get(m.ELAPSED_S, ())
        if not elapsed:
            return []
        steps, times_s = zip(*elapsed, strict=True)
        points = [
            (step, value)
            for step, value in self.curves.get(name, ())
            if steps[0] <= step <= steps[-1]
        ]
        return [(float(np.interp(step, steps, times_s)), value) for step, value in points]


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_runs(folders: Sequence[Path], *, names: Sequence[str] | None = None) -> list[Run]:
    """Read finished runs from their directories, in the given order.

    Raises:
        ValueError: There is no folder, a folder is given twice or does not contain a run, a file is damaged, or the
            number of names is wrong.
    """
    if not folders:
        raise ValueError(
            "`runs` (=[]) must name at least one run directory. Set runs=[outputs/a,outputs/b]."
        )
    places = [folder.resolve() for folder in folders]
    for location in places:
        if places.count(location) > 1:
            raise ValueError(
                f"`runs` (={location}) must name each run only once. Remove the duplicate."
            )
    if names is not None and len(set(names)) != len(folders):
        raise ValueError(
            f"`names` (={list(names)}) must have a different name for each of {len(folders)} "
            "runs, in the order of `runs`. Leave it out to use the names of the folders."
        )
    if names is not None:
        labels = names
    else:
        labels = short_names(places)
    return [read_run(location, name=name) for location, name in zip(places, labels, strict=True)]


def read_run(folder: Path, *, name: str) -> Run:
    """Read one finished run from its directory.

    Raises:
        ValueError: The folder does not exist or does not contain a run, or a file is damaged.
    """
    files = []
    for file in FILES:
        path = folder / file
        try:
            content = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            if not folder.is_dir():
                state = "the folder does not exist"
            else:
                state = f"it contains no {file}"
            raise ValueError(
                f"`runs` (={folder}) is not the directory of a finished run, because {state}. Set `runs` "
                f"to directories that `{command('train')}` prints. The callback RunReport writes "
                f"{' and '.join(FILES)} there at the end of training."
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`runs` (={path}) is damaged and cannot be read: {error}. Leave this run out, or resume "
                "the run with resume=auto to write the file again."
            ) from error
        files.append(content)
    summary, curves = files
    if not isinstance(summary, dict) or not isinstance(curves, dict) or "metrics" not in summary:
        raise ValueError(
            f"`runs` (={folder}) is not a run directory, because {FILES[0]} has no "
            "`metrics`. Remove it from `runs`."
        )
    points: dict[str, list[tuple[int, float]]] = {}
    for metric_name, curve in curves.items():
        points[metric_name] = []
        for step, value in curve:
            if value is None:  # JSON has neither inf nor nan
                value = math.nan
            points[metric_name].append((int(step), float(value)))
    return Run(
        name=name, folder=folder, summary={"config": None, "best": {}} | summary, curves=points
    )


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return short, unique names for folders: their paths relative to the common parent.

    >>> short_names([Path("/runs/a/0"), Path("/runs/b/0")]), short_names([Path("/runs/a")])
    (['a/0', 'b/0'], ['a'])
    """
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    return [str(folder.relative_to(common)) for folder in folders]


# ---- comparing -------------------------------------------------------------------------------------------------------


def differing_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the configuration keys that differ between runs, with their values in every run.

    The value is None for a run without the key. Keys of output directories are left out.
    """
    configs = [run.config for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    differences = {}
    for key in keys:
        values = [config.get(key) for config in configs]
        is_of_place = key.split(".")[-1] in _OF_THE_PLACE
        if not is_of_place and any(value != values[0] for value in values[1:]):
            differences[key] = values
    return differences


def final_metrics(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the last value of each metric in every run, and the best value if one is recorded.

    The value is None for a run that does not have the metric.
    """
    names = dict.fromkeys(name for run in runs for name in run.summary["metrics"])
    values = {}
    for name in names:
        values[name] = [run.summary["metrics"].get(name) for run in runs]
        if any(name in run.summary["best"] for run in runs):
            values[f"{name}, best"] = [run.summary["best"].get(name) for run in runs]
    return values


def text_table(runs: Sequence[Run]) -> str:
    """Format accuracy, throughput and time of each run as a table for the terminal."""
    rows: list[tuple[str, ...]] = [
        ("run", "steps", "val/acc best", "test/acc", "images/s", "time s")
    ]
    for run in runs:
        best = run.summary["best"]
        metrics = run.summary["metrics"]
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
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


# ---- writing ---------------------------------------------------------------------------------------------------------


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Create figure panels of each metric over steps, and of losses and accuracies also over time."""
    panels = list[Panel]()
    for title, name, unit, is_timed in PANELS:
        by_step = {run.name: run.curves.get(name, []) for run in runs}
        best = m.METRICS[name].best
        best_values = {
            run.name: run.summary["best"][name] for run in runs if name in run.summary["best"]
        }
        if best and len(set(best_values.values())) > 1:
            title = f"{title}: best in {(max if best == 'max' else min)(best_values, key=lambda run: best_values[run])}"
        if any(by_step.values()):
            panels.append((partial(_draw, title, "step", "", unit, by_step), 220))
            if is_timed:
                by_time = {run.name: run.over_time(name) for run in runs}
            else:
                by_time = {}
            if any(by_time.values()):
                panels.append(
                    (partial(_draw, title, "training and validation", "s", unit, by_time), 220)
                )
    return panels


def _draw(
    title: str,
    label: str,
    x: str,
    y: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    axes: Axes,
) -> None:
    axes.set_title(title)
    axes.set_xlabel(label)
    in_units(axes, x=x, y=y)
    for name, points in curves.items():
        size = -(-len(points) // MOST_POINTS)
        groups = [points[at : at + size] for at in range(0, len(points), size or 1)]
        means = [
            [statistics.fmean(values) for values in zip(*group, strict=True)] for group in groups
        ]
        places, values = ([mean[i] for mean in means] for i in (0, 1))
        axes.plot(places, values, marker="o" if len(means) < 40 else "", label=name)


def marked_metrics(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return one table row per final metric, with the best value marked.

    Test and validation metrics come first.
    """
    rows = []
    for name, values in final_metrics(runs).items():
        metric = m.metric_of(name.removesuffix(", best"))
        best = {None: None, "max": max, "min": min}[None if metric is None else metric.best]
        there = [value for value in values if value is not None]
        cells = [
            html_page.format_value(value, "1" if metric is None else metric.unit)
            for value in values
        ]
        if best is not None and len(set(there)) > 1:
            winner = best(there)
            pairs = zip(cells, values, strict=True)
            cells = [
                html_page.Good(f"{cell} (best)") if value == winner else cell
                for cell, value in pairs
            ]
        group = name.partition("/")[0]
        if group in RESULTS:
            order = RESULTS.index(group)
        else:
            order = len(RESULTS)
        rows.append((best is None, order, (name, *cells)))
    rows.sort(key=lambda row: row[:2])
    return [cells for *_, cells in rows]


def html(runs: Sequence[Run], panels: Sequence[Panel], *, title: str) -> str:
    """Format the comparison of runs as an HTML page with metrics, figures and differing keys."""
    return html_page.render(
        TEMPLATE,
        title=title,
        names=[run.name for run in runs],
        metrics=marked_metrics(runs),
        pictures=html_page.pictures(panels),
        differing=[(key, *values) for key, values in differing_keys(runs).items()],
        has_configs=all(run.config for run in runs),
        folders=[
            (run.name, run.summary.get("environment", {}).get("commit"), run.folder) for run in runs
        ],
    )


def write_comparison(folder: Path, runs: Sequence[Run], *, title: str) -> None:
    """Write the comparison of runs into a folder as `report.json` and a self-contained `report.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "runs": [{"name": run.name, "folder": str(run.folder)} for run in runs],
        "final_metrics": final_metrics(runs),
        "differing_keys": differing_keys(runs),
    }
    write_json(folder / "report.json", content)
    (folder / "report.html").write_text(html(runs, panels_of(runs), title=title))
