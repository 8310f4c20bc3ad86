"""Emulation of fp16 on a CPU: operands and results are fp16 numbers, and the arithmetic in between is fp32."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.precision.fp16_emulation import Fp16MatmulEmulation


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CALLS = {
    "linear": (lambda x, w: F.linear(x, w), (4, 32), (8, 32)),
    "matmul": (lambda x, w: torch.matmul(x, w), (4, 32), (32, 8)),
    "einsum": (lambda x, w: torch.einsum("ij,kj->ik", x, w), (4, 32), (8, 32)),
    "list of operands": (lambda x, w: torch.linalg.multi_dot([x, w]), (4, 32), (32, 8)),
    "by name": (lambda x, w: F.linear(input=x, weight=w), (4, 32), (8, 32)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (2, 3, 8, 8), (4, 3, 3, 3)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w), (2, 3, 8, 8), (3, 4, 3, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_result_is_the_fp32_result_of_fp16_operands_rounded_once(name):
    call, x_shape, w_shape = CALLS[name]
    x = randn(*x_shape).half()
    w = randn(*w_shape, seed=1).half()
    expected = call(x.float(), w.float()).half()
    with Fp16MatmulEmulation():
        result = call(x, w)
    assert result.dtype is torch.float16
    assert torch.equal(result, expected)


def test_gradients_are_the_fp32_gradients_rounded():
    x = randn(4, 32).half().requires_grad_()
    w = randn(8, 32, seed=1).half().requires_grad_()
    with Fp16MatmulEmulation():
        F.linear(x, w).float().square().sum().backward()
    x32 = x.detach().float().requires_grad_()
    w32 = w.detach().float().requires_grad_()
    F.linear(x32, w32).half().float().square().sum().backward()
    assert x.grad.dtype is w.grad.dtype is torch.float16
    assert torch.equal(x.grad, x32.grad.half())
    assert torch.equal(w.grad, w32.grad.half())


def test_an_fp32_operand_next_to_a_half_one_is_rounded_as_by_autocast():
    x = randn(4, 32)
    w = randn(8, 32, seed=1).half()
    with torch.autocast("cpu", dtype=torch.float16), Fp16MatmulEmulation():
        assert torch.equal(F.linear(x, w), F.linear(x.half().float(), w.float()).half())
        assert torch.equal(F.linear(x, w.float()), F.linear(x, w)), "two of fp32 as well"
    with Fp16MatmulEmulation(), pytest.raises(RuntimeError, match="dtype"):
        F.linear(x, w)  # without autocast a GPU rejects operands of two dtypes


def test_functional_norms_with_half_weights_run_in_fp32_under_autocast():
    x = randn(4, 32).bfloat16()
    w = randn(32, seed=1).bfloat16()
    expected = F.layer_norm(x.float(), (32,), w.float())
    with torch.autocast("cpu", dtype=torch.bfloat16), Fp16MatmulEmulation(with_products=False):
        assert torch.equal(F.layer_norm(x, (32,), w), expected)
        assert F.linear(x, x).dtype is torch.bfloat16


def test_backward_recomputes_activations_with_the_same_rounding():
    layer = nn.Linear(8, 8).half()
    x = randn(4, 8)
    gradients = []
    for call in (partial(checkpoint, layer, use_reentrant=False), layer):
        with torch.autocast("cpu", dtype=torch.float16), Fp16MatmulEmulation():
            loss = call(x).float().square().sum()
        with Fp16MatmulEmulation():
            loss.backward()
        gradients.append(layer.weight.grad.clone())
        layer.weight.grad = None
    assert torch.equal(*gradients)


def test_fp32_calls_and_other_functions_are_unchanged():
    x = randn(4, 32)
    w = randn(8, 32, seed=1)
    with Fp16MatmulEmulation():
        assert torch.equal(F.linear(x, w), F.linear(x, w))
        assert F.linear(x, w).dtype is torch.float32
        assert (x.half() + x.half()).dtype is torch.float16
        assert F.linear(x.double(), w.double()).dtype is torch.float64
