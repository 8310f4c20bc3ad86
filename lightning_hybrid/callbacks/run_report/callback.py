"""The callback that writes a run's report: picture, summary, curves and a page of all of it."""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
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
from lightning_hybrid.callbacks.run_report.curve import Point, append_
from lightning_hybrid.callbacks.run_report.environment import environment
from lightning_hybrid.callbacks.time_to_accuracy import TimeToAccuracy
from lightning_hybrid.callbacks.training_metrics import is_logged_step
from lightning_hybrid.comm.stats.summary import CommSummary
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.run_status import run_status


class RunReport(Callback):
    """A report of the run, written by rank zero when fitting ends, and again when testing does.

        <run_dir>/run.png        loss, accuracy, learning rate, loss scale, waits against steps; buckets
        <run_dir>/summary.json   every metric's last value and best, throughput, communication, and what the run was
        <run_dir>/curves.json    {metric: [[step, value], ...]}; `time/elapsed_s` is the time at each recorded step
        <run_dir>/run.html       all of it on a page of its own, what went well first

    Curves and sums travel in the checkpoint, so the report of a resumed run covers all of it. Curves are what other
    callbacks (`TrainingMetrics`, to be listed before it) and the module log, thinned beyond 2,000 points; communication
    is rank zero's, of every step since the first. With `fast_dev_run` nothing is written.

    Args:
        run_dir: where to write; None: the trainer's `default_root_dir`.

    Attributes:
        config: what the run was configured with; None: the module's hyper-parameters. To be set before `fit`.
        overrides: what of it was given on the command line; None: not known.
        code_dir: a folder in the repository that the code is from; None: not known.
    """

    def __init__(self, run_dir: str | None = None) -> None:
        self.run_dir = run_dir
        self.config: dict[str, Any] | None = None
        self.overrides: list[str] | None = None
        self.code_dir: Path | None = None
        self.curves = defaultdict[str, list[Point]](list)
        self._before_s = 0.0  # of fits that are over
        self._began_s: float | None = None  # the one that runs
        self._last_step = 0
        self._communication_before: CommSummary | None = (
            None  # of fits that are over; None: none had a trace
        )
        self._trace: CommTrace | None = None  # of the fit that runs
        self._tested: Any = (
            None  # path of the checkpoint that was tested; None: the weights as they were
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the curves and sums so far."""
        comm = self.communication()
        return {
            "elapsed_s": self.elapsed_s,
            "curves": {
                name: torch.from_numpy(np.array(curve, np.float64))
                for name, curve in self.curves.items()
            },
            "communication": None if comm is None else comm.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the curves and sums of the interrupted run; an older checkpoint may lack some."""
        self._before_s = state_dict.get("elapsed_s", 0.0)
        self._began_s = None
        self.curves.clear()
        for name, points in state_dict["curves"].items():
            self.curves[name] = [(int(step), value) for step, value in points.tolist()]
        comm = state_dict.get("communication")
        self._communication_before = None if comm is None else CommSummary.from_state_dict(comm)
        self._trace = None

    def communication(self) -> CommSummary | None:
        """Return what this rank communicated since the first step; None where the strategy has no counters."""
        # A trace counts one fit; a run may be several, in this process or before a resume.
        if self._trace is None:
            return self._communication_before
        now = self._trace.total()
        return now if self._communication_before is None else self._communication_before + now

    @property
    def elapsed_s(self) -> float:
        """Seconds since training began, validation included."""
        return self._before_s + (0.0 if self._began_s is None else perf_counter() - self._began_s)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse to begin what could not draw its report at the end."""
        if find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                "`RunReport` needs matplotlib, which is not installed: the run would end without its report. "
                "`pip install 'lightning-hybrid[report]'`, or leave the callback out."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and take the counters of this fit."""
        self._began_s = perf_counter()
        self._last_step = trainer.global_step
        self._communication_before = self.communication()  # of a fit that was interrupted
        self._trace = run_status(trainer).comm_trace
        if self._trace is not None:
            self._trace.measure_devices()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the sums: the trace goes with the strategy's engine."""
        self._before_s = self.elapsed_s
        self._began_s = None
        self._communication_before = self.communication()
        self._trace = None

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record what was logged in this step, once, also where several batches make it."""
        if trainer.global_step != self._last_step and is_logged_step(trainer):
            self._record(trainer, ("train/", "comm/", "data/", "throughput/", "memory/"))
        self._last_step = trainer.global_step

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what validation found."""
        if not trainer.sanity_checking:
            self._record(trainer, ("val/",))

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what the test found, and write."""
        self._tested = trainer.ckpt_path
        self._record(trainer, ("test/",))
        self._write(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what is known without a test."""
        self._write(trainer)

    def _record(self, trainer: pl.Trainer, groups: tuple[str, ...]) -> None:
        if not trainer.is_global_zero:  # it alone writes, checkpoints too
            return
        for name, value in trainer.callback_metrics.items():
            if m.metric_of(name) is not None and name.startswith(groups):
                append_(self.curves[name], trainer.global_step, float(value))
        times = self.curves[m.ELAPSED_S]
        # Training and validation may record at one step: its time is recorded once.
        if not times or times[-1][0] != trainer.global_step:
            append_(times, trainer.global_step, self.elapsed_s)

    def last(self, name: str) -> float | None:
        """Return the last value of a metric; None if there was none."""
        points = self.curves.get(name)
        return points[-1][1] if points else None

    def best(self) -> dict[str, float]:
        """Return the best value of each metric that has one."""
        choose = {"max": max, "min": min}
        known = {name: m.metric_of(name) for name in self.curves}
        return {
            name: choose[metric.best](value for _, value in self.curves[name])
            for name, metric in known.items()
            if metric is not None and metric.best is not None
        }

    def images_per_s(self) -> float | None:
        """Return all images by all time: logged windows have equally many images, so it is their harmonic mean."""
        points = self.curves.get(m.IMAGES_PER_S)
        return statistics.harmonic_mean([value for _, value in points]) if points else None

    def exposed_s(self) -> float | None:
        """Return the exposed communication in seconds per step, mean over all logged steps."""
        points = self.curves.get(m.COMM_EXPOSED_S)
        return statistics.mean([value for _, value in points]) if points else None

    def exposed_share(self) -> float | None:
        """Return exposed communication as a share of the time of all logged steps, weighted by their time."""
        # Windows have equally many images, so the time of one is in proportion to 1 / images per second.
        step_s = {
            step: 1 / images_per_s for step, images_per_s in self.curves.get(m.IMAGES_PER_S, ())
        }
        shares = dict(self.curves.get(m.COMM_EXPOSED_SHARE, ()))
        weights = {step: step_s[step] for step in shares if step in step_s}
        exposed_s = sum(shares[step] * weight for step, weight in weights.items())
        return exposed_s / sum(weights.values()) if weights else None

    def _folder(self, trainer: pl.Trainer) -> Path:
        return Path(self.run_dir or trainer.default_root_dir).resolve()

    def summary(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return what `summary.json` holds."""
        comm = self.communication()
        status = run_status(trainer)
        rate = status.link_bytes_per_s
        events = [each for each in trainer.callbacks if isinstance(each, TimeToAccuracy)]  # type: ignore[attr-defined]
        hparams = getattr(trainer.lightning_module, "hparams", {})
        return {
            "metrics": {
                name: self.last(name) for name in (*m.METRICS, *self.curves) if name in self.curves
            },
            "best": self.best(),
            "images_per_s": self.images_per_s(),
            "time_to_accuracy": [
                {"target": e.target, "monitor": e.monitor, "reached": e.reached} for e in events
            ],
            "communication": None
            if comm is None
            else comm_report.as_json(comm, link_bytes_per_s=rate),
            "communication_plan": status.communication_plan,
            "num_steps": trainer.global_step,
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__name__,
            "run_dir": str(self._folder(trainer)),
            "environment": environment(self.code_dir),
            "overrides": self.overrides,
            "config": dict(hparams) if self.config is None else self.config,
        }

    def findings(self, trainer: pl.Trainer) -> dict[str, tuple[bool, str]]:
        """Return the result of a run: by name whether it went well, and words."""
        accuracy = self.last(m.TEST_ACC)
        speed = self.images_per_s()
        status = run_status(trainer)
        events = [each for each in trainer.callbacks if isinstance(each, TimeToAccuracy)]  # type: ignore[attr-defined]
        ranks = f"{trainer.world_size} rank" + ("s" if trainer.world_size > 1 else "")
        skipped = status.num_skipped_steps if status.loss_scales else None
        exposed_share = self.exposed_share()
        folder = self._folder(trainer)
        weights = "the last weights" if self._tested is None else _within(folder, self._tested)
        validation = self._validation(trainer, folder)
        comm = comm_report.describe(
            self.communication(),
            exposed_s=self.exposed_s(),
            exposed_share=exposed_share,
            link_bytes_per_s=status.link_bytes_per_s,
        )
        found = {
            "test accuracy": (True, "" if accuracy is None else f"{accuracy:.2%} of {weights}"),
            "validation": (True, validation or ""),
            "throughput": (
                True,
                "" if speed is None else f"{speed:,.0f} images/s on {ranks}, mean of logged steps",
            ),
            "skipped steps": (
                20 * (skipped or 0) <= trainer.global_step,
                "" if skipped is None else f"{skipped:.0f} of {trainer.global_step}",
            ),
            "communication": (exposed_share is not None and exposed_share <= 0.1, comm),
            "target": (
                all(event.reached for event in events),
                "; ".join(event.describe() for event in events),
            ),
        }
        return {name: (is_good, words) for name, (is_good, words) in found.items() if words}

    def table(self, trainer: pl.Trainer) -> str:
        """Return the result of a run in a few lines of text."""
        folder = self._folder(trainer)
        rows = {name: words for name, (_, words) in self.findings(trainer).items()}
        rows["run directory"] = str(folder)
        rows["report"] = (
            "not written (fast_dev_run)" if _is_dry(trainer) else str(folder / "run.html")
        )
        return "\n".join(f"{name:<14} {value}" for name, value in rows.items())

    def _validation(self, trainer: pl.Trainer, folder: Path) -> str | None:
        """Return the last accuracy in validation, the best, and the checkpoint that has it."""
        points = self.curves.get(m.VAL_ACC)
        if not points:
            return None
        step, best = max(points, key=lambda point: point[1])
        of_accuracy = (
            one
            for one in trainer.checkpoint_callbacks
            if getattr(one, "monitor", None) == m.VAL_ACC
        )
        saved = [getattr(each, "best_model_path", "") for each in of_accuracy]
        where = f": {_within(folder, saved[0])}" if saved and saved[0] else ""
        return f"{points[-1][1]:.2%} of the last weights, best {best:.2%} after step {step}{where}"

    @rank_zero_only
    def _write(self, trainer: pl.Trainer) -> None:
        if _is_dry(trainer):
            return
        from lightning_hybrid.callbacks.run_report import figure, run_page  # matplotlib is an extra

        folder = self._folder(trainer)
        summary = self.summary(trainer)
        panels = run_page.panels_of(self.curves, self.communication())
        written = {
            "summary.json": json.dumps(summary, indent=2, default=str).encode() + b"\n",
            "curves.json": json.dumps(self.curves).encode() + b"\n",
            **({"run.png": figure.png_of(figure.figure_of(panels, columns=3))} if panels else {}),
            "run.html": run_page.html_of(summary, panels, self.findings(trainer)).encode(),
        }
        for (
            name,
            content,
        ) in written.items():  # whole or not at all: others may read while a run is killed
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_path(folder / name) as part:
                    part.write_bytes(content)
            except OSError as error:  # a run that trained is not lost for its picture
                rank_zero_warn(
                    f"{folder / name} was not written ({error.strerror}): the run goes on without it."
                )


def _within(folder: Path, path: Any) -> str:
    """Return a path as seen from the run directory, where it is in there."""
    return os.path.relpath(path, folder) if Path(path).is_relative_to(folder) else str(path)


def _is_dry(trainer: pl.Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False))
