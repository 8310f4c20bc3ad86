"""Checkpoint files, which are either complete or absent, and detection of damaged files."""

import errno
import os
import stat
import sys
import zipfile
from types import ModuleType
from unittest import TestCase

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_utilities.core import rank_zero

from lightning_hybrid import DurableCheckpointIO, atomic_file
from lightning_hybrid.checkpoint import file as cf
from lightning_hybrid.checkpoint.file import (
    CheckpointWriteError,
    DamagedCheckpointError,
    RefusedCheckpointError,
)

WHOLE = {"state_dict": {"w": torch.arange(5000.0)}, "global_step": 7}


def checkpoint(step):
    return {"state_dict": {"w": torch.full((3000,), float(step))}, "global_step": step}


def step_in(path):
    return DurableCheckpointIO().load_checkpoint(path)["global_step"]


def test_torch_and_lightning_read_the_file(tmp_path):
    path = tmp_path / "some.ckpt"
    cf.write_checkpoint(WHOLE, path)
    for result in (
        torch.load(path, weights_only=True),
        torch.load(path, weights_only=True, mmap=True),
        TorchCheckpointIO().load_checkpoint(path),
        DurableCheckpointIO().load_checkpoint(path),
    ):
        assert torch.equal(result["state_dict"]["w"], WHOLE["state_dict"]["w"])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert cf.check_whole(path)


def test_a_file_of_stock_lightning_loads_and_is_logged_as_unverified(tmp_path):
    TorchCheckpointIO().save_checkpoint(WHOLE, tmp_path / "stock.ckpt")
    # The logger of Fabric or of the trainer, whichever was imported last.
    with TestCase().assertLogs(rank_zero.log) as logs:
        assert DurableCheckpointIO().load_checkpoint(tmp_path / "stock.ckpt")["global_step"] == 7
    assert "stock.ckpt has no checksum" in logs.output[0]


LENGTHS = {"empty": 0, "a header": 4, "half": 10_000, "a byte less": -1}


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_truncated_file_is_named(tmp_path, length, ours):
    path = tmp_path / "torn.ckpt"
    if ours:
        io = DurableCheckpointIO()
    else:
        io = TorchCheckpointIO()
    io.save_checkpoint(WHOLE, path)
    path.write_bytes(path.read_bytes()[: LENGTHS[length]])
    with pytest.raises(DamagedCheckpointError, match=r"`.*torn\.ckpt` is damaged: "):
        DurableCheckpointIO().load_checkpoint(path)


def test_a_flipped_bit_anywhere_and_an_extra_byte_are_errors(tmp_path):
    """Every 97th byte and each of the last 150 bytes are flipped, in weights, pickle, directory, end and checksum."""
    path = tmp_path / "flipped.ckpt"
    cf.write_checkpoint(WHOLE, path)
    content = path.read_bytes()
    offsets = [*range(0, len(content), 97), *range(len(content) - 150, len(content))]
    damaged_contents = [content + b"\0"]
    for offset in offsets:
        damaged = bytearray(content)
        damaged[offset] ^= 1 << (offset % 8)
        damaged_contents.append(bytes(damaged))
    for damaged in damaged_contents:
        path.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError):
            DurableCheckpointIO().load_checkpoint(path)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path):
    torch.save(
        {"state_dict": {}, "callbacks": Evil(str(tmp_path / "was_here"))}, tmp_path / "evil.ckpt"
    )
    with pytest.raises(
        RefusedCheckpointError,
        match=r"contains objects other than tensors and plain data \(posix.mkdir\)\. .* the file was not loaded",
    ):
        DurableCheckpointIO().load_checkpoint(tmp_path / "evil.ckpt")
    assert not (tmp_path / "was_here").exists()


def test_a_checkpoint_that_will_not_load_is_reported_when_it_is_saved(tmp_path):
    with pytest.warns(
        UserWarning, match=r"contains objects other than .*mkdir.*weights_only=False"
    ):
        DurableCheckpointIO().save_checkpoint(
            {"hyper_parameters": {"a": Evil("a")}}, tmp_path / "own.ckpt"
        )


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
@pytest.mark.parametrize("missing", ["class", "module"])
@pytest.mark.filterwarnings("ignore:The checkpoint .* contains objects")
def test_a_file_whose_classes_no_longer_exist_is_not_called_damaged(
    tmp_path, monkeypatch, missing, ours
):
    module = ModuleType("configs_of_user")
    module.Config = type("Config", (), {"__module__": module.__name__})
    path = tmp_path / "old.ckpt"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        io = DurableCheckpointIO() if ours else TorchCheckpointIO()
        io.save_checkpoint({"hyper_parameters": {"config": module.Config()}}, path)
    if missing == "class":
        del module.Config
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises((AttributeError, ImportError), match=r"'(Config|configs_of_user)'"):
        DurableCheckpointIO().load_checkpoint(path, weights_only=False)


def test_a_device_that_is_missing_is_not_called_damage(tmp_path):
    path = tmp_path / "whole.ckpt"
    cf.write_checkpoint(WHOLE, path)
    with pytest.raises(RuntimeError, match="device_of_nobody"):
        DurableCheckpointIO().load_checkpoint(path, map_location="device_of_nobody")


def test_a_file_system_that_cannot_sync_directories_keeps_checkpoints(tmp_path, monkeypatch):
    sync = os.fsync

    def sync_of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_of_files)
    for step in (1, 2):
        cf.write_checkpoint(checkpoint(step), tmp_path / "last.ckpt")
    assert step_in(tmp_path / "last.ckpt") == 2
    assert step_in(tmp_path / "last.previous.ckpt") == 1


class Killed(BaseException):
    """Exception in place of SIGKILL. None of our code runs after it."""


class Witness:
    """Recorder of file system calls in order, which ends the process before the n-th call."""

    def __init__(self, monkeypatch, kill_before=None):
        self.calls = []
        self.kill_before = kill_before
        for name in ("fsync", "link", "replace"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))
        monkeypatch.setattr(cf._ChecksumFile, "_put", self._noting("write", cf._ChecksumFile._put))
        for module in (atomic_file, cf):
            monkeypatch.setattr(module, "remove_quietly", self._unlink)

    def _noting(self, name, function):
        def noting(*args, **kwargs):
            if len(self.calls) == self.kill_before:
                raise Killed
            call = name
            if name == "fsync":
                is_folder = os.path.isdir(f"/proc/self/fd/{args[0]}")
                call = "fsync folder" if is_folder else "fsync file"
            self.calls.append(call)
            return function(*args, **kwargs)

        return noting

    def _unlink(self, path):
        if len(self.calls) != self.kill_before:
            path.unlink(missing_ok=True)


def test_content_is_on_disk_before_its_name_and_the_name_before_the_old_file_is_removed(
    tmp_path, monkeypatch
):
    cf.write_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    witness = Witness(monkeypatch)
    cf.write_checkpoint(checkpoint(2), tmp_path / "last.ckpt")
    calls = [call for call in witness.calls if call != "write"]
    assert calls == ["fsync file", "link", "replace", "fsync folder", "replace", "fsync folder"]
    assert witness.calls.index("fsync file") == witness.calls.count("write")


def test_a_kill_at_any_moment_of_writing_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    moment = 0
    is_over = False
    while not is_over:
        folder = tmp_path / str(moment)
        path = folder / "last.ckpt"
        for step in (1, 2):
            cf.write_checkpoint(checkpoint(step), path)
        with monkeypatch.context() as patch:
            Witness(patch, kill_before=moment)
            try:
                cf.write_checkpoint(checkpoint(3), path)
                is_over = True
            except (Killed, RuntimeError):  # torch's writer raises its own error
                pass
        assert step_in(path) in (2, 3)
        assert step_in(cf.previous_of(path)) in (1, 2)
        cf.write_checkpoint(checkpoint(4), path)
        assert sorted(os.listdir(folder)) == ["last.ckpt", "last.previous.ckpt"]
        assert step_in(path) == 4
        moment += 1
    assert moment > 10


def refuse_links(monkeypatch):
    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)


def test_without_hard_links_the_previous_file_is_renamed(tmp_path, monkeypatch):
    refuse_links(monkeypatch)
    for step in (1, 2, 3):
        cf.write_checkpoint(checkpoint(step), tmp_path / "last.ckpt")
    assert (step_in(tmp_path / "last.ckpt"), step_in(tmp_path / "last.previous.ckpt")) == (3, 2)


def test_without_hard_links_a_failed_write_restores_the_name_of_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    cf.write_checkpoint(checkpoint(1), path)
    refuse_links(monkeypatch)
    replace = os.replace

    def refuse_new_file(source, target):
        if str(source).endswith(".part"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_new_file)
    with pytest.raises(CheckpointWriteError, match="The previous checkpoint at this path"):
        cf.write_checkpoint(checkpoint(2), path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert step_in(path) == 1


@pytest.mark.parametrize(
    ("settings", "names"),
    [({}, {"last.ckpt"}), ({"keep_previous": True}, {"last.ckpt", "last.previous.ckpt"})],
)
def test_the_previous_file_is_kept_only_with_keep_previous(tmp_path, settings, names):
    """By default, the folder contains the same files as under `ddp`."""
    io = DurableCheckpointIO(**settings)
    for step in (1, 2):
        io.save_checkpoint(checkpoint(step), tmp_path / "last.ckpt")
    assert set(os.listdir(tmp_path)) == names


def fails_with(number, monkeypatch):
    def fail(self, view):
        self.error = OSError(number, os.strerror(number))
        raise self.error

    monkeypatch.setattr(cf._ChecksumFile, "_put", fail)


WORDS = {
    errno.ENOSPC: "disk is full",
    errno.EROFS: "disk is read-only",
    errno.EFBIG: r"exceeds the size limit \(`ulimit -f`",
}


@pytest.mark.parametrize("number", WORDS)
def test_an_error_of_the_disk_keeps_its_message_and_the_old_file(tmp_path, monkeypatch, number):
    path = tmp_path / "last.ckpt"
    DurableCheckpointIO().save_checkpoint(checkpoint(1), path)
    fails_with(number, monkeypatch)
    with pytest.raises(
        CheckpointWriteError,
        match=rf"{WORDS[number]}.*The previous checkpoint at this path is undamaged",
    ) as error:
        DurableCheckpointIO().save_checkpoint(checkpoint(2), path)
    assert error.value.errno == number
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert step_in(path) == 1
