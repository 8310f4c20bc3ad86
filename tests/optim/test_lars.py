import pytest
import torch
from torch import nn

from lightning_hybrid.optim import LARS


def normals(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(*shapes, dtype=torch.float32):
    return [nn.Parameter(normals(*shape, seed=index, dtype=dtype)) for index, shape in enumerate(shapes)]


def set_grads(params, seed, scale=1.0):
    for index, param in enumerate(params):
        param.grad = (scale * normals(*param.shape, seed=1000 * seed + index)).to(param.dtype)


def run(optimizer, params, num_steps, first=0):
    for step in range(first, first + num_steps):
        set_grads(params, step + 1)
        optimizer.step()


def copies_of(params):
    return [nn.Parameter(param.detach().clone()) for param in params]


def assert_same_bits(params, others):
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)


def test_one_parameter_group_may_use_another_rule():
    mixed, alone = parameters((4,), (5,)), parameters((4,), (5,))
    groups = [{"params": mixed[:1]}, {"params": mixed[1:], "momentum_form": "ratio_outside", "denominator": "joint"}]
    run(LARS(groups, lr=1.0, weight_decay=0.1), mixed, 3)
    first = LARS(alone[:1], lr=1.0, weight_decay=0.1)
    second = LARS(alone[1:], lr=1.0, weight_decay=0.1, momentum_form="ratio_outside", denominator="joint")
    for step in range(3):
        set_grads(alone, step + 1)
        first.step()
        second.step()
    assert_same_bits(mixed, alone)


@pytest.mark.parametrize("grad_format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_channels_last_weights_take_the_same_steps(grad_format):
    """Blocks go along memory, which is right only where all of weight, gradient and buffer share the layout."""
    plain = parameters((160, 128, 6, 6))
    last = [nn.Parameter(plain[0].detach().to(memory_format=torch.channels_last))]
    for params in (plain, last):
        optimizer = LARS(params, lr=4.0, weight_decay=0.01)
        for step in range(2):
            set_grads(params, step + 1)
            if params is last:
                params[0].grad = params[0].grad.to(memory_format=grad_format)
            optimizer.step()
    torch.testing.assert_close(last, plain, rtol=1e-6, atol=1e-7)
    assert optimizer.state[last[0]]["momentum_buffer"].stride() == last[0].stride()
