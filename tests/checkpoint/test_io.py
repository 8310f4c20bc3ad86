"""Lightning's seam to checkpoint files: at once or during training, errors, and what its callback expects."""

from __future__ import annotations

import errno
import os
import pickle
import threading
import warnings
from argparse import Namespace
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_hybrid import DurableCheckpointIO, HybridAllReduceStrategy
from lightning_hybrid.checkpoint import file as cf
from lightning_hybrid.checkpoint.file import CheckpointWriteError
from tests import toy
from tests.checkpoint.test_file import checkpoint, fails_with, step_in


def test_a_run_may_go_on_when_a_checkpoint_is_not_written(tmp_path, monkeypatch):
    io = DurableCheckpointIO(on_error="warn")
    with monkeypatch.context() as patch:
        fails_with(errno.ENOSPC, patch)
        with pytest.warns(UserWarning, match=r"the disk is full.* The run goes on without a newer checkpoint"):
            io.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    io.save_checkpoint(checkpoint(2), tmp_path / "last.ckpt")
    assert step_in(tmp_path / "last.ckpt") == 2


@pytest.mark.parametrize("given", [{"max_in_memory": 0}, {"timeout_s": 0}, {"on_error": "ignore"}], ids=str)
def test_settings_that_cannot_work_are_refused(given):
    with pytest.raises(ValueError, match=rf"`{next(iter(given))}` \(="):
        DurableCheckpointIO(**given)


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Text(str):
    pass


Pair = namedtuple("Pair", "one other")


@dataclass
class Sizes:
    widths: list


def hyper_parameters():
    """One of each type that Lightning's own saving keeps."""
    values = {
        "Namespace": Namespace(lr=0.1, inner=Namespace(a=1)),
        "AttributeDict": AttributeDict(a=AttributeDict(b=1)),
        "Path": Path("a/b"),
        "Enum": Colour.RED,
        "IntEnum": Level.HIGH,
        "Text": Text("a"),
        "float32 of numpy": np.float32(0.5),
        "dataclass": Sizes([1, 2]),
        "class": Sizes,
        "function": hyper_parameters,
        "namedtuple": Pair(1, 2),
        "set": {1, 2},
        "OrderedDict": OrderedDict(b=1, a=2),
        "defaultdict": defaultdict(list, {1: [2]}),
        "int as key": {1: {2.5: True, None: (1, [2])}},
        "dtype": torch.float16,
        "device": torch.device("cpu"),
    }
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return values
    values["DictConfig"] = OmegaConf.create({"a": {"b": 1}, "twice": "${a.b}", "path": None, "widths": [1, "${a.b}"]})
    values["structured"] = OmegaConf.structured(Sizes([1]))
    return values


@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
@pytest.mark.filterwarnings("ignore:The checkpoint .* holds objects")
def test_what_is_saved_is_what_lightnings_own_plugin_loads(tmp_path, in_background, weights_only):
    """In type as in value, or it is refused as it is there."""
    durable, lightnings = DurableCheckpointIO(in_background=in_background), TorchCheckpointIO()
    num_refused = 0
    for name, value in hyper_parameters().items():
        expected, found = [
            _type_and_value(io, value, tmp_path / "a.ckpt", weights_only) for io in (lightnings, durable)
        ]
        assert found == expected, name
        num_refused += expected == "UnpicklingError"
    durable.teardown()
    assert (num_refused == 0) == (weights_only is False)


def _save_and_wait(io, checkpoint, path):
    io.save_checkpoint(checkpoint, path)
    io.teardown()


def _type_and_value(io, value, path, weights_only):
    io.save_checkpoint({"hyper_parameters": {"value": value, "again": value}, "epoch": 1}, path)
    try:
        found = io.load_checkpoint(path, weights_only=weights_only)["hyper_parameters"]
    except pickle.UnpicklingError:
        return "UnpicklingError"
    assert found["again"] is found["value"]
    found = found["value"]
    return type(found), found, repr(found), getattr(found, "__dict__", None) and sorted(vars(found))


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
def test_a_configuration_keeps_its_interpolations_where_its_classes_are_declared_safe(tmp_path, in_background):
    omegaconf = pytest.importorskip("omegaconf")
    io, config = DurableCheckpointIO(in_background=in_background), omegaconf.OmegaConf.create({"a": 1, "b": "${a}"})
    node, base = omegaconf.nodes.AnyNode, omegaconf.base
    classes = [omegaconf.DictConfig, node, base.ContainerMetadata, base.Metadata, Any, int, dict, defaultdict]
    with pytest.warns(UserWarning, match=r"holds objects \(=.*DictConfig.*weights_only=False only, or after torch"):
        _save_and_wait(io, {"hyper_parameters": {"cfg": config}}, tmp_path / "a.ckpt")
    with torch.serialization.safe_globals(classes):
        found = io.load_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"]["cfg"]
    found.a = 2
    assert (type(found), found.b) == (omegaconf.DictConfig, 2)


def test_a_file_of_an_earlier_version_with_plain_hyper_parameters_loads(tmp_path):
    old = {"hyper_parameters": {"cfg": {"a": 1, "b": 1}, "folder": "a/b"}, "hparams_name": "kwargs", "epoch": 1}
    cf.write_checkpoint(old, tmp_path / "a.ckpt")
    assert DurableCheckpointIO().load_checkpoint(tmp_path / "a.ckpt") == old


@pytest.fixture
def gate(monkeypatch):
    """Holds the writing thread until it is opened."""
    gate, write = threading.Event(), cf.write_checkpoint

    def held(*args, **kwargs):
        assert gate.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr("lightning_hybrid.checkpoint.io.write_checkpoint", held)
    yield gate
    gate.set()


def test_what_is_written_is_the_moment_of_saving(tmp_path, gate):
    io, state = DurableCheckpointIO(in_background=True), checkpoint(1)
    tied = {"one": state["state_dict"]["w"], "other": state["state_dict"]["w"]}
    io.save_checkpoint({**state, "tied": tied}, tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").exists()
    state["state_dict"]["w"].zero_()
    state["state_dict"]["new"] = 1
    gate.set()
    found = io.load_checkpoint(tmp_path / "last.ckpt")  # waits for it
    assert found["state_dict"].keys() == {"w"}
    assert torch.equal(found["state_dict"]["w"], torch.ones(3000))
    assert found["tied"]["one"].data_ptr() == found["tied"]["other"].data_ptr()
    io.teardown()


def test_no_more_than_so_many_are_in_memory_and_the_memory_is_kept(tmp_path, gate):
    io = DurableCheckpointIO(in_background=True, max_in_memory=1, timeout_s=0.2)
    io.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    with pytest.raises(CheckpointWriteError, match=r"`timeout_s` \(=0.2\) is over and 1 checkpoints are not yet"):
        io.save_checkpoint(checkpoint(2), tmp_path / "last.ckpt")
    with pytest.raises(CheckpointWriteError, match=r"`timeout_s` \(=0.2\) is over"):
        io.teardown()
    gate.set()
    io.timeout_s = 30
    addresses = set()
    for step in range(3, 7):
        io.save_checkpoint(checkpoint(step), tmp_path / "last.ckpt")
        io._wait()
        addresses |= {copies._blocks[False].data_ptr() for copies in io._copies}
    assert len(addresses) == 1
    assert step_in(tmp_path / "last.ckpt") == 6
    io.teardown()


def test_the_memory_of_one_checkpoint_is_kept_of_two_that_waited_and_none_after_the_end(tmp_path, gate):
    io = DurableCheckpointIO(in_background=True, max_in_memory=2)
    for step in (1, 2):
        io.save_checkpoint(checkpoint(step), tmp_path / f"{step}.ckpt")
    gate.set()
    io._wait()
    assert [step_in(tmp_path / f"{step}.ckpt") for step in (1, 2)] == [1, 2]
    assert [copies.num_bytes for copies in io._copies] == [12_032]  # 3,000 of float32, rounded up to 64
    io.teardown()
    assert io._copies == []


def test_an_error_of_the_thread_is_raised_at_the_next_save_and_at_the_end(tmp_path, monkeypatch):
    io = DurableCheckpointIO(in_background=True)
    with monkeypatch.context() as patch:
        fails_with(errno.ENOSPC, patch)
        io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
        io._wait()
        with pytest.raises(CheckpointWriteError, match=r"`.*a.ckpt` was not written .*the disk is full"):
            io.save_checkpoint(checkpoint(2), tmp_path / "b.ckpt")
        io.save_checkpoint(checkpoint(3), tmp_path / "c.ckpt")
        with pytest.raises(CheckpointWriteError, match=r"c.ckpt"):
            io.teardown()
    io.teardown()  # reported once


def test_an_error_of_the_thread_does_not_hide_the_one_that_ends_the_run(tmp_path, monkeypatch):
    io = DurableCheckpointIO(in_background=True)
    fails_with(errno.ENOSPC, monkeypatch)
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="the disk is full"), pytest.raises(FloatingPointError):
        _end_by_an_error(io)


def _end_by_an_error(io):
    try:
        raise FloatingPointError
    finally:
        io.teardown()


def test_the_old_one_goes_only_after_the_new_one_is_there(tmp_path, monkeypatch, gate):
    io = DurableCheckpointIO(in_background=True)
    cf.write_checkpoint(checkpoint(1), tmp_path / "old.ckpt")
    io.save_checkpoint(checkpoint(2), tmp_path / "new.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    assert (tmp_path / "old.ckpt").exists()
    gate.set()
    io._wait()
    assert os.listdir(tmp_path) == ["new.ckpt"]
    fails_with(errno.ENOSPC, monkeypatch)
    gate.clear()
    io.save_checkpoint(checkpoint(3), tmp_path / "newer.ckpt")
    io.remove_checkpoint(tmp_path / "new.ckpt")
    gate.set()
    io._wait()
    assert os.listdir(tmp_path) == ["new.ckpt"]
    with pytest.raises(CheckpointWriteError):
        io.teardown()


def test_it_is_the_strategys_unless_another_is_given():
    assert isinstance(toy.trainer().strategy.checkpoint_io, DurableCheckpointIO)
    own = TorchCheckpointIO()
    assert toy.trainer(plugins=[own]).strategy.checkpoint_io is own
    assert toy.trainer(strategy=HybridAllReduceStrategy(checkpoint_io=own)).strategy.checkpoint_io is own
    wrapped = toy.trainer(plugins=[AsyncCheckpointIO()]).strategy.checkpoint_io
    assert isinstance(wrapped, AsyncCheckpointIO)
    assert isinstance(wrapped.checkpoint_io, DurableCheckpointIO)


def test_it_can_be_sent_to_the_ranks_that_are_spawned():
    io = pickle.loads(pickle.dumps(DurableCheckpointIO(in_background=True, timeout_s=5.0)))
    assert (io.in_background, io.timeout_s, io._thread.num_jobs) == (True, 5.0, 0)


class Configured(toy.Toy):
    def __init__(self, cfg=None):
        super().__init__()
        self.save_hyperparameters()

    def on_train_epoch_end(self):
        self.log("loss", torch.tensor(float(self.current_epoch % 3)), sync_dist=True)


def fitted(folder, in_background, resume=None):
    """Top 2 of the epochs by a loss, `last` as a link; a resumed fit ends with the same weights."""
    config = pytest.importorskip("omegaconf").OmegaConf
    module = Configured(config.create({"widths": [1, 2], "twice": "${widths}"}))
    trainer = toy.trainer(
        strategy=HybridAllReduceStrategy(checkpoint_io=DurableCheckpointIO(in_background=in_background)),
        precision="16-true",
        max_epochs=5,
        callbacks=[ModelCheckpoint(folder, "{step}", monitor="loss", save_top_k=2, save_last="link")],
        enable_checkpointing=True,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The checkpoint .* holds objects")
        trainer.fit(module, toy.loader(), ckpt_path=resume, weights_only=False)
    return toy.weights(module), sorted(os.listdir(folder))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_lightnings_callback_keeps_what_it_always_kept(two_ranks, tmp_path, in_background):
    first, other = tmp_path / "a", tmp_path / "b"
    results = two_ranks.run(fitted, str(first), in_background)
    files = results[0][1]
    assert files == ["last.ckpt", "step=16.ckpt", "step=4.ckpt"]
    for name in files:
        assert cf.check_whole(first / name)
    config = Configured.load_from_checkpoint(first / "step=4.ckpt", weights_only=False).hparams.cfg
    config.widths[0] = 7
    assert config.twice == [7, 2], "an interpolation"
    again = two_ranks.run(fitted, str(other), in_background, str(first / "step=4.ckpt"))
    for (weights, _), (resumed, _) in zip(results, again, strict=True):
        assert toy.same_bits(weights, resumed)
