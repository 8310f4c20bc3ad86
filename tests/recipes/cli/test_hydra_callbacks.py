"""Checks of every recipe before Hydra writes files: environments, secrets, and streams that may close."""

import io
import logging
import os
import sys

import pytest
from omegaconf import OmegaConf

from recipes.cli import launch, stdio
from recipes.cli.hydra_callbacks import BeforeRun
from tests.checkout import ROOT, tracked_in
from tests.recipes.composed import composed

MARKER = "0123456789abcdef" * 3


@pytest.fixture(autouse=True)
def streams_as_they_were(monkeypatch):
    yield
    stdio.restore_streams()


def test_every_recipe_looks_around_before_hydra_writes():
    for path in tracked_in(ROOT / "conf", "*.yaml"):
        if path.stem != "job":
            defaults = OmegaConf.load(path).defaults
            assert "job" in defaults or "/job" in defaults, path
    callbacks = composed("train", return_hydra_config=True).hydra.callbacks
    assert callbacks.before_run._target_ == "recipes.cli.hydra_callbacks.BeforeRun"


@pytest.mark.parametrize("mode", ["run", "sweep"])
def test_a_directory_that_takes_nothing_ends_the_program_in_words_on_rank_zero(mode, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if mode == "run":
        start = BeforeRun().on_run_start
    else:
        start = BeforeRun().on_multirun_start
    cfg = composed("train", f"hydra.{mode}.dir=/proc/none/x", return_hydra_config=True)
    with pytest.raises(
        SystemExit,
        match=r"^error: `hydra.run.dir` \(=/proc/none/x\) cannot be written to",
    ):
        start(cfg)
    monkeypatch.setattr(launch, "is_rank_zero", lambda: False)
    BeforeRun().on_run_start(cfg)  # other ranks write nothing


@pytest.mark.parametrize("key", ["logger.settings.api_key", "data.password", "logger.tags"])
def test_a_key_in_the_configuration_is_refused_and_not_repeated(key, tmp_path, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if key == "logger.tags":
        override = f"{key}=[{{api_key: {MARKER}}}]"
    else:
        override = f"+{key}={MARKER}"
    cfg = composed("train", override, f"hydra.run.dir={tmp_path}/x", return_hydra_config=True)
    with pytest.raises(
        SystemExit, match=r"must not be in the configuration.* Set WANDB_API_KEY"
    ) as message:
        BeforeRun().on_run_start(cfg)
    assert MARKER not in str(message.value)
    assert not (tmp_path / "x").exists()


def test_a_reader_that_leaves_ends_no_program(monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        stdio.outlive_streams()
        print("heard", flush=True)
        assert os.read(reader, 100) == b"heard\n"
        os.close(reader)
        for _ in range(3):
            print("not heard", flush=True)
        message = sys.stderr.getvalue()
        stdio.restore_streams()
        assert sys.stdout is out
    assert message == (
        "Standard output cannot be written (Broken pipe). Further output is dropped, and the run continues.\n"
    )


def test_a_full_disk_behind_standard_error_ends_no_program(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        stdio.outlive_streams()
        print("x" * 10_000, file=sys.stderr)
        print("y", file=sys.stderr, flush=True)
        assert sys.stderr is not full
        stdio.restore_streams()
        assert sys.stderr is full


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_log_file_that_takes_nothing_prints_no_traceback(monkeypatch):
    handler = logging.StreamHandler(Full())
    stderr = io.StringIO()
    record = logging.LogRecord("a", logging.INFO, "b", 1, "words", None, None)
    monkeypatch.setattr(sys, "stderr", stderr)
    stdio.outlive_streams()
    handler.emit(record)
    assert stderr.getvalue() == ""
    stdio.restore_streams()
    handler.emit(record)  # without the fix, this would print a traceback
    assert "No space left on device" in stderr.getvalue()
