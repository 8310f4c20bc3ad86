"""ResNet-18, 34, 50, 101 and 152 with torchvision's names and large-batch initialisation."""

from __future__ import annotations

from functools import partial
from typing import Literal, cast, get_args

from torch import Tensor, nn

from lightning_hybrid.checks import require_number, require_whole
from lightning_hybrid.models.activation_checkpointing import checkpointed

Variant = Literal["v1.5", "v1"]
Stem = Literal["imagenet", "small"]
ZeroGamma = Literal["last_of_branch", "shortcut", "none"]

BatchNorm = partial[nn.BatchNorm2d]  # with eps and momentum, and without the number of channels

STAGE_CHANNELS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Residual block of ResNet-18 and ResNet-34, with two 3x3 convolutions and a shortcut.

        y = relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x))

    The first convolution has the stride in every variant. The shortcut is the identity. If size or channels change, it
    is `downsample`: a 1x1 convolution with that stride and BatchNorm (option B of He et al. 2015, arXiv:1512.03385).
    """

    expansion = 1

    def __init__(
        self, in_channels: int, channels: int, *, stride: int, variant: Variant, bn: BatchNorm
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, channels, kernel=3, stride=stride)
        self.bn1 = bn(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(channels, channels, kernel=3)
        self.bn2 = bn(channels)
        self.downsample = _shortcut(in_channels, channels, stride=stride, bn=bn)

    @property
    def last_bn(self) -> nn.BatchNorm2d:
        """Last BatchNorm of the residual branch."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, `"batch channels height/stride width/stride"`."""
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.bn2(self.conv2(branch))
        return self.relu(branch + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """Residual block of ResNet-50 and deeper networks, with 1x1, 3x3 and 1x1 convolutions and a shortcut.

        y = relu(bn3(conv3(relu(bn2(conv2(relu(bn1(conv1(x)))))))) + shortcut(x))

    The stride is on the 3x3 convolution in `"v1.5"`, and on the first 1x1 convolution in `"v1"` (He et al. 2015,
    arXiv:1512.03385), which therefore ignores three of four pixels. The shortcut is as in `BasicBlock`.
    """

    expansion = 4

    def __init__(
        self, in_channels: int, channels: int, *, stride: int, variant: Variant, bn: BatchNorm
    ) -> None:
        super().__init__()
        # Names and order of the modules are torchvision's, so that checkpoints load in both directions.
        stride_1x1, stride_3x3 = (1, stride) if variant == "v1.5" else (stride, 1)
        out_channels = channels * self.expansion
        self.conv1 = _conv(in_channels, channels, kernel=1, stride=stride_1x1)
        self.bn1 = bn(channels)
        self.conv2 = _conv(channels, channels, kernel=3, stride=stride_3x3)
        self.bn2 = bn(channels)
        self.conv3 = _conv(channels, out_channels, kernel=1)
        self.bn3 = bn(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, out_channels, stride=stride, bn=bn)

    @property
    def last_bn(self) -> nn.BatchNorm2d:
        """Last BatchNorm of the residual branch."""
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, `"batch 4*channels height/stride width/stride"`."""
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        return self.relu(branch + (x if self.downsample is None else self.downsample(x)))


Block = BasicBlock | Bottleneck

BLOCKS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """Residual network (He et al. 2015, arXiv:1512.03385), by default ResNet-50 v1.5.

    ========  ==================================================  ==================  ============
    layer     what, of ResNet-50 at 224 x 224                     channels            pixels out
    ========  ==================================================  ==================  ============
    conv1     7x7, stride 2; BN, ReLU; max-pool 3x3, stride 2     64 * width          56 x 56
    layer1    3 blocks                                            256 * width         56 x 56
    layer2    4 blocks, the first with stride 2                   512 * width         28 x 28
    layer3    6 blocks, the first with stride 2                   1024 * width        14 x 14
    layer4    3 blocks, the first with stride 2                   2048 * width        7 x 7
    fc        mean over pixels, logits                            `num_classes`
    ========  ==================================================  ==================  ============

    Names, shapes and order of the parameters and buffers are torchvision's (`conv1`, `bn1`, `layer1.0.conv1`, ...,
    `fc`): checkpoints of `torchvision.models.resnet50` load here and the reverse. ResNet-50 has 25,557,032.

    Initialisation is what Jia et al. 2018 (arXiv:1807.11205) describe: convolutions w ~ N(0, 2 / fan_in) with fan_in =
    in_channels * kernel^2 (He et al. 2015, arXiv:1502.01852; torchvision scales by fan-out), fc N(0, 0.01^2) with bias
    0, and gamma = 0 in some BatchNorms: `zero_gamma`, where the authors' text is ambiguous.

    Args:
        depth: 18, 34, 50, 101 or 152.
        num_classes: Classes, the last dimension of the logits.
        in_channels: Channels of the images.
        width: Factor on all channels.
        variant: `"v1.5"`: the stride is on the 3x3 convolution of a bottleneck, `"v1"`: on the first 1x1.
        stem: `"imagenet"` as above; `"small"`: conv1 is 3x3 with stride 1 and there is no max-pool, for images of
            about 32 x 32 (as He et al. 2015 begin their CIFAR networks).
        zero_gamma: gamma = 0 in the last BatchNorm of each branch (`"last_of_branch"`), in the BatchNorm of each
            projected shortcut (`"shortcut"`), or nowhere (`"none"`).
        bn_eps: Added to the variance. 1e-5 is MLPerf's and torch's.
        bn_momentum: Weight of the new batch in the running statistics. 0.1 is MLPerf's and torch's (TensorFlow's 0.9).
        checkpoint_activations: Store only each block's input for backward and compute its inside again: the same
            gradients from 36 % of the activations (30 of 82 MiB per image in fp32 at 224, ResNet-50), for a third more
            arithmetic. Blocks then run one by one: forward hooks on `layer1` to `layer4` do not fire.

    Shapes: images `"batch in_channels height width"` -> logits `"batch num_classes"`, in the images' dtype.
    Channels-last images in a network of `.to(memory_format=torch.channels_last)` stay channels-last throughout.

    Raises:
        ValueError: `depth`, `variant`, `stem` or `zero_gamma` is unknown, or `width` leaves no channels.

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = ResNet(depth=50)
    >>> sum(parameter.numel() for parameter in network.parameters()), len(list(network.parameters()))
    (25557032, 161)
    >>> ResNet(depth=18, num_classes=10, in_channels=1, width=0.125, stem="small")(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        *,
        depth: int = 50,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: float = 1.0,
        variant: Variant = "v1.5",
        stem: Stem = "imagenet",
        zero_gamma: ZeroGamma = "last_of_branch",
        bn_eps: float = 1e-5,
        bn_momentum: float = 0.1,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        require_whole(
            "num_classes",
            num_classes,
            "a classifier needs at least one class. Set model.num_classes=1000",
        )
        require_whole(
            "in_channels", in_channels, "an image has at least one channel. Set model.in_channels=3"
        )
        require_number(
            "bn_eps",
            bn_eps,
            "BatchNorm adds it to the variance to avoid a division by zero. Set model.bn_eps=1.0e-5",
            above=True,
        )
        _check(depth=depth, variant=variant, stem=stem, zero_gamma=zero_gamma, width=width)
        self.checkpoint_activations = checkpoint_activations
        bn = partial(nn.BatchNorm2d, eps=bn_eps, momentum=bn_momentum)
        block, num_blocks = BLOCKS[depth]
        channels = [round(width * c) for c in STAGE_CHANNELS]

        self.conv1 = (
            _conv(in_channels, channels[0], kernel=7, stride=2)
            if stem == "imagenet"
            else _conv(in_channels, channels[0], kernel=3)
        )
        self.bn1 = bn(channels[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "imagenet" else nn.Identity()
        stages = []
        last = channels[0]
        for index, (stage_channels, num) in enumerate(zip(channels, num_blocks, strict=True)):
            blocks = []
            for number in range(num):
                if index > 0 and number == 0:
                    stride = 2
                else:
                    stride = 1
                blocks.append(block(last, stage_channels, stride=stride, variant=variant, bn=bn))
                last = stage_channels * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(last, num_classes)
        self._initialise(zero_gamma)

    def _initialise(self, zero_gamma: ZeroGamma) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            elif isinstance(module, Block):
                # The authors' own article says "the BatchNorm of the shortcut". Elsewhere (Goyal et al. 2017, NVIDIA's
                # entries to MLPerf) it is the last one of each residual branch, so that a block starts as its shortcut
                # alone. This is the default. Read literally, the first block of a layer starts as its branch alone.
                if zero_gamma == "last_of_branch":
                    nn.init.zeros_(module.last_bn.weight)
                elif zero_gamma == "shortcut" and module.downsample is not None:
                    nn.init.zeros_(cast(nn.BatchNorm2d, module.downsample[1]).weight)
        # The standard deviation is that of Goyal et al. 2017, arXiv:1706.02677.
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def pipeline_blocks(self) -> list[nn.Module]:
        """Return the stem, each residual block and the classifier as blocks for pipeline parallelism."""
        stem = nn.Sequential(self.conv1, self.bn1, self.relu, self.maxpool)
        blocks = [
            block
            for layer in (self.layer1, self.layer2, self.layer3, self.layer4)
            for block in layer
        ]
        return [stem, *blocks, nn.Sequential(self.avgpool, nn.Flatten(1), self.fc)]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of normalised images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            if self.checkpoint_activations:
                for block in stage:
                    x = checkpointed(block, x, norms=block)
            else:
                x = stage(x)
        return self.fc(self.avgpool(x).flatten(1))


def _conv(in_channels: int, out_channels: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    # Without bias, because the following normalisation would subtract it.
    return nn.Conv2d(
        in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False
    )


def _shortcut(
    in_channels: int, out_channels: int, *, stride: int, bn: BatchNorm
) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        _conv(in_channels, out_channels, kernel=1, stride=stride), bn(out_channels)
    )


def _check(*, depth: int, variant: str, stem: str, zero_gamma: str, width: float) -> None:
    for name, value, allowed in (
        ("depth", depth, tuple(BLOCKS)),
        ("variant", variant, get_args(Variant)),
        ("stem", stem, get_args(Stem)),
        ("zero_gamma", zero_gamma, get_args(ZeroGamma)),
    ):
        if value not in allowed:
            choices = ", ".join(map(str, allowed))
            raise ValueError(
                f"`{name}` (={value}) must be one of {choices}. Set model.{name} to one of them."
            )
    if round(width * STAGE_CHANNELS[0]) < 1:
        raise ValueError(
            f"`width` (={width}) is too small, because conv1 would have "
            f"no channels. Set model.width={1 / STAGE_CHANNELS[0]} or more."
        )
