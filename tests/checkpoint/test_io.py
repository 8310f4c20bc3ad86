"""Lightning's seam to checkpoint files: at once or during training, errors, and what its callback expects."""

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


def test_a_run_may_go_on_when_a_checkpoint_is_not_written(tmp_path, monkeypatch):
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
    "given", [{"max_in_memory": 0}, {"timeout_s": 0}, {"on_error": "ignore"}], ids=str
)
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
    values["DictConfig"] = OmegaConf.create(
        {"a": {"b": 1}, "twice": "${a.b}", "path": None, "widths": [1, "${a.b}"]}
    )
    values["structured"] = OmegaConf.structured(Sizes([1]))
    return values


@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
@pytest.mark.filterwarnings("ignore:The checkpoint .* contains objects")
def test_what_is_saved_is_what_lightnings_own_plugin_loads(tmp_path, in_background, weights_only):
    """In type as in value, or it is refused as it is there."""
    durable = DurableCheckpointIO(in_background=in_background)
    lightnings = TorchCheckpointIO()
    num_refused = 0
    for name, value in hyper_parameters().items():
        expected, found = [
            _type_and_value(io, value, tmp_path / "a.ckpt", weights_only)
            for io in (lightnings, durable)
        ]
        assert found == expected, name
        num_refused += expected == "UnpicklingError"
    durable.teardown()
    assert (num_refused == 0) == (weights_only is False)


def _type_and_value(io, value, path, weights_only):
    io.save_checkpoint({"hyper_parameters": {"value": value, "again": value}, "epoch": 1}, path)
    try:
        found = io.load_checkpoint(path, weights_only=weights_only)["hyper_parameters"]
    except pickle.UnpicklingError:
        return "UnpicklingError"
    assert found["again"] is found["value"]
    found = found["value"]
    return type(found), found, repr(found), getattr(found, "__dict__", None) and sorted(vars(found))


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


def test_what_is_written_is_the_moment_of_saving(tmp_path, gate):
    io = DurableCheckpointIO(in_background=True)
    state = checkpoint(1)
    io.save_checkpoint(state, tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").exists()
    state["state_dict"]["w"].zero_()
    state["state_dict"]["new"] = 1
    gate.set()
    result = io.load_checkpoint(tmp_path / "last.ckpt")  # waits for it
    assert result["state_dict"].keys() == {"w"}
    assert torch.equal(result["state_dict"]["w"], torch.ones(3000))
    io.teardown()


def test_no_more_than_so_many_are_in_memory_and_the_memory_is_kept(tmp_path, gate):
    io = DurableCheckpointIO(in_background=True, max_in_memory=1, timeout_s=0.2)
    io.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    with pytest.raises(
        CheckpointWriteError, match=r"`timeout_s` \(=0.2\) is over and 1 checkpoints are not yet"
    ):
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
    assert (
        toy.trainer(strategy=HybridAllReduceStrategy(checkpoint_io=own)).strategy.checkpoint_io
        is own
    )
    wrapped = toy.trainer(plugins=[AsyncCheckpointIO()]).strategy.checkpoint_io
    assert isinstance(wrapped, AsyncCheckpointIO)
    assert isinstance(wrapped.checkpoint_io, DurableCheckpointIO)


def test_it_can_be_sent_to_the_ranks_that_are_spawned():
    io = pickle.loads(pickle.dumps(DurableCheckpointIO(in_background=True, timeout_s=5.0)))
    assert (io.in_background, io.timeout_s, io._thread.num_jobs) == (True, 5.0, 0)


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


class NothingIsNoted(TorchFunctionMode):
    """Refuses to copy what is conjugate or negative by a note alone: from CUDA to page-locked memory torch drops it."""

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
    with NothingIsNoted():
        copies = host.take(tensors)
    host.wait()
    for name, tensor in tensors.items():
        if name != "one value many times":
            (tensor._values() if tensor.is_sparse else tensor.detach()).zero_()
        found = copies[name]
        assert found.device.type == (device if name in ("sparse", "a parameter") else "cpu")
        assert type(found) is type(tensor)
        assert found.requires_grad == tensor.requires_grad
        assert torch.equal(dense(found).cpu(), before[name]), name
        if not found.is_sparse:
            assert found.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, name
    assert copies["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert copies["transposed"].stride() == (1, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_curves_that_grow_and_metrics_that_come_take_no_memory_anew(device):
    """All copies are held, so what has another address has other memory: a block of 12,096 bytes, one of an eighth more
    than the 12,160 that come next, and one of an eighth more than the 13,696 of the end."""
    host = HostCopies()
    weights = torch.ones(3000, device=device)
    copies = []
    for step in range(1, 101):
        if step > 50:
            late = {"late": torch.ones(8, device=device)}
        else:
            late = {}
        curve = torch.full((step, 2), float(step), dtype=torch.float64, device=device)
        copies.append(host.take({**late, "curve": curve, "weights": weights}))
        host.wait()
        assert torch.equal(copies[-1]["curve"], curve.cpu())
        assert torch.equal(copies[-1]["weights"], weights.cpu())
    ends = [copy["weights"].data_ptr() - copy["curve"].data_ptr() for copy in copies]
    assert ends == [-(-16 * step // 64) * 64 for step in range(1, 101)]  # one behind the other
    blocks = [copy["late" if "late" in copy else "curve"].data_ptr() for copy in copies]
    assert len(set(blocks)) == 3
    assert host.num_bytes == 13_696 * 9 // 8


def test_tensors_that_are_one_stay_one_in_the_file():
    weights = torch.ones(10_000)
    file = io.BytesIO()
    torch.save(
        HostCopies().take({"one": weights, "other": weights.detach(), "part": weights[:10]}), file
    )
    result = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert result["one"].data_ptr() == result["other"].data_ptr()
    assert 40_000 < len(file.getvalue()) < 45_000


@pytest.mark.gpu
def test_from_cuda_the_memory_is_page_locked():
    copies = HostCopies().take({"weights": torch.ones(10, device="cuda"), "counter": torch.ones(1)})
    assert copies["weights"].is_pinned()
    assert not copies["counter"].is_pinned()
