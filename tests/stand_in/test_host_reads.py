"""Callbacks, clipping and flags on fake CUDA tensors: the host reads nothing, and collectives get CUDA tensors.

Fake tensors have a device but no values, so torch raises an error if the host would read one.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.callbacks.ema import HostCountedAverage
from lightning_hybrid.callbacks.recalibrate_bn import _Statistics
from lightning_hybrid.comm.norm_clipping import clip_by_norm_over_ranks
from lightning_hybrid.precision.skipped_steps import SkipFlag
from tests.stand_in.fake_cuda import ZERO, parameter


class Copies(TorchDispatchMode):
    """Mode that records copies from the CPU to CUDA for which the host waits."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            source = args[0].device.type
            if (source, result.device.type) == ("cpu", "cuda"):
                self.waits.append(str(func))
        return result


@contextmanager
def on_fake_cuda():
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
        yield copies


def on_cuda(module):
    for child in module.modules():
        for name, weight in child.named_parameters(recurse=False):
            child._parameters[name] = nn.Parameter(torch.empty(weight.shape, device=ZERO))
        for name, buffer in child.named_buffers(recurse=False):
            child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=ZERO)
    return module


class Count(int):
    """Number on the host, in place of a tensor that would be fake here."""


@pytest.mark.parametrize("use_buffers", [True, False])
def test_an_average_of_weights_makes_the_host_wait_for_nothing(use_buffers):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = AveragedModel(module, avg_fn=get_ema_avg_fn(0.9), use_buffers=use_buffers)
    average = HostCountedAverage(model)
    del average.n_averaged
    average.n_averaged = Count(0)
    with on_fake_cuda() as copies:
        on_cuda(module)
        on_cuda(average.module)
        for _ in range(3):
            average.update_parameters(module)
    assert average.n_averaged == 3
    assert copies.waits == []


def test_statistics_of_layers_that_no_batch_reached_are_where_the_layers_are(monkeypatch):
    devices = []

    def all_gather(outputs, tensor):
        devices.extend(output.device for output in outputs)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *args: devices.append(tensor.device))
    monkeypatch.setattr(dist, "all_gather", all_gather)
    layer = nn.BatchNorm1d(3)
    with on_fake_cuda():
        statistics = _Statistics([on_cuda(layer)])
        statistics.end_batch()
        with pytest.raises(DataDependentOutputException):
            statistics.write()  # the number of batches is read once at the end
    assert devices == [ZERO]
    assert statistics._of_batches[0].device == ZERO


@pytest.mark.parametrize("cut_into", ["slices", "stages", "both"])
def test_clipping_over_ranks_makes_the_host_wait_for_nothing(monkeypatch, cut_into):
    devices = []
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, group=None: devices.append(tensor.device)
    )
    with on_fake_cuda() as copies:
        params = [parameter(3, 2), parameter(4), parameter(2)]
        params[2].grad = None
        optimizer = torch.optim.SGD(params, lr=0.1)
        groups = {"slice_group": object(), "stage_group": object()}
        if cut_into == "stages":
            groups["slice_group"] = None
        if cut_into == "slices":
            groups["stage_group"] = None
        ids = {"slices": {id(params[0])}, "counted_elsewhere": {id(params[1])}}
        clip_by_norm_over_ranks(optimizer, 1.0, device=ZERO, **groups, **ids)
    assert set(devices) == {ZERO}
    assert copies.waits == []


def test_a_flag_of_a_skipped_step_is_on_the_host_whatever_the_default_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    arguments = []
    empty = torch.empty

    def noting(*args, **kwargs):
        arguments.append((kwargs.get("device"), kwargs.pop("pin_memory", False)))
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", noting)
    with on_fake_cuda():
        SkipFlag(torch.zeros((), device=ZERO))
    assert arguments == [("cpu", True)]
