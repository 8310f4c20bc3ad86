"""Rows of metrics that a resumed run neither repeats nor leaves out."""

from __future__ import annotations

import csv
import os
import warnings
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn


class _Writer(ExperimentWriter):
    """Lightning's, which at a new column writes the whole file anew: here in one go, a kill loses no row."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = Path(self.metrics_file_path)
        write_rows(path, read_rows(path), fieldnames)


class CSVRows(CSVLogger):
    """Lightning's `CSVLogger`, whose file a resumed run goes on in.

    Lightning's deletes what an earlier run has left in the file. This keeps the rows that the checkpoint knows, and
    drops those that were written after it: the resumed run writes them again.

    Args:
        num_rows_kept: Rows of the file that the checkpoint knows; 0 = begin anew.
        **kwargs: As in `CSVLogger`.
    """

    def __init__(self, *, num_rows_kept: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._num_rows_kept = num_rows_kept
        self.num_rows = 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer; at the first call, the file is cut to the kept rows."""
        if self._experiment is None:
            path = Path(self.log_dir) / ExperimentWriter.NAME_METRICS_FILE
            part = _part_of(path)
            kept = read_rows(path if path.is_file() else part)[: self._num_rows_kept]
            if len(kept) < self._num_rows_kept:
                rank_zero_warn(
                    f"{path} has {len(kept)} rows, and the checkpoint knows {self._num_rows_kept}: the others were "
                    "lost with the machine. curves.json of the run directory has all that training logged."
                )
            columns = sorted({name for row in kept for name in row})
            if kept:
                write_rows(path, kept, columns, is_moved=False)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Experiment logs directory")
                self._experiment = _Writer(log_dir=self.log_dir)
            if kept:
                os.replace(part, path)
                self._experiment.metrics_keys = columns
            self.num_rows = len(kept)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """One row more."""
        super().log_metrics(metrics, step)
        self.num_rows += 1

    @rank_zero_only
    def sync(self) -> None:
        """All rows so far on the disk, as the checkpoint that counts them will be."""
        self.save()
        path = Path(self.log_dir) / ExperimentWriter.NAME_METRICS_FILE
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]], columns: list[str], *, is_moved: bool = True) -> None:
    """Write a CSV file whole or not at all; with `is_moved=False` beside its place, for the caller to move it."""
    part = _part_of(path)
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    if is_moved:
        os.replace(part, path)


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def num_rows_of(logger: Any) -> int | None:
    """Rows that a logger has; None for those that are not asked."""
    if isinstance(logger, CSVRows):
        logger.sync()
        return logger.num_rows
    if type(logger).__name__ == "WandbLogger":
        step = getattr(logger.experiment, "step", None)
        return step if isinstance(step, int) else None
    return None


def row_to_come(trainer: pl.Trainer) -> dict[str, Any] | None:
    """What Lightning will log of the step just made, where it has not yet.

    `ModelCheckpoint` writes after a step before Lightning 2.6 hands the step's metrics to the loggers: a run that is
    resumed from there never would.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    progress: Any = loop.batch_progress.current
    is_between = trainer.training and progress.processed > progress.completed
    if not is_between or loop._should_accumulate() or not connector.should_update_logs:
        return None
    values = {name: float(value) for name, value in cast(dict[str, Any], connector.metrics["log"]).items()}
    step = values.pop("step", None)
    values.setdefault("epoch", trainer.current_epoch)
    return {"step": loop._batches_that_stepped if step is None else int(step), "metrics": values} if values else None


def go_on(logger: Any, num_rows: int | None, row: dict[str, Any] | None) -> None:
    """Let a logger of a resumed run count on from the checkpoint, and log what the checkpoint came before."""
    if num_rows and type(logger).__name__ == "WandbLogger":
        logger.experiment.log({}, step=num_rows)
    if row is not None:
        logger.log_metrics(row["metrics"], step=row["step"])
