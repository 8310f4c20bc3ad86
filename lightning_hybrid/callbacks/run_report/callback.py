"""Callback that writes the report of a training run as plots, JSON files and an HTML page."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lightning_hybrid.atomic_file import atomic_path
from lightning_hybrid.callbacks import comm_report
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report.curve import Point, append_, finite_values
from lightning_hybrid.callbacks.run_report.environment import environment
from lightning_hybrid.callbacks.stragglers.callback import StragglerMonitor
from lightning_hybrid.callbacks.time_to_accuracy import TimeToAccuracy
from lightning_hybrid.callbacks.training_metrics import is_logged_step
from lightning_hybrid.comm.stats.summary import CommSummary
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.run_status import run_status


class RunReport(Callback):
    """Callback that writes a report of the run when `fit` ends, and again when `test` ends.

    Rank zero writes the report.

        <run_dir>/run.png        loss, accuracy, learning rate, loss scale, waits against steps; buckets
        <run_dir>/summary.json   last and best value of every metric, throughput, communication, settings of the run
        <run_dir>/curves.json    {metric: [[step, value], ...]}; `time/elapsed_s` is the time at each recorded step
        <run_dir>/run.html       a page with all of the above, good results first

    Checkpoints contain curves and totals, so the report of a resumed run covers the whole run.
    Curves are values that the module and other callbacks log, reduced to at most 2,000 points. List
    `TrainingMetrics` before this callback, so that its values are included. Communication is
    measured on rank zero in all steps. The number of ranks includes all hosts. For an elastic run,
    the report shows the minimum and maximum number of ranks that trained at the same time. With
    `fast_dev_run`, nothing is written.

    Args:
        run_dir: Folder for the files. If None, the trainer's `default_root_dir` is used.

    Attributes:
        config: Configuration of the run, to be set before `fit`. If None, the module's
            hyper-parameters are used.
        overrides: Settings that were given on the command line, or None if they are unknown.
        code_dir: Folder in the repository of the code, or None if it is unknown.
    """

    def __init__(self, run_dir: str | None = None) -> None:
        self.run_dir = run_dir
        self.config: dict[str, Any] | None = None
        self.overrides: list[str] | None = None
        self.code_dir: Path | None = None
        self.curves = defaultdict[str, list[Point]](list)
        self._earlier_fits_s = 0.0
        self._fit_began_s: float | None = None  # None while no fit is running
        self._last_step = 0
        # Communication of earlier `fit` calls, or None if none of them had a trace.
        self._earlier_communication: CommSummary | None = None
        self._trace: CommTrace | None = None  # trace of the current `fit` call
        # Path of the checkpoint that was tested, or None if the weights in memory were tested.
        self._tested_checkpoint: Any = None
        # Minimum and maximum number of ranks that trained at the same time, or None before the
        # first step.
        self._trained_on: tuple[int, int] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded curves, elapsed time, communication and numbers of ranks."""
        curves = {}
        for name, points in self.curves.items():
            curves[name] = torch.from_numpy(np.array(points, np.float64))
        comm = self.communication()
        return {
            "elapsed_s": self.elapsed_s,
            "curves": curves,
            "communication": None if comm is None else comm.state_dict(),
            "trained_on": self._trained_on,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the curves, elapsed time, communication and numbers of ranks from a checkpoint.

        Older checkpoints may lack some of these values.
        """
        self._earlier_fits_s = state_dict.get("elapsed_s", 0.0)
        self._fit_began_s = None
        self.curves.clear()
        for name, points in state_dict["curves"].items():
            self.curves[name] = [(int(step), value) for step, value in points.tolist()]
        comm = state_dict.get("communication")
        self._earlier_communication = None if comm is None else CommSummary.from_state_dict(comm)
        self._trace = None
        self._trained_on = state_dict.get("trained_on")

    def communication(self) -> CommSummary | None:
        """Return a summary of this rank's communication since the first step.

        The result is None if the strategy does not trace its communication.
        """
        # A trace covers a single `fit` call. A run may consist of several calls, in this process or
        # before it was resumed.
        if self._trace is None:
            return self._earlier_communication
        current = self._trace.total()
        if self._earlier_communication is None:
            return current
        return self._earlier_communication + current

    @property
    def elapsed_s(self) -> float:
        """Training time so far in seconds, including validation and earlier `fit` calls."""
        current_fit_s = 0.0
        if self._fit_began_s is not None:
            current_fit_s = perf_counter() - self._fit_began_s
        return self._earlier_fits_s + current_fit_s

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check before training that matplotlib is installed.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        if find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                "`RunReport` needs matplotlib, which is not installed. Run `pip install "
                "'lightning-hybrid[report]'`, or remove the callback."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and begin to count the communication of this `fit` call."""
        self._fit_began_s = perf_counter()
        self._last_step = trainer.global_step
        # An interrupted fit may have left a trace.
        self._earlier_communication = self.communication()
        self._trace = run_status(trainer).comm_trace
        if self._trace is not None:
            self._trace.measure_devices()
        self._note_ranks(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the time and communication of this `fit` call to the totals.

        The strategy deletes the trace after training.
        """
        self._earlier_fits_s = self.elapsed_s
        self._fit_began_s = None
        self._earlier_communication = self.communication()
        self._trace = None

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record the values that were logged in this optimizer step.

        They are recorded once per step, even if gradients of several batches are accumulated.
        """
        if trainer.global_step != self._last_step and is_logged_step(trainer):
            self._note_ranks(trainer)
            self._record(
                trainer, ("train/", "comm/", "data/", "throughput/", "memory/", "straggler/")
            )
        self._last_step = trainer.global_step

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the results of validation."""
        if not trainer.sanity_checking:
            self._record(trainer, ("val/",))

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the results of the test, and write the report."""
        self._tested_checkpoint = trainer.ckpt_path
        self._record(trainer, ("test/",))
        self._write(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the report at the end of training, without test results."""
        self._write(trainer)

    def _record(self, trainer: pl.Trainer, groups: tuple[str, ...]) -> None:
        """Add the current values of metrics whose names begin with one of `groups` to the curves."""
        if not trainer.is_global_zero:  # only rank zero writes reports and checkpoints
            return
        for name, value in trainer.callback_metrics.items():
            if m.metric_of(name) is not None and name.startswith(groups):
                append_(self.curves[name], trainer.global_step, float(value))
        times = self.curves[m.ELAPSED_S]
        # Training and validation may both record values at the same step, but the time is recorded
        # only once per step.
        if not times or times[-1][0] != trainer.global_step:
            append_(times, trainer.global_step, self.elapsed_s)

    def _note_ranks(self, trainer: pl.Trainer) -> None:
        """Update the minimum and maximum number of ranks that have trained so far."""
        num_ranks = run_status(trainer).num_ranks or trainer.world_size
        fewest, most = self._trained_on or (num_ranks, num_ranks)
        self._trained_on = min(fewest, num_ranks), max(most, num_ranks)

    # ---- results -------------------------------------------------------------------------------

    def last(self, name: str) -> float | None:
        """Return the last value of a metric, or None if it has no values."""
        points = self.curves.get(name)
        return points[-1][1] if points else None

    def best(self) -> dict[str, float]:
        """Return the largest or smallest value of each metric, depending on which is better.

        Metrics for which neither is better are left out, and so are values of inf and nan.
        """
        best = {}
        for name, points in self.curves.items():
            metric = m.metric_of(name)
            if metric is None or metric.best is None:
                continue
            values = finite_values(points)
            if not values:
                continue
            if metric.best == "max":
                best[name] = max(values)
            else:
                best[name] = min(values)
        return best

    def images_per_s(self) -> float | None:
        """Return the mean training throughput in images per second, or None if it was not logged.

        The mean is harmonic, because all logged values cover the same number of images.
        """
        points = self.curves.get(m.IMAGES_PER_S)
        if not points:
            return None
        return statistics.harmonic_mean([value for _, value in points])

    def exposed_s(self) -> float | None:
        """Return the mean exposed communication time in seconds per step, or None if not logged.

        Exposed communication is communication that backward does not overlap.
        """
        points = self.curves.get(m.COMM_EXPOSED_S)
        if not points:
            return None
        return statistics.mean([value for _, value in points])

    def exposed_share(self) -> float | None:
        """Return the fraction of training time spent in exposed communication, or None if not logged.

        The fraction is a mean over logged steps, weighted by their time.
        """
        # All logged values cover the same number of images, so the time is proportional to
        # 1 / images per second.
        time_of_step = {}
        for step, images_per_s in self.curves.get(m.IMAGES_PER_S, ()):
            time_of_step[step] = 1 / images_per_s

        exposed_times = []
        times = []
        for step, share in dict(self.curves.get(m.COMM_EXPOSED_SHARE, ())).items():
            if step in time_of_step:
                exposed_times.append(share * time_of_step[step])
                times.append(time_of_step[step])
        return sum(exposed_times) / sum(times) if times else None

    def _folder(self, trainer: pl.Trainer) -> Path:
        return Path(self.run_dir or trainer.default_root_dir).resolve()

    def summary(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        status = run_status(trainer)
        last_values = {}
        for name in (*m.METRICS, *self.curves):
            if name in self.curves:
                last_values[name] = self.last(name)

        targets = []
        for callback in _target_callbacks(trainer):
            targets.append(
                {
                    "target": callback.target,
                    "monitor": callback.monitor,
                    "reached": callback.reached,
                }
            )

        communication = None
        comm = self.communication()
        if comm is not None:
            communication = comm_report.as_json(comm, link_bytes_per_s=status.link_bytes_per_s)

        config = self.config
        if config is None:
            config = dict(getattr(trainer.lightning_module, "hparams", {}))
        return {
            "metrics": last_values,
            "best": self.best(),
            "images_per_s": self.images_per_s(),
            "time_to_accuracy": targets,
            "communication": communication,
            "communication_plan": status.communication_plan,
            "num_steps": trainer.global_step,
            "world_size": self._ranks(trainer)[1],
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__name__,
            "run_dir": str(self._folder(trainer)),
            "environment": environment(self.code_dir),
            "overrides": self.overrides,
            "config": config,
        }

    def findings(self, trainer: pl.Trainer) -> dict[str, tuple[bool, str]]:
        """Return the main results of the run as a dictionary from names to `(is good, text)` pairs."""
        status = run_status(trainer)
        folder = self._folder(trainer)
        findings: dict[str, tuple[bool, str]] = {}

        accuracy = self.last(m.TEST_ACC)
        if accuracy is not None:
            weights = self._name_tested_weights(folder)
            findings["test accuracy"] = (True, f"{accuracy:.2%} of {weights}")

        validation = self._describe_validation(trainer, folder)
        if validation is not None:
            findings["validation"] = (True, validation)

        speed = self.images_per_s()
        if speed is not None:
            ranks = _count_of_ranks(*self._ranks(trainer))
            text = f"{speed:,.0f} images/s on {ranks}, mean of logged steps"
            findings["throughput"] = (True, text)

        num_skipped = None
        if status.loss_scales:
            num_skipped = status.num_skipped_steps
        if num_skipped is not None:
            are_few = 20 * num_skipped <= trainer.global_step
            text = f"{num_skipped:.0f} of {trainer.global_step}"
            findings["skipped steps"] = (are_few, text)

        exposed_share = self.exposed_share()
        is_hidden = exposed_share is not None and exposed_share <= 0.1
        text = comm_report.describe(
            self.communication(),
            exposed_s=self.exposed_s(),
            exposed_share=exposed_share,
            link_bytes_per_s=status.link_bytes_per_s,
        )
        findings["communication"] = (is_hidden, text)

        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, StragglerMonitor) and callback.num_judged:
                findings["stragglers"] = (not callback.messages, callback.describe())

        targets = _target_callbacks(trainer)
        if targets:
            are_reached = all(callback.reached for callback in targets)
            text = "; ".join(callback.describe() for callback in targets)
            findings["target"] = (are_reached, text)
        return findings

    def table(self, trainer: pl.Trainer) -> str:
        """Format the main results of the run as text, with one line per result."""
        folder = self._folder(trainer)
        rows = {name: text for name, (_, text) in self.findings(trainer).items()}
        rows["run directory"] = str(folder)
        rows["report"] = str(folder / "run.html")
        if _is_dry(trainer):
            rows["report"] = "not written (fast_dev_run)"
        return "\n".join(f"{name:<14} {value}" for name, value in rows.items())

    def _ranks(self, trainer: pl.Trainer) -> tuple[int, int]:
        """Return the minimum and maximum number of ranks that trained at the same time.

        Without any training, both are the trainer's world size.
        """
        return self._trained_on or (trainer.world_size, trainer.world_size)

    def _name_tested_weights(self, folder: Path) -> str:
        if self._tested_checkpoint is None:
            return "the last weights"
        return _path_in(folder, self._tested_checkpoint)

    def _describe_validation(self, trainer: pl.Trainer, folder: Path) -> str | None:
        """Describe the last and the best validation accuracy, and name the best checkpoint."""
        points = self.curves.get(m.VAL_ACC)
        if not points:
            return None
        last_value = points[-1][1]
        text = f"{last_value:.2%} of the last weights"
        finite = [point for point in points if math.isfinite(point[1])]
        if finite:
            best_step, best_value = max(finite, key=lambda point: point[1])
            text += f", best {best_value:.2%} after step {best_step}"

        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "monitor", None) == m.VAL_ACC:
                path = getattr(callback, "best_model_path", "")
                if path:
                    text += f": {_path_in(folder, path)}"
                break
        return text

    # ---- files ---------------------------------------------------------------------------------

    @rank_zero_only
    def _write(self, trainer: pl.Trainer) -> None:
        if _is_dry(trainer):
            return
        summary = self.summary(trainer)
        summary_text = json.dumps(_without_nan(summary), indent=2, default=str)
        curves_text = json.dumps(_without_nan(self.curves))
        contents = {
            "summary.json": f"{summary_text}\n".encode(),
            "curves.json": f"{curves_text}\n".encode(),
        }
        try:
            contents |= self._pages(trainer, summary)
        except Exception as error:  # a report that cannot be drawn must not fail the run
            rank_zero_warn(
                f"run.html and run.png were not written, because drawing them failed "
                f"({type(error).__name__}: {error}). The run continues without them."
            )

        folder = self._folder(trainer)
        for name, content in contents.items():
            _write_file(folder / name, content)

    def _pages(self, trainer: pl.Trainer, summary: dict[str, Any]) -> dict[str, bytes]:
        """Return the contents of the HTML page and of the picture, by file name."""
        # Imported here because matplotlib is an optional dependency.
        from lightning_hybrid.callbacks.run_report import figure, run_page

        pages = {}
        panels = run_page.panels_of(self.curves, self.communication())
        if panels:
            pages["run.png"] = figure.png_of(figure.figure_of(panels, columns=3))
        page = run_page.html_of(summary, panels, self.findings(trainer))
        pages["run.html"] = page.encode()
        return pages


def _without_nan(value: Any) -> Any:
    """Replace inf and nan by None in nested lists and dictionaries, because JSON does not have them.

    >>> _without_nan({"a": [(1, float("nan")), (2, 0.5)]})
    {'a': [[1, None], [2, 0.5]]}
    """
    if isinstance(value, Mapping):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write_file(path: Path, content: bytes) -> None:
    """Write a file atomically, and warn if this fails.

    Readers never see an incomplete file, even if the run is killed while it writes.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part:
            part.write_bytes(content)
    except OSError as error:  # a failure to write the report must not fail the run
        rank_zero_warn(
            f"{path} was not written ({error.strerror or error}). The run continues without it."
        )


def _count_of_ranks(fewest: int, most: int) -> str:
    """Format a number of ranks, or a range of numbers, as text.

    >>> _count_of_ranks(1, 1), _count_of_ranks(2, 2), _count_of_ranks(2, 4)
    ('1 rank', '2 ranks', '2 to 4 ranks')
    """
    if fewest < most:
        return f"{fewest} to {most} ranks"
    if most == 1:
        return "1 rank"
    return f"{most} ranks"


def _target_callbacks(trainer: pl.Trainer) -> list[TimeToAccuracy]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, TimeToAccuracy)]


def _path_in(folder: Path, path: Any) -> str:
    """Return `path` relative to `folder` if it is inside the folder, otherwise unchanged."""
    if Path(path).is_relative_to(folder):
        return os.path.relpath(path, folder)
    return str(path)


def _is_dry(trainer: pl.Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False))
