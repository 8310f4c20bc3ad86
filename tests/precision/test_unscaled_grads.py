"""Gradients that outlive a backward of a manual loop: added up in fp32, averaged once, rounded where they must be."""

import torch
from torch import nn

from lightning_hybrid.precision.unscaled_grads import UnscaledGradients

SCALE = torch.tensor(1024.0)
TINY = 2.0**-30  # half of it is 0


def backward(unscaled, parameter, value):
    """A gradient of `value`, as one backward of a manual loop brings it."""
    unscaled.prepare_for_backward(SCALE, sums=True, averages=lambda _: True)
    (parameter.float() * value * SCALE).sum().backward()
    unscaled.unscale([parameter], SCALE, is_local=lambda _: False)
    unscaled.put_back()


def half_parameter():
    return nn.Parameter(torch.ones(2, dtype=torch.float16))


def test_a_gradient_that_ddp_has_rounded_into_its_new_buckets_is_put_back():
    unscaled, parameter = UnscaledGradients(), half_parameter()
    backward(unscaled, parameter, TINY)
    rounded = parameter.grad.half()
    parameter.grad = None
    parameter.grad = rounded
    assert rounded.tolist() == [0.0, 0.0]
    backward(unscaled, parameter, TINY)
    assert parameter.grad.tolist() == [2 * TINY] * 2


def test_an_overflow_of_an_earlier_backward_is_not_forgotten():
    unscaled, parameter = UnscaledGradients(), half_parameter()
    backward(unscaled, parameter, float("inf"))
    parameter.grad.clamp_(-1, 1)  # as clipping by value does
    backward(unscaled, parameter, 1.0)
    assert unscaled.found_inf([parameter]) == 1.0
