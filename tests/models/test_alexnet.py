"""AlexNet-BN: its shape is the published one, its initialisation is the documented one."""

import pytest
import torch
from torch import nn

from lightning_hybrid.models import AlexNetBN


def small(**changes):
    return AlexNetBN(**{"num_classes": 10, "in_channels": 1, "image_size": 16, "width": 0.125} | changes)


def kinds(module):
    names = {nn.Conv2d: "conv", nn.BatchNorm2d: "bn", nn.ReLU: "relu", nn.MaxPool2d: "pool"}
    return " ".join(names[type(layer)] for layer in module.features)


def test_layers_come_in_the_published_order():
    block = "conv bn relu"
    assert kinds(small()) == f"{block} pool {block} pool {block} {block} {block} pool bn"


def test_at_full_width_channels_are_alexnets():
    with torch.device("meta"):
        network = AlexNetBN(num_classes=1000, in_channels=3, image_size=227, stem_kernel=11, stem_stride=4)
    convs = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [96, 256, 384, 384, 256]
    assert all(conv.groups == 1 and conv.bias is None for conv in convs)
    assert (network.fc6.out_features, network.fc7.out_features, network.fc8.out_features) == (4096, 4096, 1000)


@pytest.mark.parametrize("image_size", [8, 16, 28, 33])
@pytest.mark.parametrize("stem", [{}, {"stem_kernel": 5, "stem_stride": 2}], ids=["stem 3/1", "stem 5/2"])
def test_any_image_size_gives_one_row_of_logits_per_image(image_size, stem):
    network = small(image_size=image_size, **stem)
    assert network(torch.zeros(3, 1, image_size, image_size)).shape == (3, 10)


def test_convolutions_start_at_fan_in_scale_and_connected_layers_gaussian():
    """A sample deviation is off by std / sqrt(2 n), which is under 2 % for each of these; 10 % are five times that."""
    torch.manual_seed(0)
    network = small(width=0.5)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels > 1:
            fan_in = layer.in_channels * layer.kernel_size[0] ** 2
            assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)
    assert network.fc7.weight.std().item() == pytest.approx((2 / 2048) ** 0.5, rel=0.1)
    assert network.fc8.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert not any(layer.bias.any() for layer in (network.fc6, network.fc7, network.fc8))


def test_dropout_follows_both_hidden_layers():
    network, shapes = small(), []
    network.dropout.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    network(torch.zeros(2, 1, 16, 16))
    assert shapes == [(2, 512), (2, 512)]


def test_dropout_is_off_in_evaluation_and_at_zero():
    images = torch.randn(4, 1, 16, 16)
    network = small().eval()
    assert torch.equal(network(images), network(images))
    without = small(dropout=0.0)
    assert torch.equal(without(images), without(images))
    dropping = small(dropout=0.9)
    assert not torch.equal(dropping(images), dropping(images))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"width": 0.001}, r"`width` \(=0.001\)"), ({"stem_kernel": 4}, r"`stem_kernel` \(=4\)")],
)
def test_what_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)
