"""Gradients that outlive a backward of a manual loop: added up in fp32, averaged once, rounded where they must be."""

import pytest
import torch
from torch import nn

from lightning_hybrid.precision.unscaled_grads import UnscaledGradients

SCALE = torch.tensor(1024.0)
TINY = 2.0**-30  # half of it is 0


def backward(unscaled, parameter, value, *, is_local=False, averages=True):
    """A gradient of `value`, as one backward of a manual loop brings it."""
    unscaled.prepare_for_backward(SCALE, sums=True, averages=lambda _: averages)
    (parameter.float() * value * SCALE).sum().backward()
    unscaled.unscale([parameter], SCALE, is_local=lambda _: is_local)
    unscaled.put_back()


def half_parameter():
    return nn.Parameter(torch.ones(2, dtype=torch.float16))


def test_what_is_added_up_is_not_rounded():
    """In half 1 + 2**-12 is 1."""
    unscaled, parameter = UnscaledGradients(), half_parameter()
    for value in (1.0, 2.0**-12, 2.0**-20):
        backward(unscaled, parameter, value)
    assert parameter.grad.tolist() == [1.0 + 2.0**-12 + 2.0**-20] * 2


def test_a_gradient_that_ddp_has_rounded_into_its_new_buckets_is_put_back():
    unscaled, parameter = UnscaledGradients(), half_parameter()
    backward(unscaled, parameter, TINY)
    rounded = parameter.grad.half()
    parameter.grad = None
    parameter.grad = rounded
    assert rounded.tolist() == [0.0, 0.0]
    backward(unscaled, parameter, TINY)
    assert parameter.grad.tolist() == [2 * TINY] * 2


@pytest.mark.parametrize("averages", [False, True])
def test_what_is_this_ranks_alone_goes_into_the_next_average_and_not_before(averages):
    """Under `no_sync` it waits aside; the backward that averages finds it in `p.grad`, scaled and in half."""
    unscaled, parameter = UnscaledGradients(), half_parameter()
    backward(unscaled, parameter, 1.0, is_local=True, averages=False)
    unscaled.prepare_for_backward(SCALE, sums=True, averages=lambda _: averages)
    if averages:
        assert (parameter.grad.dtype, parameter.grad.tolist()) == (torch.float16, [1024.0] * 2)
    else:
        assert parameter.grad is None


def test_an_overflow_of_an_earlier_backward_is_not_forgotten():
    unscaled, parameter = UnscaledGradients(), half_parameter()
    backward(unscaled, parameter, float("inf"))
    parameter.grad.clamp_(-1, 1)  # as clipping by value does
    backward(unscaled, parameter, 1.0)
    assert unscaled.found_inf([parameter]) == 1.0
