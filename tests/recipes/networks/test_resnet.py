"""ResNet with its published names, shapes, strides and initialization, and FLOPs of networks."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from recipes.networks.alexnet import AlexNet, AlexNetBN
from recipes.networks.flops import forward_flops_per_image, training_flops_per_image
from recipes.networks.resnet import BasicBlock, Bottleneck, ResNet

# Written by `resnet18()`, `resnet50()` and `alexnet()` of torchvision 0.28.0.
TORCHVISION = json.loads(Path(__file__).with_name("torchvision_0_28_state_dicts.json").read_text())
# `num_params` in `ResNet<depth>_Weights` of torchvision 0.28.0.
NUM_PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


def on_meta(kind, **arguments):
    with torch.device("meta"):
        return kind(**arguments)


def tiny(**changes):
    options = {"depth": 18, "num_classes": 10, "in_channels": 2, "width": 0.125, "stem": "small"}
    return ResNet(**options | changes)


def shapes_of(network):
    return {name: list(tensor.shape) for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("resnet18", on_meta(ResNet, depth=18)),
        ("resnet50", on_meta(ResNet, depth=50)),
        ("resnet50", on_meta(ResNet, depth=50, variant="v1")),
        ("alexnet", on_meta(AlexNet)),
    ],
    ids=["resnet18", "resnet50", "resnet50 v1", "alexnet"],
)
def test_state_dicts_interchange_with_torchvisions(name, network):
    """The order is equal, too, because optimizers keep their state by position."""
    assert list(shapes_of(network).items()) == list(TORCHVISION[name].items())


@pytest.mark.parametrize("depth", NUM_PARAMETERS)
def test_parameters_are_as_many_as_published(depth):
    network = on_meta(ResNet, depth=depth)
    assert sum(parameter.numel() for parameter in network.parameters()) == NUM_PARAMETERS[depth]


@pytest.mark.parametrize(("variant", "conv1", "conv2"), [("v1.5", 1, 2), ("v1", 2, 1)])
def test_the_variant_says_which_convolution_of_a_bottleneck_has_the_stride(variant, conv1, conv2):
    network = on_meta(ResNet, depth=50, variant=variant)
    for stage in (network.layer2, network.layer3, network.layer4):
        first, *later_blocks = stage
        assert first.conv1.stride == (conv1, conv1)
        assert first.conv2.stride == (conv2, conv2)
        assert first.downsample[0].stride == (2, 2)
        for block in later_blocks:
            strides = {conv.stride for conv in (block.conv1, block.conv2, block.conv3)}
            assert strides == {(1, 1)}
    assert all(block.conv2.stride == (1, 1) for block in network.layer1)


@pytest.mark.parametrize(
    ("network", "images", "expected"),
    [
        (on_meta(ResNet), torch.empty(2, 3, 224, 224, device="meta"), [112, 56, 56, 28, 14, 7]),
        (tiny(), torch.randn(2, 2, 32, 32), [32, 32, 32, 16, 8, 4]),
    ],
    ids=["as in the table", "small stem"],
)
def test_sizes_are_those_of_the_table_and_the_small_stem_keeps_that_of_small_images(
    network, images, expected
):
    sizes = []
    for name in ("conv1", "maxpool", "layer1", "layer2", "layer3", "layer4"):
        getattr(network, name).register_forward_hook(
            lambda module, inputs, output: sizes.append(output.shape[-1])
        )
    assert network(images).shape == (len(images), network.fc.out_features)
    assert sizes == expected


@pytest.mark.parametrize("depth", [18, 50])
def test_width_scales_every_channel(depth):
    full = on_meta(ResNet, depth=depth)
    half = on_meta(ResNet, depth=depth, width=0.5)
    for layer, half_layer in zip(full.modules(), half.modules(), strict=True):
        if isinstance(layer, nn.Conv2d):
            assert half_layer.out_channels * 2 == layer.out_channels
            assert layer is full.conv1 or half_layer.in_channels * 2 == layer.in_channels


def test_convolutions_start_at_fan_in_scale_and_fc_at_one_hundredth():
    """A sample deviation is off by std / sqrt(2 n), at most 1.2 % for the 3,456 weights of the smallest layer here."""
    torch.manual_seed(0)
    network = ResNet(depth=50, num_classes=100, width=0.25, in_channels=3)
    checked = 0
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() >= 3000:
            fan_in = layer.in_channels * layer.kernel_size[0] ** 2
            assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.06)
            checked += layer.in_channels != layer.out_channels  # fan-in and fan-out differ here
    assert checked >= 20
    assert network.fc.weight.std().item() == pytest.approx(0.01, rel=0.06)
    assert not network.fc.bias.any()


@pytest.mark.parametrize(("depth", "last"), [(18, "bn2"), (50, "bn3")])
def test_zero_gamma_says_which_normalizations_start_at_zero(depth, last):
    def norms_at_zero(**options):
        network = tiny(depth=depth, bn_eps=0.5, bn_momentum=0.25, **options)
        at_zero = set()
        for name, layer in network.named_modules():
            if isinstance(layer, nn.BatchNorm2d):
                assert layer.eps == 0.5
                assert layer.momentum == 0.25
                if not layer.weight.any():
                    at_zero.add(name)
        return at_zero

    modules = tiny(depth=depth).named_modules()
    blocks = {name: block for name, block in modules if isinstance(block, BasicBlock | Bottleneck)}
    projected = {
        f"{name}.downsample.1" for name, block in blocks.items() if block.downsample is not None
    }
    assert norms_at_zero() == {f"{name}.{last}" for name in blocks}
    assert norms_at_zero(zero_gamma="shortcut") == projected
    assert len(projected) == (4 if depth == 50 else 3)
    assert norms_at_zero(zero_gamma="none") == set()
    for name in ("layer1.1", "layer2.0"):  # so that a block starts as its shortcut
        block = blocks[name]
        x = torch.randn(2, block.conv1.in_channels, 8, 8)
        shortcut = x if block.downsample is None else block.downsample(x)
        assert torch.equal(block(x), shortcut.relu())


@pytest.mark.parametrize(
    "changes",
    [{"depth": 20}, {"variant": "v2"}, {"stem": "cifar"}, {"zero_gamma": True}, {"width": 0.001}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_be_built_is_refused_by_name(changes):
    ((name, value),) = changes.items()
    with pytest.raises(
        ValueError, match=rf"`{name}` \(={value}\) (must|is too small).*model\.{name}"
    ):
        tiny(**changes)


# `_ops` of the weights in torchvision 0.28.0: 1e9 multiply-adds at 224 x 224, to three decimals.
PUBLISHED_GIGA_MULTIPLY_ADDS = [
    (ResNet, {"depth": 18}, 1.814),
    (ResNet, {"depth": 50}, 4.089),
    (AlexNet, {}, 0.714),
]


def alexnet_bn(**changes):
    options = {"num_classes": 4, "in_channels": 1, "image_size": 16, "width": 0.0625}
    return AlexNetBN(**options | changes)


@pytest.mark.parametrize(("kind", "arguments", "giga_multiply_adds"), PUBLISHED_GIGA_MULTIPLY_ADDS)
def test_multiply_adds_are_the_published_ones(kind, arguments, giga_multiply_adds):
    with torch.device("meta"):
        network = kind(**arguments)
    counted = forward_flops_per_image(network, (3, 224, 224)) / 2e9
    assert counted == pytest.approx(giga_multiply_adds, abs=0.0005)


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
    """In backward, each layer's weights and inputs cost one forward each. The images need no gradient."""
    first, *later = by_layer(copy.deepcopy(network), torch.randn(2, *image_shape))
    assert forward_flops_per_image(network, image_shape) == 2 * (first + sum(later))
    assert training_flops_per_image(network, image_shape) == 2 * (2 * first + 3 * sum(later))
