"""Trial of a configuration of `recipes/train.py` with some keys changed, in the process that asks for it."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig, OmegaConf

from lightning_hybrid.callbacks import metrics as m
from recipes.cli import config_check, launch
from recipes.cli.world import num_ranks
from recipes.hyperparams.trial_log import Mode, Status, TrialOutcome, is_at_chance
from recipes.hyperparams.trial_pool import Limits
from recipes.hyperparams.trial_ranks import run_on_ranks
from recipes.training import keys
from recipes.training.build import build

CONF = Path(__file__).resolve().parents[2] / "conf"


@contextmanager
def _no_other_hydra() -> Iterator[None]:
    """Remove the search's own Hydra: it composes one configuration per process, and not a trial's."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def configured(overrides: tuple[str, ...], *, run_dir: str) -> DictConfig:
    """Compose `conf/train.yaml` with overrides, and check it for holes.

    Raises:
        ValueError: A `???` is left, or the trial would need several hosts.
    """
    with _no_other_hydra(), initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", overrides=[*overrides, f"run_dir='{run_dir}'"])
    config_check.check(cfg, keys.TRAIN_KEYS)
    if cfg.trainer.num_nodes != 1:
        raise ValueError(
            f"`trainer.num_nodes` (={cfg.trainer.num_nodes}) must be 1 in a trial: it has the ranks of one host. Set "
            "trainer.num_nodes=1; strategy.ranks_per_node makes nodes of them."
        )
    return cfg


class Watch(Callback):
    """Callback that ends a trial that has lost: a loss that is not finite, or an objective behind its limit.

    Validation may be as rare as the trial likes; a limit is looked at in the first one at or after its fraction. The
    training loss is read every `log_every_n_steps` steps and at the end.

    Args:
        objective: Name of a metric that validation logs.
        mode: Which way is better.
        limits: See `trial_pool.Limits`.
    """

    def __init__(self, *, objective: str, mode: Mode, limits: Limits) -> None:
        self.objective, self.mode = objective, mode
        self.limits = list(limits)
        self.curve: list[tuple[float, float]] = []
        self.status: Status = "done"
        self.reason = ""

    def _end(self, trainer: pl.Trainer, status: Status, reason: str) -> None:
        self.status, self.reason = status, reason
        trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check the loss, as often as a log would."""
        # To read the loss waits for the device: therefore only as often as a log, and once at the end.
        is_last = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if is_last or trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            # Of all ranks: those that went on alone would wait for the others without end.
            loss = float(trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean"))
            if not math.isfinite(loss):
                self._end(trainer, "diverged", f"train/loss is {loss} at step {trainer.global_step}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the objective, and compare it with its limit."""
        is_on_the_way = trainer.state.fn is TrainerFn.FITTING and not trainer.sanity_checking
        if not is_on_the_way or self.status != "done" or self.objective not in trainer.callback_metrics:
            return
        value = float(trainer.callback_metrics[self.objective])
        fraction = (trainer.current_epoch + 1) / (trainer.max_epochs or 1)
        self.curve.append((round(fraction, 4), value))
        if not math.isfinite(value):
            self._end(trainer, "diverged", f"{self.objective} is {value} after {fraction:.0%} of the run")
        # More than one limit may have been passed since the last validation; each is judged by this value.
        while self.limits and fraction >= self.limits[0][0] and self.status == "done":
            at, limit = self.limits.pop(0)
            if fraction < 1 and (value > limit if self.mode == "min" else value < limit):
                reason = f"{self.objective} {value:.4g} was behind the median {limit:.4g} after {at:.0%} of the run"
                self._end(trainer, "stopped", reason)


@dataclass(frozen=True, kw_only=True)
class TrainTrial:
    """Runner that fits, validates, and tests unless `trainer.limit_test_batches` is 0; see `trial_pool.Runner`.

    Attributes:
        base: Overrides of every trial; a trial's own come after them.
        objective: Name of a metric that validation logs.
        mode: Which way is better.
        run_dir: Where trials write, each in a folder of its own, if they write at all.
    """

    base: tuple[str, ...]
    objective: str
    mode: Mode
    run_dir: str

    def __call__(self, overrides: tuple[str, ...], limits: Limits) -> TrialOutcome:
        """Run the trial with these overrides."""
        _quieten()
        launch.register_resolvers()
        folder = Path(self.run_dir) / TrialOutcome(overrides=overrides, status="done").key
        cfg = configured((*self.base, *overrides), run_dir=str(folder))
        world_size = num_ranks(cfg.trainer.devices, cfg.trainer.num_nodes, cfg.trainer.accelerator)
        if world_size > 1 and "LOCAL_RANK" not in os.environ:
            return run_on_ranks(self, overrides, limits, num_ranks=world_size)
        watch = Watch(objective=self.objective, mode=self.mode, limits=limits)
        with _process_as_it_was():
            return self._run(cfg, watch, overrides)

    def _run(self, cfg: DictConfig, watch: Watch, overrides: tuple[str, ...]) -> TrialOutcome:
        trainer, module, data = build(cfg)
        trainer.callbacks.append(watch)  # type: ignore[attr-defined]
        trainer.fit(module, data)
        metrics: dict[str, float] = {"num_steps": trainer.global_step}
        if watch.status == "done":
            # The last validation of the fit is that of the final weights only if it came at the very end.
            is_validated = bool(watch.curve) and watch.curve[-1][0] == 1.0
            found = trainer.callback_metrics if is_validated else trainer.validate(module, data, verbose=False)[0]
            metrics |= {name: float(value) for name, value in found.items()}
        value = metrics.get(self.objective)
        if watch.status == "done" and value is None:
            known = ", ".join(sorted(metrics))
            raise ValueError(f"`objective` (={self.objective}) must be something that validation logs: {known}.")
        if value is not None and not math.isfinite(value):
            watch.status, watch.reason = "diverged", f"{self.objective} is {value} at the end"
        accuracy, num_classes = metrics.get(m.VAL_ACC), cfg.model.num_classes
        if watch.status == "done" and accuracy is not None and is_at_chance(accuracy, 1 / num_classes):
            watch.status = "diverged"
            watch.reason = (
                f"{m.VAL_ACC} is {accuracy:.4g} at the end, no better than guessing one of {num_classes} classes"
            )
        if watch.status == "done" and cfg.trainer.limit_test_batches != 0:
            metrics |= {name: float(v) for name, v in trainer.test(module, data, verbose=False)[0].items()}
        if watch.status == "stopped":
            value = watch.curve[-1][1]
        return TrialOutcome(
            overrides=overrides,
            status=watch.status,
            reason=watch.reason,
            value=None if watch.status == "diverged" else value,
            metrics=metrics,
            curve=tuple(watch.curve),
        )


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """End the process group that a trial began, and restore the environment that its launcher changed."""
    before, had_group = dict(os.environ), torch.distributed.is_initialized()
    try:
        yield
    finally:
        if torch.distributed.is_initialized() and not had_group:
            torch.distributed.destroy_process_group()
        # Lightning would read the seed and the port of this trial in the next one.
        for name in set(launch.LAUNCH_VARIABLES) - set(before):
            os.environ.pop(name, None)


def _quieten() -> None:
    """Silence a line about devices and loaders for every trial, which would bury what the search prints."""
    launch.ignore_lightning_warnings()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def common_of(base: tuple[str, ...], own: tuple[str, ...] = ()) -> Any:
    """Return the configuration that all trials share, as plain data, to be compared with an earlier search's.

    Args:
        base: Overrides of every trial.
        own: Overrides of one of them, to see that such a trial can be configured.

    Raises:
        ValueError: As `configured`.
    """
    configured((*base, *own), run_dir="-")
    with _no_other_hydra(), initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("train", overrides=list(base)), resolve=False)
