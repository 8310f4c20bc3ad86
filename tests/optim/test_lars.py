from typing import get_args

import pytest
import torch
from torch import nn

from lightning_hybrid.optim import LARS, WarmupPolynomialDecay
from lightning_hybrid.optim.lars import Denominator, MomentumForm
from tests.reference.lars import lars as lars_in_float64

FORMS = get_args(MomentumForm)
DENOMINATORS = get_args(Denominator)


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


@pytest.mark.parametrize("trust_clip", [None, 1.0], ids="clip={}".format)
@pytest.mark.parametrize("nesterov", [False, True], ids="nesterov={}".format)
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("momentum_form", FORMS)
def test_lars_agrees_with_the_papers_in_float64(momentum_form, denominator, nesterov, trust_clip):
    """50 steps of warm-up and poly-2; all arithmetic is float64, so 1e-12 leaves some 4000 roundings."""
    options = {"momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.01, "eps": 1e-9}
    options |= {
        "momentum_form": momentum_form,
        "denominator": denominator,
        "nesterov": nesterov,
        "trust_clip": trust_clip,
    }
    peak = 6.0 if trust_clip is None else 0.02  # a ceiling, near enough to the ratio that both sides of it occur
    layers = parameters((7,), (5, 3), (2, 2, 2), dtype=torch.float64)
    start = [layer.detach().flatten().tolist() for layer in layers]
    optimizer = LARS(layers, lr=peak, **options)
    schedule = WarmupPolynomialDecay(optimizer, total_steps=50, warmup_steps=10, end_lr=1e-4)
    gradients, lrs = [[] for _ in layers], []
    for step in range(50):
        set_grads(layers, step + 1)
        for history, layer in zip(gradients, layers, strict=True):
            history.append(layer.grad.flatten().tolist())
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    for layer, first, history in zip(layers, start, gradients, strict=True):
        expected = torch.tensor(lars_in_float64(first, history, lrs, **options), dtype=torch.float64)
        assert torch.linalg.vector_norm(layer.flatten() - expected) <= 1e-12 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("momentum_form", ["lr_outside", "ratio_outside"])
def test_lars_without_trust_is_sgd_bit_for_bit_under_a_schedule_and_for_large_tensors(momentum_form):
    ours = parameters((1_200_007,))
    theirs = copies_of(ours)
    for optimizer, params in (
        (LARS([{"params": ours, "trust_ratio": False}], lr=0.3, momentum_form=momentum_form, weight_decay=1e-3), ours),
        (torch.optim.SGD(theirs, lr=0.3, momentum=0.9, weight_decay=1e-3), theirs),
    ):
        schedule = WarmupPolynomialDecay(optimizer, total_steps=4)
        for step in range(3):
            run(optimizer, params, 1, first=step)
            schedule.step()
    assert_same_bits(ours, theirs)


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
