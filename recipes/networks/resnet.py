"""ResNet-18, 34, 50, 101 and 152 with torchvision's names and large-batch initialization."""

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
STAGE_STRIDES = (1, 2, 2, 2)


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
        shortcut = x
        if self.downsample is not None:
            shortcut = self.downsample(x)
        return self.relu(branch + shortcut)


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
        stride_1x1 = stride
        stride_3x3 = 1
        if variant == "v1.5":
            stride_1x1 = 1
            stride_3x3 = stride
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
        shortcut = x
        if self.downsample is not None:
            shortcut = self.downsample(x)
        return self.relu(branch + shortcut)


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
    layer     operations in ResNet-50 at 224 x 224                channels            output size
    ========  ==================================================  ==================  ============
    conv1     7x7, stride 2; BN, ReLU; max-pool 3x3, stride 2     64 * width          56 x 56
    layer1    3 blocks                                            256 * width         56 x 56
    layer2    4 blocks, the first with stride 2                   512 * width         28 x 28
    layer3    6 blocks, the first with stride 2                   1024 * width        14 x 14
    layer4    3 blocks, the first with stride 2                   2048 * width        7 x 7
    fc        mean over pixels, logits                            `num_classes`
    ========  ==================================================  ==================  ============

    Names, shapes and order of the parameters and buffers are torchvision's (`conv1`, `bn1`, `layer1.0.conv1`, ...,
    `fc`), so that checkpoints of `torchvision.models.resnet50` load here and vice versa. ResNet-50 has 25,557,032
    parameters.

    Weights are initialized as Jia et al. 2018 (arXiv:1807.11205) describe: convolutions w ~ N(0, 2 / fan_in) with
    fan_in = in_channels * kernel^2 (He et al. 2015, arXiv:1502.01852; torchvision scales by fan-out), fc N(0, 0.01^2)
    with bias 0, and gamma = 0 in some BatchNorms. The authors' text does not make clear in which ones. `zero_gamma`
    selects them.

    Args:
        depth: Number of layers: 18, 34, 50, 101 or 152.
        num_classes: Number of classes, the last dimension of the logits.
        in_channels: Number of channels of the images.
        width: Factor by which the number of channels of every layer is multiplied.
        variant: Position of the stride in a bottleneck. `"v1.5"`: the 3x3 convolution. `"v1"`: the first 1x1.
        stem: First layers. `"imagenet"`: as above. `"small"`: conv1 is 3x3 with stride 1 and there is no max-pool, for
            images of about 32 x 32 (as in the CIFAR networks of He et al. 2015).
        zero_gamma: BatchNorms that begin with gamma = 0: the last one of each branch (`"last_of_branch"`), the one of
            each projected shortcut (`"shortcut"`), or none (`"none"`).
        bn_eps: Number that is added to the variance. MLPerf and torch use 1e-5.
        bn_momentum: Weight of the new batch in the running statistics. MLPerf and torch use 0.1 (0.9 in TensorFlow's
            definition).
        checkpoint_activations: Store only each block's input for backward, and recompute its other activations. The
            gradients are the same. ResNet-50 then stores 36 % of the activations (30 of 82 MiB per image in fp32 at
            224), and needs a third more arithmetic. Blocks run one by one, and forward hooks on `layer1` to `layer4` do
            not fire.

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

        maxpool: nn.Module
        if stem == "imagenet":
            self.conv1 = _conv(in_channels, channels[0], kernel=7, stride=2)
            maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = _conv(in_channels, channels[0], kernel=3)
            maxpool = nn.Identity()
        self.bn1 = bn(channels[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = maxpool

        stages = []
        last_channels = channels[0]
        for stage_channels, num, stride in zip(channels, num_blocks, STAGE_STRIDES, strict=True):
            stage = _stage(
                block, last_channels, stage_channels, num, stride=stride, variant=variant, bn=bn
            )
            stages.append(stage)
            last_channels = stage_channels * block.expansion
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(last_channels, num_classes)
        self._initialize(zero_gamma)

    def _initialize(self, zero_gamma: ZeroGamma) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            elif isinstance(module, Block):
                _zero_gamma_of(module, zero_gamma)
        # The standard deviation is that of Goyal et al. 2017, arXiv:1706.02677.
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def _stages(self) -> tuple[nn.Sequential, ...]:
        return self.layer1, self.layer2, self.layer3, self.layer4

    def pipeline_blocks(self) -> list[nn.Module]:
        """Return the stem, each residual block and the classifier as blocks for pipeline parallelism."""
        stem = nn.Sequential(self.conv1, self.bn1, self.relu, self.maxpool)
        residual_blocks: list[nn.Module] = []
        for stage in self._stages():
            residual_blocks.extend(stage)
        classifier = nn.Sequential(self.avgpool, nn.Flatten(1), self.fc)
        return [stem, *residual_blocks, classifier]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of normalized images."""
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.maxpool(x)
        for stage in self._stages():
            if self.checkpoint_activations:
                for block in stage:
                    x = checkpointed(block, x, norms=block)
            else:
                x = stage(x)
        features = self.avgpool(x).flatten(1)
        return self.fc(features)


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    channels: int,
    num_blocks: int,
    *,
    stride: int,
    variant: Variant,
    bn: BatchNorm,
) -> nn.Sequential:
    """Create a sequence of residual blocks, of which only the first has the given stride."""
    blocks = []
    for index in range(num_blocks):
        if index > 0:
            stride = 1
        blocks.append(block(in_channels, channels, stride=stride, variant=variant, bn=bn))
        in_channels = channels * block.expansion
    return nn.Sequential(*blocks)


def _zero_gamma_of(block: Block, zero_gamma: ZeroGamma) -> None:
    # The authors' own article says "the BatchNorm of the shortcut". Elsewhere (Goyal et al. 2017, NVIDIA's entries to
    # MLPerf) it is the last one of each residual branch, so that a block starts as its shortcut alone. This is the
    # default. Read literally, the first block of a layer starts as its branch alone.
    if zero_gamma == "last_of_branch":
        nn.init.zeros_(block.last_bn.weight)
    elif zero_gamma == "shortcut" and block.downsample is not None:
        shortcut_bn = cast(nn.BatchNorm2d, block.downsample[1])
        nn.init.zeros_(shortcut_bn.weight)


def _conv(in_channels: int, out_channels: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    padding = kernel // 2
    # Without bias, because the following normalization would subtract it.
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False)


def _shortcut(
    in_channels: int, out_channels: int, *, stride: int, bn: BatchNorm
) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    projection = _conv(in_channels, out_channels, kernel=1, stride=stride)
    return nn.Sequential(projection, bn(out_channels))


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
