"""`DurableCheckpointIO`, a Lightning plugin for checkpoint files: immediate or in the background, errors, copies."""

import errno
import io
import os
import pickle
import threading
from argparse import Namespace
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.overrides import TorchFunctionMode

from lightning_hybrid import DurableCheckpointIO, HybridAllReduceStrategy
from lightning_hybrid.checkpoint import file as cf
from lightning_hybrid.checkpoint.file import CheckpointWriteError
from lightning_hybrid.checkpoint.host_copy import HostCopies
from tests import toy
from tests.checkpoint.test_file import checkpoint, fails_with, step_in


def test_a_run_may_continue_when_a_checkpoint_is_not_written(tmp_path, monkeypatch):
    io = DurableCheckpointIO(on_error="warn")
    with monkeypatch.context() as patch:
        fails_with(errno.ENOSPC, patch)
        with pytest.warns(
            UserWarning, match=r"the disk is full.* The run continues without a newer checkpoint"
        ):
            io.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    io.save_checkpoint(checkpoint(2), tmp_path / "last.ckpt")
    assert step_in(tmp_path / "last.ckpt") == 2


@pytest.mark.parametrize(
    ("option", "value"), [("max_in_memory", 0), ("timeout_s", 0), ("on_error", "ignore")]
)
def test_an_option_that_cannot_work_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=rf"`{option}` \(="):
        DurableCheckpointIO(**{option: value})


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Text(str):
    pass


Pair = namedtuple("Pair", "first second")


@dataclass
class Sizes:
    widths: list


def hyper_parameters():
    values = {
        "Namespace": Namespace(lr=0.1, inner=Namespace(a=1)),
        "AttributeDict": AttributeDict(a=AttributeDict(b=1)),
        "Path": Path("a/b"),
        "Enum": Color.RED,
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
    values["DictConfig"] = OmegaConf.create(
        {"a": {"b": 1}, "twice": "${a.b}", "path": None, "widths": [1, "${a.b}"]}
    )
    values["structured"] = OmegaConf.structured(Sizes([1]))
    return values


@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
@pytest.mark.filterwarnings("ignore:The checkpoint .* contains objects")
def test_saved_values_load_as_from_lightnings_own_plugin(tmp_path, in_background, weights_only):
    """Values load with the same type and value, or with the same error."""
    durable = DurableCheckpointIO(in_background=in_background)
    lightnings = TorchCheckpointIO()
    num_refused = 0
    for name, value in hyper_parameters().items():
        expected = _type_and_value(lightnings, value, tmp_path / "a.ckpt", weights_only)
        result = _type_and_value(durable, value, tmp_path / "a.ckpt", weights_only)
        assert result == expected, name
        num_refused += expected == "UnpicklingError"
    durable.teardown()
    assert (num_refused == 0) == (weights_only is False)


def _type_and_value(io, value, path, weights_only):
    """Return type, value, text and attributes of a value after saving and loading it."""
    io.save_checkpoint({"hyper_parameters": {"value": value, "again": value}, "epoch": 1}, path)
    try:
        values = io.load_checkpoint(path, weights_only=weights_only)["hyper_parameters"]
    except pickle.UnpicklingError:
        return "UnpicklingError"
    loaded = values["value"]
    assert values["again"] is loaded
    return type(loaded), loaded, repr(loaded), sorted(getattr(loaded, "__dict__", {}))


@pytest.fixture
def gate(monkeypatch):
    gate = threading.Event()
    write = cf.write_checkpoint

    def held(*args, **kwargs):
        assert gate.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr("lightning_hybrid.checkpoint.io.write_checkpoint", held)
    yield gate
    gate.set()


def test_a_file_holds_the_values_of_the_moment_of_saving(tmp_path, gate):
    io = DurableCheckpointIO(in_background=True)
    state = checkpoint(1)
    io.save_checkpoint(state, tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").exists()
    state["state_dict"]["w"].zero_()
    state["state_dict"]["new"] = 1
    gate.set()
    result = io.load_checkpoint(tmp_path / "last.ckpt")  # waits for the write
    assert result["state_dict"].keys() == {"w"}
    assert torch.equal(result["state_dict"]["w"], torch.ones(3000))
    io.teardown()


def test_at_most_max_in_memory_checkpoints_wait_and_their_memory_is_reused(tmp_path, gate):
    io = DurableCheckpointIO(in_background=True, max_in_memory=1, timeout_s=0.2)
    io.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    with pytest.raises(
        CheckpointWriteError,
        match=r"`timeout_s` \(=0.2\) has passed before the disk has stored 1 checkpoint",
    ):
        io.save_checkpoint(checkpoint(2), tmp_path / "last.ckpt")
    with pytest.raises(CheckpointWriteError, match=r"`timeout_s` \(=0.2\) has passed"):
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


def test_an_error_of_the_thread_is_raised_at_the_next_save_and_at_the_end(tmp_path, monkeypatch):
    io = DurableCheckpointIO(in_background=True)
    with monkeypatch.context() as patch:
        fails_with(errno.ENOSPC, patch)
        io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
        io._wait()
        with pytest.raises(
            CheckpointWriteError, match=r"`.*a.ckpt` was not written .*the disk is full"
        ):
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


def test_an_old_file_is_removed_only_after_the_new_one_is_written(tmp_path, monkeypatch, gate):
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


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
def test_the_old_file_stays_if_the_new_one_has_failed_before_the_removal(
    tmp_path, monkeypatch, in_background
):
    io = DurableCheckpointIO(in_background=in_background, on_error="warn")
    io.save_checkpoint(checkpoint(1), tmp_path / "old.ckpt")
    io._wait()
    with monkeypatch.context() as patch:
        fails_with(errno.ENOSPC, patch)
        with pytest.warns(UserWarning, match="the disk is full"):
            _replace(io, tmp_path / "old.ckpt", tmp_path / "new.ckpt")
    assert os.listdir(tmp_path) == ["old.ckpt"]
    io.save_checkpoint(checkpoint(3), tmp_path / "newer.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    io.teardown()
    assert os.listdir(tmp_path) == ["newer.ckpt"]


def _replace(io, old_path, new_path):
    io.save_checkpoint(checkpoint(2), new_path)
    io._wait()
    io.remove_checkpoint(old_path)
    io.teardown()


def test_a_waiting_removal_takes_no_slot_of_a_checkpoint(tmp_path, gate):
    io = DurableCheckpointIO(in_background=True, max_in_memory=2, timeout_s=0.2)
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "before_a.ckpt")
    io.save_checkpoint(checkpoint(2), tmp_path / "b.ckpt")  # does not wait for the disk
    gate.set()
    io.timeout_s = 30
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_the_strategy_uses_durable_checkpoints_unless_the_user_passes_another_plugin():
    assert isinstance(toy.trainer().strategy.checkpoint_io, DurableCheckpointIO)
    plugin = TorchCheckpointIO()
    assert toy.trainer(plugins=[plugin]).strategy.checkpoint_io is plugin
    strategy = HybridAllReduceStrategy(checkpoint_io=plugin)
    assert toy.trainer(strategy=strategy).strategy.checkpoint_io is plugin
    wrapped = toy.trainer(plugins=[AsyncCheckpointIO()]).strategy.checkpoint_io
    assert isinstance(wrapped, AsyncCheckpointIO)
    assert isinstance(wrapped.checkpoint_io, DurableCheckpointIO)


def test_the_plugin_can_be_pickled_for_spawned_ranks():
    io = pickle.loads(pickle.dumps(DurableCheckpointIO(in_background=True, timeout_s=5.0)))
    assert io.in_background is True
    assert io.timeout_s == 5.0
    assert io._thread.num_jobs == 0


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def of_every_kind(device):
    counted = torch.arange(24, device=device)
    return {
        "of two dimensions": counted.float().reshape(4, 6),
        "channels last": counted.half()
        .reshape(2, 3, 2, 2)
        .contiguous(memory_format=torch.channels_last),
        "transposed": counted.bfloat16().reshape(4, 6).t(),
        "a part": counted[5:7],
        "every second": counted[::2],
        "one value many times": torch.ones(1, device=device).expand(5),
        "a number": torch.tensor(3.5, dtype=torch.float64, device=device),
        "bits": counted > 5,
        "complex": torch.view_as_complex(counted.float().reshape(12, 2)).conj(),
        "negative": torch.view_as_complex(counted.float().reshape(12, 2)).conj().imag,
        "a parameter": torch.nn.Parameter(counted.float()),
        "empty": torch.empty(0, 3, device=device),
        "sparse": torch.eye(3, device=device).to_sparse(),
    }


def dense(tensor):
    if tensor.is_sparse:
        return tensor.to_dense()
    return tensor


class RefusesLazyValues(TorchFunctionMode):
    """Mode that rejects copies of lazy conjugates and negatives, whose bit torch drops from CUDA to pinned memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            assert not args[1].is_conj()
            assert not args[1].is_neg()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_equal_and_takes_no_more_room_in_a_file_than_its_elements(device):
    host = HostCopies()
    tensors = of_every_kind(device)
    before = {name: dense(tensor).detach().clone().cpu() for name, tensor in tensors.items()}
    with RefusesLazyValues():
        copies = host.take(tensors)
    host.wait()
    for name, tensor in tensors.items():
        if tensor.is_sparse:
            tensor._values().zero_()
        elif name != "one value many times":
            tensor.detach().zero_()
        copy = copies[name]
        assert copy.device.type == (device if name in ("sparse", "a parameter") else "cpu"), name
        assert type(copy) is type(tensor), name
        assert copy.requires_grad == tensor.requires_grad, name
        assert torch.equal(dense(copy).cpu(), before[name]), name
        if not copy.is_sparse:
            assert copy.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, name
    assert copies["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert copies["transposed"].stride() == (1, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_growing_curves_and_new_metrics_reuse_memory(device):
    """Copies of growing tensors reuse three blocks of memory in all.

    All copies are kept, so different addresses mean different memory. The blocks have 12,096 bytes, an eighth more than
    the 12,160 that are needed next, and an eighth more than the final 13,696.
    """
    host = HostCopies()
    weights = torch.ones(3000, device=device)
    copies = []
    for step in range(1, 101):
        tensors = {}
        if step > 50:
            tensors["late"] = torch.ones(8, device=device)
        curve = torch.full((step, 2), float(step), dtype=torch.float64, device=device)
        tensors["curve"] = curve
        tensors["weights"] = weights
        copies.append(host.take(tensors))
        host.wait()
        assert torch.equal(copies[-1]["curve"], curve.cpu())
        assert torch.equal(copies[-1]["weights"], weights.cpu())
    ends = [copy["weights"].data_ptr() - copy["curve"].data_ptr() for copy in copies]
    assert ends == [-(-16 * step // 64) * 64 for step in range(1, 101)]  # one after the other
    blocks = {next(iter(copy.values())).data_ptr() for copy in copies}
    assert len(blocks) == 3
    assert host.num_bytes == 13_696 * 9 // 8


def test_tensors_that_share_memory_share_it_in_the_file():
    weights = torch.ones(10_000)
    file = io.BytesIO()
    tensors = {"weights": weights, "view": weights.detach(), "part": weights[:10]}
    torch.save(HostCopies().take(tensors), file)
    result = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert result["weights"].data_ptr() == result["view"].data_ptr()
    assert 40_000 < len(file.getvalue()) < 45_000


@pytest.mark.gpu
def test_copies_from_cuda_are_in_page_locked_memory():
    copies = HostCopies().take({"weights": torch.ones(10, device="cuda"), "counter": torch.ones(1)})
    assert copies["weights"].is_pinned()
    assert not copies["counter"].is_pinned()


@pytest.mark.parametrize("prefix", ["~/", "file://{home}/"])
def test_a_path_with_a_prefix_names_the_file_of_lightnings_own_plugin(
    tmp_path, monkeypatch, prefix
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = prefix.format(home=tmp_path) + "last.ckpt"
    plugin = DurableCheckpointIO()
    plugin.save_checkpoint({"step": 1}, path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert plugin.load_checkpoint(path) == {"step": 1}
    assert TorchCheckpointIO().load_checkpoint(path) == {"step": 1}
    plugin.remove_checkpoint(path)
    assert os.listdir(tmp_path) == []
