"""Metrics of a run to any Lightning logger, a report with a picture, and steps that a resumed run repeats exactly."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lightning_hybrid import communication
from lightning_hybrid import metrics as m
from lightning_hybrid.comm.summary import CommSummary
from lightning_hybrid.comm.trace import CommTrace


class SeedEachStep(Callback):
    """Draw the random numbers of a batch from (seed, rank, epoch, batch), not from all that went before.

    A run resumed in mid-epoch then draws the same dropout masks as the uninterrupted one, on each rank, although
    Lightning saves no generator state and rank zero alone writes the checkpoint.

    Args:
        seed: The run's.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed torch's generators, the CUDA ones too."""
        entropy = [self.seed, trainer.global_rank, trainer.current_epoch, batch_idx]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))


class TrainingMetrics(Callback):
    """Log what `lightning_hybrid.metrics` lists under train, comm and throughput, every `log_every_n_steps` steps.

    At such a step, and at no other, it reads values from the device and averages the loss over ranks:
    *every rank must have this callback.* Loss scale, skipped steps and communication are read from the trainer's
    precision plugin and strategy where these have them, so stock strategies work as well, with fewer metrics.

    Times are rank zero's, between two logged steps, less validation. They need batches of equal size on all ranks.

    Args:
        skip_steps: A time that begins before this many steps of this process is not logged: memory is being
            allocated, buckets are being built.
    """

    def __init__(self, skip_steps: int = 10) -> None:
        self.skip_steps = skip_steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._last_step = trainer.global_step
        self._num_steps = 0  # by this process
        self._begin_window()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._pause_began_s = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock run on."""
        if not trainer.sanity_checking:
            self._paused_s += time.perf_counter() - self._pause_began_s

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the learning rate: at the end of the batch it is already the next one's."""
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; at a logged step, read and log."""
        self._window_images += _num_images(batch) * trainer.world_size
        if trainer.global_step == self._last_step:  # accumulating gradients
            return
        self._last_step = trainer.global_step
        self._num_steps += 1
        if not _is_logged_step(trainer):
            return
        trace = _comm_trace(trainer)
        comm = CommSummary() if trace is None else trace.drain()  # also where it is not logged: a window's is its own
        values = self._train_metrics(trainer, outputs) | communication.byte_metrics(comm)
        pl_module.log_dict(values | self._clock_metrics(trainer, comm), batch_size=1)
        self._begin_window()

    def _begin_window(self) -> None:
        self._window_images = 0
        self._paused_s = 0.0
        self._window_began_s = time.perf_counter()
        self._window_is_warm = self._num_steps >= self.skip_steps

    def _train_metrics(self, trainer: pl.Trainer, outputs: Any) -> dict[str, float]:
        values = {m.TRAIN_LR: float(self._lr)}
        if outputs and "loss" in outputs:  # manual optimization need not return one
            # Lightning divides the loss of a batch by the number of batches of a step
            loss = outputs["loss"].float() * trainer.accumulate_grad_batches
            values[m.TRAIN_LOSS] = float(trainer.strategy.reduce(loss, reduce_op="mean"))
        plugin = trainer.precision_plugin
        for index, loss_scale in enumerate(getattr(plugin, "loss_scales", ())):
            values[m.loss_scale_of_optimizer(index)] = float(loss_scale.value)
        if (num_skipped_steps := getattr(plugin, "num_skipped_steps", None)) is not None:
            values[m.TRAIN_SKIPPED_STEPS] = float(num_skipped_steps)
        return values

    def _clock_metrics(self, trainer: pl.Trainer, comm: CommSummary) -> dict[str, float]:
        elapsed_s = time.perf_counter() - self._window_began_s - self._paused_s
        if not self._window_is_warm:
            return {}
        rate = _link_bytes_per_s(trainer)
        values = communication.clock_metrics(comm, elapsed_s=elapsed_s, link_bytes_per_s=rate)
        return {m.IMAGES_PER_S: self._window_images / elapsed_s} | values


def _comm_trace(trainer: pl.Trainer) -> CommTrace | None:
    return getattr(trainer.strategy, "comm_trace", None)


def _link_bytes_per_s(trainer: pl.Trainer) -> float | None:
    return getattr(trainer.strategy, "link_bytes_per_s", None)


def _is_logged_step(trainer: pl.Trainer) -> bool:
    return bool(trainer.global_step % trainer.log_every_n_steps == 0)  # type: ignore[attr-defined]


def _num_images(batch: Any) -> int:
    """Length of the first tensor of a batch, however it is nested.

    >>> _num_images({"images": torch.zeros(7, 1, 16, 16), "labels": torch.zeros(7)})
    7
    """
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)


class RunReport(Callback):
    """A picture and a summary of the run, written by rank zero when fitting ends, and again when testing does.

        <run_dir>/run.png        loss, accuracy, learning rate, loss scale, communication share against steps; buckets
        <run_dir>/summary.json   every metric's last value, throughput, communication, and what the run was

    Curves and sums travel in the checkpoint, so the report of a resumed run tells of all of it. Curves are what other
    callbacks (`TrainingMetrics`, to be listed before it) and the module log; communication is rank zero's, of every
    step since the first. With `fast_dev_run` nothing is written. `table` is the summary in six lines, to be printed
    when all is over.

    Args:
        run_dir: Where to write; None = the trainer's `default_root_dir`.
    """

    def __init__(self, run_dir: str | None = None) -> None:
        self.run_dir = run_dir
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self._last_step = 0
        self._comm_before: CommSummary | None = None  # of fits that are over; None: none had a trace
        self._trace: CommTrace | None = None  # of the fit that runs

    def state_dict(self) -> dict[str, Any]:
        """The curves and sums so far."""
        comm = self.communication()
        return {
            "curves": {name: list(points) for name, points in self.curves.items()},
            "communication": None if comm is None else comm.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue those of the interrupted run; a checkpoint from before communication was kept has none."""
        self.curves = {name: [tuple(p) for p in points] for name, points in state_dict["curves"].items()}
        comm = state_dict.get("communication")
        self._comm_before = None if comm is None else CommSummary.from_state_dict(comm)
        self._trace = None

    def communication(self) -> CommSummary | None:
        """What this rank communicated since the first step; None where the strategy does not tell."""
        if self._trace is None:
            return self._comm_before
        now = self._trace.total()
        return now if self._comm_before is None else self._comm_before + now

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A step is recorded once, also where several batches make it."""
        self._last_step = trainer.global_step
        self._comm_before = self.communication()  # of a fit that was interrupted
        self._trace = _comm_trace(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the sums: the trace goes with the strategy's engine."""
        self._comm_before, self._trace = self.communication(), None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record what was logged in this step."""
        if trainer.global_step != self._last_step and _is_logged_step(trainer):
            self._record(trainer, ("train/", "comm/", "throughput/"))
        self._last_step = trainer.global_step

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what validation found."""
        if not trainer.sanity_checking:
            self._record(trainer, ("val/",))

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what the test found, and write."""
        self._record(trainer, ("test/",))
        self._write(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what is known without a test."""
        self._write(trainer)

    def _record(self, trainer: pl.Trainer, groups: tuple[str, ...]) -> None:
        for name, value in trainer.callback_metrics.items():
            if m.metric_of(name) is not None and name.startswith(groups):
                self.curves.setdefault(name, []).append((trainer.global_step, float(value)))

    def last(self, name: str) -> float | None:
        """The value of a metric seen last; None if there was none."""
        points = self.curves.get(name)
        return points[-1][1] if points else None

    def images_per_s(self) -> float | None:
        """All images by all time: the logged times are of equally many images, so this is their harmonic mean."""
        points = self.curves.get(m.IMAGES_PER_S)
        return statistics.harmonic_mean([value for _, value in points]) if points else None

    def exposed_s(self) -> float | None:
        """Seconds per step of exposed communication, mean over all logged steps."""
        points = self.curves.get(m.COMM_EXPOSED_S)
        return statistics.mean([value for _, value in points]) if points else None

    def exposed_share(self) -> float | None:
        """Exposed communication as a part of the time of all logged steps: each by its time, as they vary."""
        step_s = {step: 1 / images_per_s for step, images_per_s in self.curves.get(m.IMAGES_PER_S, ())}
        shares = dict(self.curves.get(m.COMM_EXPOSED_SHARE, ()))
        weights = {step: step_s[step] for step in shares if step in step_s}
        exposed_s = sum(shares[step] * weight for step, weight in weights.items())
        return exposed_s / sum(weights.values()) if weights else None

    def _folder(self, trainer: pl.Trainer) -> Path:
        return Path(self.run_dir or trainer.default_root_dir)

    def summary(self, trainer: pl.Trainer) -> dict[str, Any]:
        """What `summary.json` holds."""
        comm = self.communication()
        rate = _link_bytes_per_s(trainer)
        return {
            "metrics": {name: self.last(name) for name in (*m.METRICS, *self.curves) if name in self.curves},
            "images_per_s": self.images_per_s(),
            "communication": None if comm is None else communication.section(comm, link_bytes_per_s=rate),
            "num_steps": trainer.global_step,
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__name__,
            "run_dir": str(self._folder(trainer).resolve()),
        }

    def table(self, trainer: pl.Trainer) -> str:
        """The end of a run in six lines."""
        folder = self._folder(trainer).resolve()
        accuracy, speed, plugin = self.last(m.TEST_ACC), self.images_per_s(), trainer.precision_plugin
        has_scale = getattr(plugin, "loss_scale", None) is not None
        skipped = getattr(plugin, "num_skipped_steps", None) if has_scale else None
        rows = {
            "test accuracy": "not tested" if accuracy is None else f"{accuracy:.2%}",
            "throughput": "run too short to tell" if speed is None else f"{speed:,.0f} images/s on {_ranks(trainer)}",
            "skipped steps": "none: no loss scale" if skipped is None else f"{skipped:.0f} of {trainer.global_step}",
            "communication": communication.line(
                self.communication(),
                exposed_s=self.exposed_s(),
                exposed_share=self.exposed_share(),
                link_bytes_per_s=_link_bytes_per_s(trainer),
            ),
            "run directory": str(folder),
            "picture": "not written (fast_dev_run)" if _is_dry(trainer) else str(folder / "run.png"),
        }
        return "\n".join(f"{name:<14} {value}" for name, value in rows.items())

    @rank_zero_only
    def _write(self, trainer: pl.Trainer) -> None:
        if _is_dry(trainer):
            return
        folder = self._folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps(self.summary(trainer), indent=2) + "\n")
        self.figure(trainer).savefig(folder / "run.png", dpi=110)

    def figure(self, trainer: pl.Trainer) -> Figure:
        """Six panels, and the table under them."""
        figure = Figure(figsize=(15, 9), layout="constrained")
        panels, text = figure.subfigures(2, 1, height_ratios=(5, 1))  # type: ignore[misc]
        loss, accuracy, rate, scale, share, buckets = panels.subplots(2, 3).flat
        self._draw(loss, "loss", (m.TRAIN_LOSS, m.VAL_LOSS))
        self._draw(accuracy, "accuracy", (m.VAL_ACC, m.TEST_ACC))
        self._draw(rate, "learning rate", (m.TRAIN_LR,))
        self._draw(scale, "loss scale", (m.TRAIN_LOSS_SCALE,))
        if m.TRAIN_LOSS_SCALE in self.curves:
            scale.set_yscale("log", base=2)
        self._draw(share, "exposed communication, share of step", (m.COMM_EXPOSED_SHARE,))
        share.set_ylim(bottom=0)
        communication.draw_buckets(buckets, self.communication())
        rows = [row for row in self.table(trainer).splitlines() if not row.startswith(("run dir", "picture"))]
        strategy = f"strategy       {type(trainer.strategy).__name__}"
        lines = [*rows, f"precision      {trainer.precision}", strategy]
        text.text(0.03, 0.95, "\n".join(lines), family="monospace", va="top")
        return figure

    def _draw(self, axes: Axes, title: str, names: tuple[str, ...]) -> None:
        axes.set_title(title)
        axes.set_xlabel("step")
        drawn = [name for name in names if self.curves.get(name)]
        for name in drawn:
            steps, values = zip(*self.curves[name], strict=True)
            axes.plot(steps, values, marker="o" if len(steps) < 40 else "", markersize=3, label=name)
        if drawn:
            axes.grid(alpha=0.3)
            axes.legend()
        else:
            axes.text(0.5, 0.5, "not measured in this run", ha="center", va="center", transform=axes.transAxes)


def _is_dry(trainer: pl.Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False))


def _ranks(trainer: pl.Trainer) -> str:
    return f"{trainer.world_size} rank" + ("s" if trainer.world_size > 1 else "")
