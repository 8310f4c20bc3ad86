"""Clipping by norm, next to torch's own."""

import torch
from torch import nn

from lightning_hybrid.comm.norm_clipping import clip_by_norm_over_ranks

NUM_PARAMETERS = 512


def parameters_of_which_few_have_a_gradient():
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(NUM_PARAMETERS)]
    for index, parameter in enumerate(parameters):
        if index % 3 == 0:
            parameter.grad = torch.randn(3, generator=generator)
    return parameters


def test_parameters_without_a_gradient_change_no_bit_of_a_clipped_one():
    """A zero among the norms would change the order in which their squares are added."""
    parameters = parameters_of_which_few_have_a_gradient()
    expected = parameters_of_which_few_have_a_gradient()
    for clip_val in (0.1, 0.3, 0.7, 1.1):
        torch.nn.utils.clip_grad_norm_(expected, clip_val)
        clip_by_norm_over_ranks(torch.optim.SGD(parameters, lr=0.1), clip_val, device=torch.device("cpu"))
        for parameter, wanted in zip(parameters, expected, strict=True):
            if wanted.grad is not None:
                assert torch.equal(parameter.grad, wanted.grad)
