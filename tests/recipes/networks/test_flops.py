"""FLOPs: the published counts, the same counts from the layers' shapes, and a model that is left as it was."""

import copy

import pytest
import torch
from torch import nn

from recipes.networks.alexnet import AlexNet, AlexNetBN
from recipes.networks.flops import forward_flops_per_image, training_flops_per_image
from recipes.networks.resnet import ResNet

# `_ops` of the weights in torchvision 0.28.0: 1e9 multiply-adds at 224 x 224, to three decimals.
PUBLISHED_GIGA_MULTIPLY_ADDS = [(ResNet, {"depth": 18}, 1.814), (ResNet, {"depth": 50}, 4.089), (AlexNet, {}, 0.714)]


def alexnet_bn(**changes):
    return AlexNetBN(**{"num_classes": 4, "in_channels": 1, "image_size": 16, "width": 0.0625} | changes)


@pytest.mark.parametrize(("kind", "arguments", "giga_multiply_adds"), PUBLISHED_GIGA_MULTIPLY_ADDS)
def test_multiply_adds_are_the_published_ones(kind, arguments, giga_multiply_adds):
    with torch.device("meta"):
        network = kind(**arguments)
    assert forward_flops_per_image(network, (3, 224, 224)) / 2e9 == pytest.approx(giga_multiply_adds, abs=0.0005)


def by_layer(network, images):
    counts = []

    def look(layer, inputs, output):
        per_output = layer.weight[0].numel()
        counts.append(per_output * output[0].numel())

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(look)
    network(images)
    return counts


@pytest.mark.parametrize(
    ("network", "image_shape"),
    [(ResNet(depth=18, width=0.0625, num_classes=5), (3, 64, 48)), (alexnet_bn(), (1, 16, 16))],
    ids=["ResNet-18", "AlexNetBN"],
)
def test_counts_follow_from_the_layers_shapes(network, image_shape):
    """Backward: each layer's weights and inputs cost a forward each; the images themselves need no gradient."""
    first, *others = by_layer(copy.deepcopy(network), torch.randn(2, *image_shape))
    assert forward_flops_per_image(network, image_shape) == 2 * (first + sum(others))
    assert training_flops_per_image(network, image_shape) == 2 * (2 * first + 3 * sum(others))
