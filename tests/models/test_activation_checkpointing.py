"""Activation checkpointing: the same numbers from less memory, and every batch counted once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_hybrid.precision.fp16_emulation import Fp16MatmulEmulation
from recipes.networks.alexnet import AlexNetBN
from recipes.networks.resnet import ResNet

NETWORKS = {
    "ResNet-18": lambda: ResNet(depth=18, num_classes=4, in_channels=1, width=0.125, stem="small"),
    "ResNet-50": lambda: ResNet(depth=50, num_classes=4, in_channels=1, width=0.0625, stem="small"),
    "AlexNetBN": lambda: AlexNetBN(num_classes=4, in_channels=1, image_size=16, width=0.0625, bn_position="after_pool"),
}


def pair(name):
    torch.manual_seed(0)
    plain = NETWORKS[name]()
    again = copy.deepcopy(plain)
    again.checkpoint_activations = True
    return plain, again


def two_steps(network):
    """Gradients of two batches, added up; the second forward sees the running statistics that the first has left."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        cross_entropy(network(torch.randn(4, 1, 16, 16)), torch.arange(4)).backward()


def assert_same_bits(plain, again):
    for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(plain.named_buffers(), again.buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_running_statistics_are_bit_identical(name):
    plain, again = pair(name)
    two_steps(plain)
    two_steps(again)
    assert_same_bits(plain, again)


@pytest.mark.parametrize("name", ["ResNet-50", "AlexNetBN"])
def test_the_second_pass_runs_in_the_arithmetic_of_the_first(name):
    """Emulated fp16 products, under autocast: as the precision plugin runs a model on a CPU."""
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
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Conv2d):
            runs[name] = 0
            layer.register_forward_hook(lambda *_, name=name: runs.__setitem__(name, runs[name] + 1))
    network(images).sum().backward()
    return runs


@pytest.mark.parametrize("name", NETWORKS)
def test_backward_computes_what_forward_did_not_keep(name):
    plain, again = pair(name)
    images = torch.randn(4, 1, 16, 16)
    assert set(runs_per_convolution(plain, images).values()) == {1}
    runs = runs_per_convolution(again, images)
    if "ResNet" in name:
        assert runs.pop("conv1") == 1  # the stem is stored
    assert set(runs.values()) == {2}
