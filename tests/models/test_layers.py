"""Layers with micro-batches and batches: BatchNorm averages, activation checkpointing, channels-last."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_hybrid.models import correct_momentum_
from lightning_hybrid.precision.fp16_emulation import Fp16MatmulEmulation
from recipes.networks.alexnet import AlexNetBN
from recipes.networks.resnet import ResNet


def norms_of(module):
    norm_base = nn.modules.batchnorm._NormBase
    return [layer for layer in module.modules() if isinstance(layer, norm_base)]


@pytest.mark.parametrize("num_micro_batches", [1, 64])
@pytest.mark.parametrize("momentum", [0.001, 1.0])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_equal_micro_batches_leave_what_one_update_leaves(kind, momentum, num_micro_batches):
    """In float64, up to 64 updates with four roundings of 1.1e-16 each stay below 1e-13 for numbers near 1."""
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


def test_every_normalization_of_a_network_is_corrected_once_and_those_without_running_averages_are_left_alone():
    network = nn.Sequential(
        ResNet(depth=18, width=0.125, bn_momentum=0.19), nn.SyncBatchNorm(3, momentum=0.19)
    )
    assert correct_momentum_(network, accumulate_grad_batches=1) == 0
    assert {layer.momentum for layer in norms_of(network)} == {0.19}
    assert correct_momentum_(network, accumulate_grad_batches=2) == 21
    assert [layer.momentum for layer in norms_of(network)] == [pytest.approx(0.1, abs=1e-15)] * 21
    layers = nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.InstanceNorm2d(3), nn.LayerNorm(3))
    assert correct_momentum_(layers, accumulate_grad_batches=4) == 0
    assert layers[0].momentum is None
    assert layers[1].momentum == 0.1


NETWORKS = {
    "ResNet-18": lambda **options: ResNet(depth=18, num_classes=4, width=0.125, **options),
    "ResNet-50": lambda **options: ResNet(depth=50, num_classes=4, width=0.125, **options),
    "AlexNetBN": lambda **options: AlexNetBN(
        num_classes=4, in_channels=3, image_size=64, width=0.125, **options
    ),
}


def is_channels_last_only(tensor):
    """Return whether a tensor is channels-last only. With one pixel or one channel, both formats have equal strides."""
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


@pytest.mark.parametrize("checkpoint_activations", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_keeps_channels_last_forward_and_backward(name, checkpoint_activations):
    network = NETWORKS[name](checkpoint_activations=checkpoint_activations)
    network.to(memory_format=torch.channels_last)
    num_outputs = 0
    wrong = []

    def check(tensor, layer):
        if not is_channels_last_only(tensor):
            wrong.append(layer)

    def look(layer, inputs, output):
        nonlocal num_outputs
        # A copy in between would not show in the output, because channels-last weights restore the format.
        before = inputs[0]
        if before.dim() == 4 and before.shape[2] > 1:
            check(before, layer)
        if output.dim() == 4 and output.shape[2] > 1:
            num_outputs += 1
            check(output, layer)
            # The head passes the last layer a gradient in another layout.
            if isinstance(layer, nn.Conv2d):
                output.register_hook(partial(check, layer=layer))

    for layer in network.modules():
        layer.register_forward_hook(look)
    images = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    network(images).sum().backward()
    # The number before AlexNet's last pooling, which leaves one pixel.
    assert num_outputs >= 12
    assert not wrong
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
            assert is_channels_last_only(layer.weight.grad)


SMALL = {
    "ResNet-18": lambda: ResNet(depth=18, num_classes=4, in_channels=1, width=0.125, stem="small"),
    "ResNet-50": lambda: ResNet(depth=50, num_classes=4, in_channels=1, width=0.0625, stem="small"),
    "AlexNetBN": lambda: AlexNetBN(
        num_classes=4, in_channels=1, image_size=16, width=0.0625, bn_position="after_pool"
    ),
}


def pair(name):
    torch.manual_seed(0)
    plain = SMALL[name]()
    again = copy.deepcopy(plain)
    again.checkpoint_activations = True
    return plain, again


def two_steps(network):
    """Accumulate the gradients of two batches. The second forward pass sees the running statistics of the first."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        cross_entropy(network(torch.randn(4, 1, 16, 16)), torch.arange(4)).backward()


def assert_same_bits(plain, again):
    for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(plain.named_buffers(), again.buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", SMALL)
def test_gradients_and_running_statistics_are_bit_identical(name):
    plain, again = pair(name)
    two_steps(plain)
    two_steps(again)
    assert_same_bits(plain, again)


@pytest.mark.parametrize("name", ["ResNet-50", "AlexNetBN"])
def test_the_second_pass_runs_in_the_arithmetic_of_the_first(name):
    """fp16 products are emulated under autocast, as the precision plugin runs a model on a CPU."""
    plain, again = pair(name)
    for network in (plain, again):
        network.half()
        for layer in network.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.float()
        for seed in (1, 2):
            torch.manual_seed(seed)
            images = torch.randn(4, 1, 16, 16).half()
            with torch.autocast("cpu", dtype=torch.float16), Fp16MatmulEmulation():
                loss = cross_entropy(network(images).float(), torch.arange(4))
            loss.backward()
    assert_same_bits(plain, again)


def runs_per_convolution(network, images):
    runs = {}

    def count(name, *args):
        runs[name] += 1

    for name, layer in network.named_modules():
        if isinstance(layer, nn.Conv2d):
            runs[name] = 0
            layer.register_forward_hook(partial(count, name))
    network(images).sum().backward()
    return runs


@pytest.mark.parametrize("name", SMALL)
def test_backward_computes_what_forward_did_not_keep(name):
    plain, again = pair(name)
    images = torch.randn(4, 1, 16, 16)
    assert set(runs_per_convolution(plain, images).values()) == {1}
    runs = runs_per_convolution(again, images)
    if "ResNet" in name:
        assert runs.pop("conv1") == 1  # the stem is stored
    assert set(runs.values()) == {2}
