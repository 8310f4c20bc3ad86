"""Training step on fake CUDA tensors: no mixed devices, no reads by the host, and all state on the device.

Fake tensors have a device but no values. Torch checks devices and shapes as on a GPU, and refuses to read values.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hybrid import MasterWeightPrecision
from lightning_hybrid.optim import LARS
from lightning_hybrid.precision import device_writes
from lightning_hybrid.precision.parameter_pair import check_exchange
from tests import toy
from tests.stand_in.fake_cuda import Launches

CUDA = torch.device("cuda", 0)
OPTIMIZERS = {  # LAMB counts its steps on the host; SGD(fused=True) accepts no fake tensors
    "lars": lambda params: LARS(params, lr=1.0, momentum=0.9, weight_decay=1e-4, fused=False),
    "adamw_fused": lambda params: AdamW(params, fused=True),
}


class OneDevice(TorchDispatchMode):
    """Mode that rejects a CPU number next to CUDA tensors, which torch allows in arithmetic."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        is_copy = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        if len(devices) > 1 and not is_copy:
            raise RuntimeError(f"a number of another device in {func}")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    check_exchange()  # once per process, by values
    # Pinned memory needs a driver. A result that never arrives is never read.
    monkeypatch.setattr(device_writes, "_sent_to_host", lambda counts: (counts, lambda: False))
    with FakeTensorMode() as mode, OneDevice():
        yield mode


def on_cuda(module):
    """Mark a module as moved, because `Module.to("cuda")` fails if torch was built without CUDA."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            child._parameters[name] = nn.Parameter(torch.empty(parameter.shape, device=CUDA))
        for name, buffer in child.named_buffers(recurse=False):
            child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)
    return module


class Deep(toy.Toy):
    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_layers)))


def set_up(optimizer, precision="16-true", *, module=None, **settings):
    """Return module, precision plugin and optimizer in their state at the start of training."""
    if module is None:
        module = toy.Toy()
    module = on_cuda(module)
    trainer = toy.trainer(precision=precision, **settings)
    module.trainer = trainer
    trainer.strategy._lightning_module = module
    plugin = trainer.precision_plugin
    assert isinstance(plugin, MasterWeightPrecision)
    plugin.connect_strategy(is_last_backward_of_step=lambda: True)
    plugin.convert_module(module)
    plugin.follow_device(CUDA)
    optimizer = OPTIMIZERS[optimizer](module.parameters())
    trainer.strategy.optimizers = [optimizer]
    plugin.connect(module, [optimizer], [])
    return module, plugin, optimizer


def backward(module):
    """Run a backward pass in the open window, which gives each parameter a gradient in its own dtype."""
    plugin = module.trainer.precision_plugin
    loss = plugin.pre_backward(torch.ones((), device=CUDA), module)
    for parameter in module.parameters():
        gradient = torch.ones_like(parameter)
        if parameter.grad is not None:
            gradient = parameter.grad + gradient
        parameter.grad = gradient
    return plugin.post_backward(loss, module)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_mixes_no_devices_and_reads_nothing(name, precision, clip):
    if (name, precision, clip) == ("lars", "16-true", None):
        pytest.skip("what LARS does by itself with a scale takes no fake tensors")
    module, plugin, optimizer = set_up(name, precision, gradient_clip_val=clip)
    is_scaled = clip is not None or name != "lars"
    for _ in range(3):
        with plugin.window.opened():
            dtypes = {parameter.dtype for parameter in module.parameters()}
            assert dtypes == {plugin.dtype, torch.float32}
        plugin.optimizer_step(optimizer, model=module, closure=lambda: backward(module))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    state_devices = set()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state_devices.add(value.device)
    assert state_devices == {CUDA}

    # Tensors without dimensions, which torch allows in operations with other devices.
    record = plugin.optimizer_steps[0]
    values = list(vars(record).values())
    expected_number = 2
    if precision == "16-true":
        values += vars(record.loss_scale).values()
        expected_number = 7 + is_scaled
    scalars = [value for value in values if isinstance(value, torch.Tensor)]
    assert len(scalars) == expected_number
    assert {scalar.device for scalar in scalars} == {CUDA}


def test_launches_of_sums_and_of_the_cast_do_not_grow_with_the_number_of_tensors():
    launches = []
    for num_layers in (2, 20):
        module, plugin, _ = set_up("adamw_fused", module=Deep(num_layers))
        is_last = False
        plugin.connect_strategy(is_last_backward_of_step=lambda: is_last)
        for _ in range(2):
            backward(module)
        assert {parameter.grad.dtype for parameter in module.parameters()} == {torch.float32}
        with Launches() as counted:
            plugin.window.cast()
        assert len(counted.names) == 1
        with Launches() as counted:
            plugin.pre_backward(torch.ones((), device=CUDA), module)
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
        counts = [len(counted.names) - len(list(module.parameters()))]
        with Launches() as counted:
            groups = plugin.optimizer_steps.parameters_by_optimizer(module.parameters())
            plugin.gradients.finish(groups, plugin._scale, lambda _: False)
        counts.append(sorted(name for name in counted.names if "clone" not in name))
        plugin.window.close()
        launches.append(counts)
    assert launches[0] == launches[1]
