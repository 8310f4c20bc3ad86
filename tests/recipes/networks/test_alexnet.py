"""AlexNet-BN with its published shape and its documented initialization."""

import pytest
import torch
from torch import nn

from recipes.networks.alexnet import AlexNet, AlexNetBN

IMAGENET = {
    "num_classes": 1000,
    "in_channels": 3,
    "image_size": 224,
    "width": 1.0,
    "stem_kernel": 11,
    "stem_stride": 4,
    "stem_padding": 2,
    "conv2_kernel": 5,
    "pool_padding": 0,
    "fc_std": 0.005,
}


def small(**changes):
    options = {"num_classes": 10, "in_channels": 1, "image_size": 16, "width": 0.125}
    return AlexNetBN(**options | changes)


def imagenet(**changes):
    with torch.device("meta"):
        return AlexNetBN(**(IMAGENET | changes))


def layers_of(network, kind):
    return [layer for layer in network.modules() if isinstance(layer, kind)]


def numel(tensors):
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("pool5_bn", [True, False])
def test_layers_come_in_the_published_order_or_in_that_of_nvcaffes_lars_experiments(pool5_bn):
    names = {nn.Conv2d: "conv", nn.BatchNorm2d: "bn", nn.ReLU: "relu", nn.MaxPool2d: "pool"}
    plain = small(pool5_bn=pool5_bn)
    nvcaffe = small(bn_position="after_pool", conv_bias=True, pool5_bn=pool5_bn)
    block = "conv bn relu"
    orders = {
        plain: f"{block} pool {block} pool {block} {block} {block} pool",
        nvcaffe: "conv relu pool bn conv relu pool bn conv relu bn conv relu bn conv relu pool",
    }
    for network, order in orders.items():
        result = " ".join(names[type(layer)] for layer in network.features)
        assert result == order + pool5_bn * " bn"
        for conv in layers_of(network, nn.Conv2d):
            assert (conv.bias is not None) == (network is nvcaffe)
        assert network(torch.zeros(2, 1, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize(
    ("image_size", "stem"), [(8, {}), (33, {"stem_kernel": 5, "stem_stride": 2})], ids=str
)
def test_any_image_size_gives_one_row_of_logits_per_image(image_size, stem):
    network = small(image_size=image_size, **stem)
    assert network(torch.zeros(3, 1, image_size, image_size)).shape == (3, 10)


def test_at_imagenets_size_parameters_split_as_the_docstring_says():
    network = imagenet()
    convs = layers_of(network, nn.Conv2d)
    assert [conv.out_channels for conv in convs] == [96, 256, 384, 384, 256]
    assert all(conv.groups == 1 and conv.bias is None for conv in convs)
    assert numel(network.parameters()) == 62_380_232
    assert numel(conv.weight for conv in convs) == 3_745_824
    assert numel(layer.weight for layer in layers_of(network, nn.Linear)) == 58_621_952
    assert numel(layer.bias for layer in (network.fc6, network.fc7, network.fc8)) == 9_192
    *in_convolutions, bn5 = layers_of(network, nn.BatchNorm2d)
    assert sum(numel(layer.parameters()) for layer in in_convolutions) == 2_752
    assert numel(bn5.parameters()) == 512
    excluded = numel(parameter for parameter in network.parameters() if parameter.dim() == 1)
    # As published: the share without decay.
    assert round(100 * excluded / numel(network.parameters()), 2) == 0.02
    with_bias = imagenet(conv_bias=True)
    norms = sum(numel(layer.parameters()) for layer in layers_of(with_bias, nn.BatchNorm2d))
    # from the article, without batch norm
    assert numel(with_bias.parameters()) - norms == 62_378_344


def test_layers_start_at_fan_in_scale_or_at_the_given_deviation_and_biases_at_zero():
    """A sample deviation is off by std / sqrt(2 n), under 2 % for each layer. The bound of 10 % is five times that."""
    torch.manual_seed(0)
    network = small(width=0.5)
    with_fc_std = small(width=0.25, image_size=32, fc_std=0.005, conv_bias=True)
    for layer in layers_of(network, nn.Conv2d):
        if layer.in_channels > 1:
            fan_in = layer.in_channels * layer.kernel_size[0] ** 2
            assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)
    assert network.fc7.weight.std().item() == pytest.approx((2 / 2048) ** 0.5, rel=0.1)
    assert with_fc_std.fc6.weight.std().item() == pytest.approx(0.005, rel=0.03)
    assert with_fc_std.fc7.weight.std().item() == pytest.approx(0.005, rel=0.03)
    for initialized in (network, with_fc_std):
        assert initialized.fc8.weight.std().item() == pytest.approx(0.01, rel=0.1)
        for layer in layers_of(initialized, nn.Conv2d | nn.Linear):
            assert layer.bias is None or not layer.bias.any()


def test_options_reach_every_batch_norm():
    layers = layers_of(small(bn_eps=0.5, bn_momentum=0.25), nn.BatchNorm2d)
    assert [(layer.eps, layer.momentum) for layer in layers] == [(0.5, 0.25)] * 6


def test_plain_alexnet_takes_images_of_63_pixels_and_more():
    network = AlexNet(num_classes=3, in_channels=1).features
    assert network(torch.zeros(1, 1, 63, 63)).shape[2:] == (1, 1)
    with pytest.raises(RuntimeError, match="too small"):
        network(torch.zeros(1, 1, 62, 62))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0.001}, r"`width` \(=0.001\)"),
        ({"stem_kernel": 4}, r"`stem_kernel` \(=4\).*model\.stem_kernel=5"),
        ({"conv2_kernel": 2}, r"`conv2_kernel` \(=2\).*model\.conv2_kernel=3"),
        ({"bn_position": "before_conv"}, r"`bn_position` \(=before_conv\)"),
        ({"pool_padding": 2}, r"`pool_padding` \(=2\)"),
        ({"image_size": 8, "pool_padding": 0}, r"`image_size` \(=8\)"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)
