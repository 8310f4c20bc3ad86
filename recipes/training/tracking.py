"""Tracker of a run: what it receives, how a resumed run continues in it, and errors for a server out of reach."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from omegaconf import DictConfig, OmegaConf

from lightning_hybrid.callbacks import RunReport
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report.environment import code_state
from lightning_hybrid.checks import first_line
from recipes.training import csv_logger
from recipes.training.csv_logger import CSVRows

STEP_METRIC = "trainer/global_step"
"""Lightning's name for the step, against which its logger for W&B draws all curves."""


class TrackerRun(Callback):
    """Callback that saves in the checkpoint how far the loggers are, so that a resumed run continues there.

    The id of the tracker's run; of W&B's, where it sends or writes anything. The rows that CSV and W&B have: what a
    killed run logged after the checkpoint is dropped from the CSV, and written again with the same numbers by W&B. And
    the row that Lightning has not logged yet when the checkpoint of a step is written.
    """

    def __init__(self) -> None:
        self.run_id: str | None = None
        self._trainer: pl.Trainer | None = None
        self._resumed: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Note the trainer whose loggers are asked."""
        self._trainer = trainer

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Continue where the checkpoint was."""
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                num_rows = self._resumed.get("num_rows", {}).get(type(logger).__name__)
                csv_logger.go_on(logger, num_rows, self._resumed.get("row_to_come"))
        self._resumed = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the id (None without a tracker that has one), rows by logger, the row to come."""
        trainer = self._trainer
        state: dict[str, Any] = {"run_id": self.run_id}
        if trainer is not None and trainer.loggers:
            state["row_to_come"] = csv_logger.row_to_come(trainer)
            if trainer.is_global_zero:
                state["num_rows"] = {
                    type(logger).__name__: csv_logger.num_rows_of(logger)
                    for logger in trainer.loggers
                }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore. A run that began has an id by now. One with another logger saves the checkpoint's for later."""
        self._resumed = state_dict
        if self.run_id is None:
            self.run_id = state_dict["run_id"]


def saved_run_id(ckpt_path: str | None) -> str | None:
    """Return the run id in a checkpoint, or None if it has none. Raises as `saved_state`."""
    run_id: str | None = saved_state(ckpt_path).get("run_id")
    return run_id


def saved_state(ckpt_path: str | None) -> dict[str, Any]:
    """Return what `TrackerRun` saved in a checkpoint, of which nothing else is read. Nothing where it has none.

    Raises:
        ValueError: The file is no checkpoint.
    """
    if ckpt_path is None:
        return {}
    try:
        # Mapped, so that only the small callback state is read; weights only, so that no code runs.
        checkpoint = torch.load(ckpt_path, map_location="cpu", mmap=True, weights_only=True)
        state: dict[str, Any] = checkpoint.get("callbacks", {}).get(TrackerRun.__name__, {})
    except (
        Exception
    ) as error:  # torch raises anything here: RuntimeError, UnpicklingError, EOFError, KeyError
        if "weights_only" in str(error):  # whole, but with objects of the user's own
            rank_zero_warn(
                f"the tracker's run id in {ckpt_path} cannot be read: the tracker begins a new run"
            )
            return {}
        reason = first_line(error)
        raise ValueError(
            f"`resume` (={ckpt_path}) must be a whole checkpoint of Lightning's: {reason}. Give one that was saved in "
            "full, or leave `resume` out to begin again."
        ) from error
    return state


def logger_of(cfg: DictConfig, *, ckpt_path: str | None = None) -> Logger | None:
    """Make the configured logger. W&B's continues the run of the checkpoint, unless `logger.id` names another.

    Where wandb is not installed metrics go to a CSV file, with a warning: it is the default logger, not a wish.

    Raises:
        ValueError: TensorBoard was asked for and is not installed; the checkpoint cannot be read.
    """
    target = str((cfg.logger or {}).get("_target_", ""))
    if target.endswith("TensorBoardLogger") and not any(
        map(_is_installed, ("tensorboard", "tensorboardX"))
    ):
        raise ValueError(
            "`logger` (=tensorboard) needs the package tensorboard or tensorboardX, and neither is installed: nothing "
            "would be logged. Run `pip install -e '.[tensorboard]'`, or choose logger=csv or logger=wandb."
        )
    if target.endswith("CSVRows"):
        num_rows = saved_state(ckpt_path).get("num_rows", {}).get("CSVRows")
        return cast(Logger, instantiate(cfg.logger, num_rows_kept=num_rows or 0))
    if not target.endswith("WandbLogger"):
        return cast(Logger | None, instantiate(cfg.logger) or None)
    if not _is_installed("wandb"):
        rank_zero_warn(
            "wandb is not installed: metrics go to csv/metrics.csv of the run directory, as with logger=csv"
        )
        num_rows = saved_state(ckpt_path).get("num_rows", {}).get("CSVRows")
        return CSVRows(save_dir=cfg.run_dir, name="", version="csv", num_rows_kept=num_rows or 0)
    if cfg.logger.get("id"):
        run_id = None
    else:
        run_id = saved_run_id(ckpt_path)
    return cast(Logger, instantiate(cfg.logger, **({} if run_id is None else {"id": run_id})))


def begin(trainer: pl.Trainer, cfg: DictConfig, *, overrides: Sequence[str]) -> None:
    """Give loggers and report resolved configuration, overrides and state of the code, before training.

    W&B's run begins here, while nothing waits for this process yet.

    Raises:
        ValueError: W&B refuses the key, or cannot be reached.
    """
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    content = config | {"overrides": list(overrides), "code": code_state(Path(__file__).parent)}
    for logger in trainer.loggers:
        with _words_for_wandb():
            logger.log_hyperparams(content)
        if "wandb" in sys.modules and type(logger).__name__ == "WandbLogger":
            _begin_wandb(trainer, logger)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunReport):
            callback.config = config
            callback.overrides = content["overrides"]
            callback.code_dir = Path(__file__).parent


@rank_zero_only
def _begin_wandb(trainer: pl.Trainer, logger: Any) -> None:
    run = logger.experiment
    if run.disabled:
        return
    for metric in m.METRICS.values():
        if metric.best is not None:
            run.define_metric(
                metric.name, step_metric=STEP_METRIC, step_sync=True, summary=metric.best
            )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TrackerRun):
            callback.run_id = run.id


@rank_zero_only
def send_report(trainer: pl.Trainer, run_dir: str) -> None:
    """Give W&B the page of the run as an artifact, where it is online: offline it would copy it next to itself."""
    page = Path(run_dir, "run.html")
    for logger in trainer.loggers:
        if type(logger).__name__ == "WandbLogger" and page.exists():
            run = cast(Any, logger).experiment
            if not (run.disabled or run.offline):
                run.log_artifact(str(page), name=f"report-{run.id}", type="report")


@contextmanager
def _words_for_wandb() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        wandb: Any = sys.modules.get("wandb")
        if wandb is None or not isinstance(error, wandb.errors.Error):
            raise
        reason = first_line(error)
        raise ValueError(
            f"`logger.offline` (=False) needs a W&B server that lets this run in: {reason}. Check the key "
            "(`wandb login`, or WANDB_API_KEY) and the network; or leave `logger.offline` and WANDB_MODE out: the run "
            "is then written to its directory, and `wandb sync` sends it later."
        ) from error


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None
