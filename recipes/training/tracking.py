"""Setup of loggers, including the logging of the configuration and the continuation of W&B runs on resume."""

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
"""Lightning's name for the step, which its W&B logger uses as the x-axis of all curves."""


class TrackerRun(Callback):
    """Callback that saves the state of the loggers in checkpoints, so that a resumed run continues them.

    The state has three items: the id of the W&B run, the number of rows that the CSV and W&B loggers have written, and
    the metrics that Lightning has not logged yet when the checkpoint of a step is written. Rows that a killed run
    logged after its checkpoint are dropped from the CSV file, and W&B writes them again with the same numbers.
    """

    def __init__(self) -> None:
        self.run_id: str | None = None
        self._trainer: pl.Trainer | None = None
        self._resumed: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Store the trainer, because `state_dict` needs its loggers."""
        self._trainer = trainer

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the loggers of a resumed run continue after the rows that were logged before the checkpoint."""
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                num_rows = self._resumed.get("num_rows", {}).get(type(logger).__name__)
                csv_logger.go_on(logger, num_rows, self._resumed.get("row_to_come"))
        self._resumed = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the W&B run id, the number of rows in each logger, and metrics that are not logged yet."""
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
        """Restore the state of the loggers from a checkpoint, but keep a W&B run id that is already set.

        A run with another logger keeps the id of the checkpoint, so that its own checkpoints contain the id too.
        """
        self._resumed = state_dict
        if self.run_id is None:
            self.run_id = state_dict["run_id"]


def saved_run_id(ckpt_path: str | None) -> str | None:
    """Return the W&B run id that a checkpoint contains, or None if it contains none.

    Raises:
        ValueError: As in `saved_state`.
    """
    run_id: str | None = saved_state(ckpt_path).get("run_id")
    return run_id


def saved_state(ckpt_path: str | None) -> dict[str, Any]:
    """Return the state of the loggers that `TrackerRun` saved in a checkpoint, or an empty dictionary.

    Raises:
        ValueError: The file is not a complete checkpoint.
    """
    if ckpt_path is None:
        return {}
    try:
        # Memory-mapped, so that only the small callback state is read. `weights_only`, so that no code is executed.
        checkpoint = torch.load(ckpt_path, map_location="cpu", mmap=True, weights_only=True)
        state: dict[str, Any] = checkpoint.get("callbacks", {}).get(TrackerRun.__name__, {})
    except Exception as error:
        # torch may raise RuntimeError, UnpicklingError, EOFError or KeyError.
        if "weights_only" in str(error):
            # The file is complete, but it contains objects of the user's own classes.
            rank_zero_warn(
                f"The id of the W&B run in {ckpt_path} cannot be read, so W&B starts a new run."
            )
            return {}
        reason = first_line(error)
        raise ValueError(
            f"`resume` (={ckpt_path}) cannot be read as a Lightning checkpoint: {reason}. Use "
            "another checkpoint, or leave `resume` out to start again."
        ) from error
    return state


def logger_of(cfg: DictConfig, *, ckpt_path: str | None = None) -> Logger | None:
    """Create the configured logger, which continues the checkpoint's log if it is a W&B or CSV logger.

    If `logger.id` is set, W&B uses this run instead. If wandb is not installed, metrics are written to a CSV file with
    a warning, because W&B is the default logger.

    Raises:
        ValueError: TensorBoard is configured but not installed, or the checkpoint cannot be read.
    """
    target = str((cfg.logger or {}).get("_target_", ""))
    if target.endswith("TensorBoardLogger") and not any(
        map(_is_installed, ("tensorboard", "tensorboardX"))
    ):
        raise ValueError(
            "`logger` (=tensorboard) needs the package tensorboard or tensorboardX, but neither "
            "is installed. Run pip install 'lightning-hybrid[tensorboard]', or set logger=csv or "
            "logger=wandb."
        )
    if target.endswith("CSVRows"):
        num_rows = saved_state(ckpt_path).get("num_rows", {}).get("CSVRows")
        return cast(Logger, instantiate(cfg.logger, num_rows_kept=num_rows or 0))
    if not target.endswith("WandbLogger"):
        return cast(Logger | None, instantiate(cfg.logger) or None)
    if not _is_installed("wandb"):
        rank_zero_warn(
            "wandb is not installed, so metrics are written to csv/metrics.csv of the run "
            "directory, as with logger=csv. Run pip install wandb to use W&B."
        )
        num_rows = saved_state(ckpt_path).get("num_rows", {}).get("CSVRows")
        return CSVRows(save_dir=cfg.run_dir, name="", version="csv", num_rows_kept=num_rows or 0)
    if cfg.logger.get("id"):
        run_id = None
    else:
        run_id = saved_run_id(ckpt_path)
    return cast(Logger, instantiate(cfg.logger, **({} if run_id is None else {"id": run_id})))


def begin(trainer: pl.Trainer, cfg: DictConfig, *, overrides: Sequence[str]) -> None:
    """Start the W&B run, and log the resolved configuration, the overrides and the git state.

    The W&B run starts here, because no other rank is waiting for this process yet.

    Raises:
        ValueError: W&B rejects the key, or cannot be reached.
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
    """Upload the HTML report of the run to W&B as an artifact, unless W&B is offline or disabled.

    In offline mode, W&B would only make a second copy of the page.
    """
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
            f"`logger.offline` (=False) needs a W&B server that accepts this run: {reason}. Check "
            "the key (`wandb login`, or WANDB_API_KEY) and the network. Alternatively, leave "
            "`logger.offline` and WANDB_MODE out to write the run to its directory, and upload it "
            "later with `wandb sync`."
        ) from error


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None
