"""Trial of a hyper-parameter search, which runs `recipes/train.py` with overrides."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig, OmegaConf

from lightning_hybrid.callbacks import metrics as m
from recipes.cli import config_check, launch
from recipes.cli.world import num_ranks
from recipes.hyperparams.outcome import Outcome, Status
from recipes.hyperparams.processes import AskPruner, Report
from recipes.training import keys
from recipes.training.build import build

CONF = Path(__file__).resolve().parents[2] / "conf"


@contextmanager
def _no_other_hydra() -> Iterator[None]:
    """Context manager that deactivates the search's Hydra instance, to compose another configuration.

    Hydra allows only one instance per process.
    """
    state = GlobalHydra.instance()
    outer = state.hydra
    state.hydra = None
    try:
        yield
    finally:
        state.hydra = outer


def compose_trial(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration of `recipes/train.py` with overrides."""
    with _no_other_hydra(), initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def configured(overrides: Sequence[str], *, run_dir: str) -> DictConfig:
    """Compose and validate the configuration of a trial.

    Raises:
        ValueError: A required value is missing, or the trial would need several hosts.
    """
    cfg = compose_trial([*overrides, f"run_dir='{run_dir}'"])
    config_check.check(cfg, keys.TRAIN_KEYS)
    if cfg.trainer.num_nodes != 1:
        raise ValueError(
            f"`trainer.num_nodes` (={cfg.trainer.num_nodes}) must be 1 in a trial, because all "
            "ranks of a trial run on one host. Set trainer.num_nodes=1, and strategy.ranks_per_node to "
            "emulate nodes."
        )
    return cfg


def num_ranks_of(cfg: DictConfig) -> int:
    """Return the number of processes that a trial with this configuration starts."""
    return num_ranks(cfg.trainer.devices, cfg.trainer.num_nodes, cfg.trainer.accelerator)


def settings_of(base: Sequence[str], *, objective: str, mode: str) -> str:
    """Return a short hash of the configuration that all trials share.

    Args:
        base: Overrides of every trial.
        objective: Name of the metric that is compared.
        mode: Better direction of the objective.
    """
    config = OmegaConf.to_container(compose_trial(base), resolve=False)
    text = json.dumps([config, objective, mode], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class Watch(Callback):
    """Callback that reports the objective to the pruner, and ends trials that diverge or are pruned.

    Validation may be infrequent. The training loss is read every `log_every_n_steps` steps and at the end.

    Args:
        objective: Name of a metric that validation logs.
        ask_pruner: Function that passes a report on and returns whether the trial should stop.
    """

    def __init__(self, *, objective: str, ask_pruner: AskPruner) -> None:
        self.objective = objective
        self.ask_pruner = ask_pruner
        self.last_report: Report | None = None
        self.status: Status = "done"
        self.reason = ""

    def end(self, status: Status, reason: str) -> None:
        """Record the status of a trial that ends early, with the reason."""
        self.status = status
        self.reason = reason

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop training if the loss is not finite at a logged step or in the last step."""
        is_last = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        # Reading the loss waits for the device: do so only at logged steps, and once at the end.
        if not is_last and trainer.global_step % trainer.log_every_n_steps != 0:  # type: ignore[attr-defined]
            return
        # Averaged over ranks, so that all stop together: a rank that continued would wait for the others forever.
        loss = float(trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean"))
        if not math.isfinite(loss):
            self.end("diverged", f"train/loss is {loss} at step {trainer.global_step}")
            trainer.should_stop = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the objective, and stop training if it is not finite or the pruner decides to stop."""
        is_in_training = trainer.state.fn is TrainerFn.FITTING and not trainer.sanity_checking
        if (
            not is_in_training
            or self.status != "done"
            or self.objective not in trainer.callback_metrics
        ):
            return

        value = float(trainer.callback_metrics[self.objective])
        percent = int(100 * trainer.global_step / trainer.estimated_stepping_batches)
        if not math.isfinite(value):
            self.end("diverged", f"{self.objective} is {value} after {percent} % of the run")
        elif self.last_report is None or percent > self.last_report.percent:
            self.last_report = Report(percent=percent, value=value)
            should_stop = trainer.is_global_zero and self.ask_pruner(self.last_report)
            if trainer.strategy.broadcast(should_stop) and percent < 100:
                self.end(
                    "stopped",
                    f"{self.objective} {value:.4g} was worse than other trials after {percent} % of the "
                    "run",
                )
        trainer.should_stop = trainer.should_stop or self.status != "done"


@dataclass(frozen=True, kw_only=True)
class TrainTrial:
    """Callable that runs one trial of `recipes/train.py` with training, validation and a test.

    The test is skipped if `trainer.limit_test_batches` is 0.

    Attributes:
        base: Overrides of every trial. The overrides of a single trial come after them.
        objective: Name of a metric that validation logs.
        run_dir: Directory of the trials. Each trial writes into its own folder, if it writes anything.
    """

    base: tuple[str, ...]
    objective: str
    run_dir: str

    def __call__(self, overrides: tuple[str, ...], ask_pruner: AskPruner) -> Outcome:
        """Train with the given overrides, and return the outcome of the trial."""
        _silence_lightning()
        launch.register_resolvers()
        folder = Path(self.run_dir) / ",".join(overrides)
        cfg = configured([*self.base, *overrides], run_dir=str(folder))
        watch = Watch(objective=self.objective, ask_pruner=ask_pruner)
        return self._run(cfg, watch)

    def _run(self, cfg: DictConfig, watch: Watch) -> Outcome:
        trainer, module, data = build(cfg)
        trainer.callbacks.append(watch)  # type: ignore[attr-defined]
        trainer.fit(module, data)
        metrics: dict[str, float] = {"num_steps": trainer.global_step}
        if watch.status != "done":
            return Outcome(status=watch.status, reason=watch.reason, metrics=metrics)

        # The last validation during training used the final weights only if it ran at the very end.
        validated: Mapping[str, Any] = trainer.callback_metrics
        if watch.last_report is None or watch.last_report.percent < 100:
            validated = trainer.validate(module, data, verbose=False)[0]
        metrics.update(_numbers(validated))
        if self.objective not in metrics:
            metric_names = ", ".join(sorted(metrics))
            raise ValueError(
                f"`objective` (={self.objective}) is not a metric that validation logs. Set objective to one "
                f"of {metric_names}."
            )
        value = metrics[self.objective]
        if not math.isfinite(value):
            return Outcome(
                status="diverged", reason=f"{self.objective} is {value} at the end", metrics=metrics
            )
        accuracy = metrics.get(m.VAL_ACC)
        if accuracy is not None and is_at_chance(accuracy, 1 / cfg.model.num_classes):
            reason = (
                f"{m.VAL_ACC} is {accuracy:.4g} at the end, no better than guessing among "
                f"{cfg.model.num_classes} classes"
            )
            return Outcome(status="diverged", reason=reason, metrics=metrics)

        if cfg.trainer.limit_test_batches != 0:
            metrics.update(_numbers(trainer.test(module, data, verbose=False)[0]))
        return Outcome(status="done", value=value, metrics=metrics)


def is_at_chance(accuracy: float, chance: float) -> bool:
    """Return whether an accuracy is no better than guessing, within a tolerance of 10 %.

    The tolerance is needed because classes are not equally frequent. A network whose units are all dead always predicts
    the same class, and its loss is finite.

    >>> is_at_chance(0.105, 0.1), is_at_chance(0.12, 0.1)
    (True, False)
    """
    return accuracy <= 1.1 * chance


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _silence_lightning() -> None:
    """Suppress Lightning's messages about devices and loaders, which would clutter the search's output."""
    launch.ignore_lightning_warnings()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
