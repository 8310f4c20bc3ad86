"""Gradient clipping by norm, compared with torch's implementation."""

import torch
from torch import nn

from lightning_hybrid.comm.norm_clipping import clip_by_norm_over_ranks

NUM_PARAMETERS = 24


def parameters_of_which_half_have_a_gradient(seed):
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(NUM_PARAMETERS)]
    for parameter in parameters[::2]:
        parameter.grad = torch.randn(3, generator=generator)
    return parameters


def test_parameters_without_a_gradient_change_no_bit_of_a_clipped_one():
    """A zero among the norms would change the order in which the squares are added, and thereby one norm in five."""
    for seed in range(30):
        parameters = parameters_of_which_half_have_a_gradient(seed)
        expected = parameters_of_which_half_have_a_gradient(seed)
        torch.nn.utils.clip_grad_norm_(expected, 0.7)
        clip_by_norm_over_ranks(
            torch.optim.SGD(parameters, lr=0.1), 0.7, device=torch.device("cpu")
        )
        for parameter, wanted in zip(parameters[::2], expected[::2], strict=True):
            assert torch.equal(parameter.grad, wanted.grad)
