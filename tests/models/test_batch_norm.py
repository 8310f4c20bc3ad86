"""BatchNorm over micro-batches: forgetting per step, and the number of images behind one normalisation."""

import copy

import pytest
import torch
from torch import nn

from lightning_hybrid.models import correct_momentum_
from recipes.networks.resnet import ResNet


def norms_of(module):
    return [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]


@pytest.mark.parametrize("num_micro_batches", [1, 64])
@pytest.mark.parametrize("momentum", [0.001, 1.0])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_equal_micro_batches_leave_what_one_update_leaves(kind, momentum, num_micro_batches):
    """In float64; k updates of about four roundings each, 1.1e-16, are under 1e-13 for 64 of them on numbers near 1."""
    torch.manual_seed(0)
    once = kind(3, momentum=momentum, affine=False, track_running_stats=True, dtype=torch.float64)
    once.running_mean.uniform_(-1, 1)
    once.running_var.uniform_(0.5, 2)
    often = copy.deepcopy(once)
    correct_momentum_(often, accumulate_grad_batches=num_micro_batches)
    images = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    once(images)
    for _ in range(num_micro_batches):
        often(images)
    torch.testing.assert_close(often.running_mean, once.running_mean, rtol=0, atol=1e-13)
    torch.testing.assert_close(often.running_var, once.running_var, rtol=0, atol=1e-13)


def test_every_normalisation_of_a_network_is_corrected_once_and_those_without_running_averages_are_left_alone():
    network = nn.Sequential(ResNet(depth=18, width=0.125, bn_momentum=0.19), nn.SyncBatchNorm(3, momentum=0.19))
    assert correct_momentum_(network, accumulate_grad_batches=1) == 0
    assert {layer.momentum for layer in norms_of(network)} == {0.19}
    assert correct_momentum_(network, accumulate_grad_batches=2) == 21
    assert [layer.momentum for layer in norms_of(network)] == [pytest.approx(0.1, abs=1e-15)] * 21
    layers = nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.InstanceNorm2d(3), nn.LayerNorm(3))
    assert correct_momentum_(layers, accumulate_grad_batches=4) == 0
    assert (layers[0].momentum, layers[1].momentum) == (None, 0.1)
