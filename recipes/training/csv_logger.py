"""CSV logger that resumes without duplicate or missing rows."""

from __future__ import annotations

import csv
import io
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from lightning_hybrid.atomic_file import atomic_path, part_path, sync


class _Writer(ExperimentWriter):
    """CSV writer that never leaves incomplete rows in the file, even if the disk is full.

    Rows that cannot be written stay in memory until the disk has space. Training continues.
    """

    is_failing = False

    def save(self) -> None:
        """Write the rows that are not yet on disk to the CSV file."""
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        columns = sorted({*self.metrics_keys, *(name for row in self.metrics for name in row)})
        try:
            if columns == self.metrics_keys and path.is_file():
                _append(path, self.metrics, columns)
            else:
                write_rows(path, read_rows(path) + cast(list[Any], self.metrics), columns)
        except OSError as error:
            if not self.is_failing:
                rank_zero_warn(
                    f"Rows cannot be written to {path} ({error.strerror}). The run continues, and writes them "
                    "once the disk has space again. Free some space on that disk."
                )
            self.is_failing = True
            return
        if self.is_failing:
            rank_zero_info(f"All rows have now been written to {path}.")
        self.metrics_keys = columns
        self.metrics = []
        self.is_failing = False


class CSVRows(CSVLogger):
    """Subclass of Lightning's `CSVLogger` that continues the file of an earlier run.

    Lightning's logger deletes the file of an earlier run. This logger keeps the rows that were logged before the
    checkpoint, and drops later rows, because the resumed run writes them again.

    Args:
        num_rows_kept: Number of rows that were logged before the checkpoint. 0 starts a new file.
        **kwargs: Arguments of `CSVLogger`.
    """

    def __init__(self, *, num_rows_kept: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._num_rows_kept = num_rows_kept
        self.num_rows = 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Writer of the CSV file. The first access drops rows that were logged after the checkpoint."""
        if self._experiment is None:
            path = Path(self.log_dir) / ExperimentWriter.NAME_METRICS_FILE
            part = part_path(path)
            # If the process is killed between Lightning's deletion and the rename below, only the part file exists.
            kept_rows = read_rows(path if path.is_file() else part)[: self._num_rows_kept]
            if len(kept_rows) < self._num_rows_kept:
                rank_zero_warn(
                    f"The file {path} has {len(kept_rows)} rows, but the checkpoint expects "
                    f"{self._num_rows_kept}, so the other rows were lost. All logged metrics are in "
                    "curves.json of the run directory."
                )
            columns = sorted({name for row in kept_rows for name in row})
            if kept_rows:
                # renamed below, because Lightning's writer first deletes the file
                write_rows(part, kept_rows, columns)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Experiment logs directory")
                self._experiment = _Writer(log_dir=self.log_dir)
            if kept_rows:
                os.replace(part, path)
                self._experiment.metrics_keys = columns
            self.num_rows = len(kept_rows)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log one row of metrics."""
        super().log_metrics(metrics, step)
        self.num_rows += 1

    @rank_zero_only
    def sync(self) -> None:
        """Write all logged rows to disk with fsync, before their number is stored in a checkpoint."""
        self.save()
        path = Path(self.log_dir) / ExperimentWriter.NAME_METRICS_FILE
        if path.is_file():
            # writing the checkpoint reports errors of this disk
            with (
                suppress(OSError),
                path.open("rb") as file,
            ):
                os.fsync(file.fileno())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the logger, and warn if rows could not be written because the disk is full."""
        super().finalize(status)
        if self._experiment is not None and self._experiment.metrics:
            rank_zero_warn(
                f"{len(self._experiment.metrics)} rows of metrics could not be written to "
                f"{self.log_dir}, because the disk is full. Free some space before the next run."
            )


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file as dictionaries, or return an empty list if the file does not exist."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Write a CSV file with a header atomically."""
    with atomic_path(path) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
        sync(file)


def _append(path: Path, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Append rows to a CSV file, and remove partially written rows if an error occurs."""
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns).writerows(rows)
    content = text.getvalue().encode()
    num_bytes = path.stat().st_size
    try:
        with path.open("ab", buffering=0) as file:
            # Usually one write is enough, so a killed process leaves no incomplete row. A full disk accepts only some
            # of the bytes, and the next write raises the error.
            while content:
                content = content[file.write(content) :]
    except OSError:
        # Remove the rows that were written, because the next attempt writes all rows again.
        os.truncate(path, num_bytes)
        raise


def num_rows_of(logger: Any) -> int | None:
    """Return the number of rows that a CSV or W&B logger has written, or None for other loggers."""
    if isinstance(logger, CSVRows):
        logger.sync()
        return logger.num_rows
    if type(logger).__name__ == "WandbLogger":
        step = getattr(logger.experiment, "step", None)
        if isinstance(step, int):
            return step
        return None
    return None


def row_to_come(trainer: pl.Trainer) -> dict[str, Any] | None:
    """Return metrics of the current step that Lightning has not yet passed to the loggers, or None.

    Lightning 2.6 lets `ModelCheckpoint` save after a step before it passes the metrics of that step to the loggers. A
    run that resumes from this checkpoint would never log them.
    """
    loop = trainer.fit_loop.epoch_loop
    connector = trainer._logger_connector
    progress: Any = loop.batch_progress.current
    # Between `processed` and `completed`, the step has been made and its metrics are not logged yet.
    is_between = trainer.training and progress.processed > progress.completed
    if not is_between or loop._should_accumulate() or not connector.should_update_logs:
        return None
    values = {
        name: float(value) for name, value in cast(dict[str, Any], connector.metrics["log"]).items()
    }
    step = values.pop("step", None)
    values.setdefault("epoch", trainer.current_epoch)
    if values:
        return {
            "step": loop._batches_that_stepped if step is None else int(step),
            "metrics": values,
        }
    return None


def go_on(logger: Any, num_rows: int | None, row: dict[str, Any] | None) -> None:
    """Make the logger of a resumed run append after the rows logged before the checkpoint.

    `row` contains the metrics of the checkpoint's step if they were not logged yet. They are logged now.
    """
    if num_rows and type(logger).__name__ == "WandbLogger":
        logger.experiment.log({}, step=num_rows)
    if row is not None:
        logger.log_metrics(row["metrics"], step=row["step"])
