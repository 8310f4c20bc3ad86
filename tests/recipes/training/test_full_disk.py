"""Full disk: messages report missing rows and pictures, and the run continues."""

import resource
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lightning_hybrid.callbacks import RunReport
from lightning_hybrid.comm import CommTrace
from recipes.cli import launch
from recipes.training.csv_logger import CSVRows, read_rows
from tests.scenes import fit


@contextmanager
def no_file_beyond(num_bytes):
    """Set the kernel's limit on file sizes. A write beyond the limit fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def log(logger, step, **metrics):
    logger.log_metrics(metrics, step=step)
    logger.save()


@pytest.mark.parametrize(
    ("new_column", "val_column"),
    [({}, [None] * 4), ({"val": 0.5}, ["", "0.5", "", ""])],
    ids=["same columns", "a new column"],
)
def test_rows_that_the_disk_does_not_take_are_written_when_it_does(
    tmp_path, new_column, val_column
):
    logger = CSVRows(save_dir=tmp_path, name="", version="csv")
    path = tmp_path / "csv" / "metrics.csv"
    log(logger, 0, loss=1.0)
    whole = path.read_bytes()
    with no_file_beyond(len(whole) + 2):
        with pytest.warns(
            UserWarning,
            match=r"Rows cannot be written to .*metrics.csv \(File too large\). The run continues",
        ):
            log(logger, 1, loss=2.0, **new_column)
        log(logger, 2, loss=3.0)  # a second warning would be an error
        assert path.read_bytes() == whole
        assert list(path.parent.iterdir()) == [path]
    log(logger, 3, loss=4.0)
    rows = read_rows(path)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["loss"] for row in rows] == ["1.0", "2.0", "3.0", "4.0"]
    assert [row.get("val") for row in rows] == val_column
    with (
        no_file_beyond(path.stat().st_size),
        pytest.warns(UserWarning, match="Rows cannot be written to .*csv"),
    ):
        log(logger, 4, loss=5.0)  # warns again, because there was space in between


def test_rows_that_are_lost_at_the_end_are_counted(tmp_path):
    logger = CSVRows(save_dir=tmp_path, name="", version="csv")
    with no_file_beyond(0):
        with pytest.warns(UserWarning, match="Rows cannot be written to .*csv"):
            log(logger, 0, loss=1.0)
        logger.log_metrics({"loss": 2.0}, step=1)
        with pytest.warns(
            UserWarning,
            match=r"2 rows of metrics could not be written to .*/csv, because the disk is full",
        ):
            logger.finalize("success")


def test_a_tracker_on_a_full_disk_hides_no_other_error_and_one_that_does_not_mention_it_is_named(
    monkeypatch, tmp_path
):
    def fails(exit_code):
        raise OSError(28, "No space left on device")

    wandb = SimpleNamespace(finish=fails)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.warns(
        UserWarning, match=r"The W&B files of this run are incomplete \(No space left on device\)"
    ):
        launch.finish(1)
    wandb.run = SimpleNamespace(dir=str(tmp_path))
    wandb.finish = lambda exit_code: None
    launch.finish(0)
    with (
        no_file_beyond(0),
        pytest.warns(UserWarning, match=r"files of this run are incomplete \(File too large\)"),
    ):
        launch.finish(0)


def test_what_a_run_cannot_write_of_itself_costs_no_run(one_rank, tmp_path):
    (seen,) = fit(
        one_rank,
        callbacks=[RunReport("/proc/none")],
        max_epochs=1,
        limit_train_batches=1,
        warns=True,
    )
    warned = [message for message in seen.warnings if "was not written" in message]
    assert seen.global_step == 1
    assert len(warned) == 4
    expected = "/proc/none/summary.json was not written (No such file or directory)"
    assert warned[0].startswith(expected)
    (tmp_path / "file").touch()
    with pytest.warns(
        UserWarning,
        match=r"`report.trace_dir` .*/rank0.json could not be written \(Not a directory\)",
    ):
        CommTrace(keep_events=True).write_if_possible(tmp_path / "file" / "folder", rank=0)
