"""AlexNet with BatchNorm for large-batch training with any image size, and torchvision's AlexNet."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor, nn

from lightning_hybrid.checks import require_number, require_whole
from recipes.networks.conv_stages import run_stages, stages_of

BNPosition = Literal["before_relu", "after_pool"]
SliceFC = Literal["off", "node"] | bool  # YAML parses `off` as a boolean

CONV_CHANNELS = (96, 256, 384, 384, 256)
HAS_POOL = (True, True, False, False, True)  # a max-pool follows conv1, conv2 and conv5
FC_FEATURES = 4096
POOL_KERNEL = 3
POOL_STRIDE = 2


@dataclass(frozen=True, kw_only=True)
class _Conv:
    # Convolution of AlexNet with an optional max-pool.
    channels: int
    kernel: int
    stride: int
    padding: int
    has_pool: bool

    def out_size(self, size: int, *, pool_padding: int) -> int:
        """Return the output height and width in pixels for a square input, after the max-pool if there is one."""
        size = (size + 2 * self.padding - self.kernel) // self.stride + 1
        if self.has_pool:
            size = (size + 2 * pool_padding - POOL_KERNEL) // POOL_STRIDE + 1
        return size


class AlexNetBN(nn.Module):
    """AlexNet with BatchNorm after each convolution and after the last pooling layer.

    ======  ==================================================  ==================  ============================
    layer   what (defaults: small images)                       channels, features  at ImageNet's size
    ======  ==================================================  ==================  ============================
    conv1   `stem_kernel`, stride `stem_stride`; BN, ReLU       96 * width          11x11, stride 4, pad 2; 55 px
    pool1   max 3x3, stride 2                                                       27 px
    conv2   `conv2_kernel`; BN, ReLU                            256 * width         5x5, pad 2; 27 px
    pool2   max 3x3, stride 2                                                       13 px
    conv3   3x3; BN, ReLU                                       384 * width         3x3, pad 1; 13 px
    conv4   3x3; BN, ReLU                                       384 * width         3x3, pad 1; 13 px
    conv5   3x3; BN, ReLU                                       256 * width         3x3, pad 1; 13 px
    pool5   max 3x3, stride 2; **BN** (`pool5_bn`: "bn5")                           6 px: 9216 features
    fc6     ReLU, dropout                                       4096 * width
    fc7     ReLU, dropout                                       4096 * width
    fc8     logits                                              `num_classes`
    ======  ==================================================  ==================  ============================

    The right column is `model=alexnet_bn_imagenet`: 62,380,232 parameters, of which 512 are in bn5. Without BatchNorm,
    and with biases in the convolutions, the network would have 62,378,344.

    Published parts and our choices:

    * Five convolutions, three overlapping poolings, three fully connected layers, dropout: Krizhevsky et al. 2012.
    * BatchNorm after pool5, whose output otherwise widens with training: Jia et al. 2018, arXiv:1807.11205.
    * The rest of their network is not published layer by layer. The nearest, B. Ginsburg's AlexNet-BN in NVCaffe 0.16
      (`models/alexnet_bn`), has two layouts. It is not known which one they started from. `train_val` normalizes each
      convolution before its ReLU (as Ioffe and Szegedy 2015, arXiv:1502.03167): `bn_position="before_relu"`.
      `train_val2`, which the LARS experiments there use, is `bn_position="after_pool"` with `conv_bias=True`:
      convolutions 1 to 4, then ReLU, pooling if any, BatchNorm without gamma and beta (here with them).
    * Our choices are ungrouped convolutions and the standard deviations of the initial weights, see the code.

    Args:
        num_classes: Number of classes, the last dimension of the logits.
        in_channels: Number of channels of the images.
        image_size: Height and width of the images, in pixels.
        width: Factor on the channels and features of the original network.
        stem_kernel: Kernel size of conv1 in pixels, an odd number (11 for ImageNet).
        stem_stride: Stride of conv1, in pixels (4 for ImageNet).
        stem_padding: Padding of conv1, in pixels (2 for ImageNet at 224, 0 at 227). None: half the kernel size.
        conv2_kernel: Kernel size of conv2 in pixels, an odd number (5 for ImageNet). Padding keeps the image size.
        pool_padding: Padding of the poolings, 0 (ImageNet) or 1 pixel.
        bn_position: Position of the convolutions' BatchNorm: `"before_relu"` or `"after_pool"`. The latter is after the
            ReLU if there is no pooling, and conv5 is then normalized only by `pool5_bn`.
        pool5_bn: Use BatchNorm after pool5. False is the paper's ablation.
        conv_bias: Use biases in the convolutions. With `"before_relu"`, BatchNorm subtracts them again.
        fc_std: Initial standard deviation of the weights of fc6 and fc7. None: sqrt(2 / fan_in).
        dropout: Dropout probability after fc6 and fc7.
        bn_eps: Number that is added to the variance. torch uses 1e-5, and Ginsburg uses 1e-4.
        bn_momentum: Weight of the new batch in the running statistics. torch and Ginsburg use 0.1.
        checkpoint_activations: Recompute the activations inside each convolution stage in backward.
        slice_fc: `"node"`: With `hybrid_allreduce`, fc6, fc7 and fc8 are tensor-parallel over the ranks of a node.

    Shapes: images `"batch in_channels image_size image_size"` -> logits `"batch num_classes"`, in the images' dtype.

    Raises:
        ValueError: `bn_position` or `slice_fc` is unknown, `width` leaves a layer without channels, a kernel is even,
            `pool_padding` is above 1, or the strides reduce `image_size` to nothing.

    >>> import torch
    >>> network = AlexNetBN(num_classes=10, in_channels=1, image_size=8, width=0.125)
    >>> network(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> [layer.out_channels for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    [12, 32, 48, 48, 32]
    >>> sum(isinstance(layer, nn.BatchNorm2d) for layer in network.modules())    # five, and bn5
    6
    """

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int,
        image_size: int,
        width: float = 1.0,
        stem_kernel: int = 3,
        stem_stride: int = 1,
        stem_padding: int | None = None,
        conv2_kernel: int = 3,
        pool_padding: int = 1,
        bn_position: BNPosition = "before_relu",
        pool5_bn: bool = True,
        conv_bias: bool = False,
        fc_std: float | None = None,
        dropout: float = 0.5,
        bn_eps: float = 1e-5,
        bn_momentum: float = 0.1,
        checkpoint_activations: bool = False,
        slice_fc: SliceFC = "off",
    ) -> None:
        super().__init__()
        for name, value in (
            ("num_classes", num_classes),
            ("in_channels", in_channels),
            ("image_size", image_size),
            ("stem_stride", stem_stride),
        ):
            require_whole(
                name, value, f"the network cannot be built otherwise. Set model.{name}=1 or more"
            )
        require_whole(
            "stem_padding",
            stem_padding or 0,
            "padding cannot be negative. Set model.stem_padding=2",
            least=0,
        )
        require_number(
            "bn_eps",
            bn_eps,
            "BatchNorm adds it to the variance to avoid a division by zero. Set model.bn_eps=1.0e-5",
            above=True,
        )
        channels = [round(width * num_channels) for num_channels in CONV_CHANNELS]
        _check(
            width,
            channels,
            bn_position,
            pool_padding,
            stem_kernel=stem_kernel,
            conv2_kernel=conv2_kernel,
        )
        self.checkpoint_activations = checkpoint_activations
        self.node_slices = _node_slices(slice_fc, ("fc6", "fc7"), ("fc8",))

        convs = [
            _Conv(channels=num_channels, kernel=3, stride=1, padding=1, has_pool=has_pool)
            for num_channels, has_pool in zip(channels, HAS_POOL, strict=True)
        ]
        if stem_padding is None:
            stem_padding = stem_kernel // 2
        convs[0] = replace(convs[0], kernel=stem_kernel, stride=stem_stride, padding=stem_padding)
        convs[1] = replace(convs[1], kernel=conv2_kernel, padding=conv2_kernel // 2)
        size = image_size
        for conv in convs:
            size = conv.out_size(size, pool_padding=pool_padding)
        if size < 1:
            raise ValueError(
                f"`image_size` (={image_size}) is too small, because no pixel would remain after "
                "pool5. Set a larger model.image_size, or a smaller model.stem_stride."
            )

        # Not grouped, unlike both of Ginsburg's networks, which use two groups: Jia et al. report 62 million
        # parameters, which is the ungrouped network. Grouped it would have 60,965,224.
        layers: list[nn.Module] = []
        in_features = in_channels
        for index, conv in enumerate(convs):
            layers.append(
                nn.Conv2d(
                    in_features,
                    conv.channels,
                    conv.kernel,
                    stride=conv.stride,
                    padding=conv.padding,
                    bias=conv_bias,
                )
            )
            in_features = conv.channels
            if bn_position == "before_relu":
                layers.append(nn.BatchNorm2d(in_features, eps=bn_eps, momentum=bn_momentum))
            layers.append(nn.ReLU(inplace=True))
            if conv.has_pool:
                layers.append(nn.MaxPool2d(POOL_KERNEL, stride=POOL_STRIDE, padding=pool_padding))
            # In `train_val2` nothing is normalized between conv5 and fc6, where the paper has bn5.
            if bn_position == "after_pool" and index < 4:
                layers.append(nn.BatchNorm2d(in_features, eps=bn_eps, momentum=bn_momentum))
        if pool5_bn:
            # bn5, Jia et al. 2018
            layers.append(nn.BatchNorm2d(in_features, eps=bn_eps, momentum=bn_momentum))
        self.features = nn.Sequential(*layers)
        fc = round(width * FC_FEATURES)
        self.fc6 = nn.Linear(in_features * size * size, fc)
        self.fc7 = nn.Linear(fc, fc)
        self.fc8 = nn.Linear(fc, num_classes)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        self._initialize(fc_std)

    def _initialize(self, fc_std: float | None) -> None:
        # Convolutions are scaled by fan-in and fully connected layers are Gaussian, as in the authors' article, which
        # does not give the standard deviation. fc8 uses 0.01 (Krizhevsky et al. 2012). Ginsburg's 0.005 for fc6 and fc7
        # would silence layers much narrower than 4096, so the default is sqrt(2 / fan_in). Biases are 0.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for layer in (self.fc6, self.fc7, self.fc8):
            if fc_std is None:
                hidden_std = math.sqrt(2 / layer.in_features)
            else:
                hidden_std = fc_std
            nn.init.normal_(layer.weight, std=0.01 if layer is self.fc8 else hidden_std)
            nn.init.zeros_(layer.bias)

    def pipeline_blocks(self) -> list[nn.Module]:
        """Return the network as a sequence of blocks for pipeline parallelism.

        A block is a convolution with the layers after it, or a hidden layer.
        """
        hidden = [nn.Sequential(layer, self.relu, self.dropout) for layer in (self.fc6, self.fc7)]
        return [*stages_of(self.features), nn.Flatten(1), *hidden, self.fc8]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of normalized images."""
        x = run_stages(
            self.features, images, checkpoint_activations=self.checkpoint_activations
        ).flatten(1)
        x = self.dropout(self.relu(self.fc6(x)))
        x = self.dropout(self.relu(self.fc7(x)))
        return self.fc8(x)


class AlexNet(nn.Module):
    """Single-column AlexNet without normalization layers, as in torchvision (Krizhevsky 2014, arXiv:1404.5997).

        features     conv 11x11 stride 4, 64; pool; conv 5x5, 192; pool; conv 3x3, 384; 256; 256; pool
        avgpool      mean over 6 x 6 cells
        classifier   dropout; fc 4096; dropout; fc 4096; fc `num_classes`

    A ReLU follows every convolution and hidden layer, and a pool is max 3x3 with stride 2. The network has 61,100,840
    parameters in 16 tensors. Checkpoints of `torchvision.models.alexnet` load here and vice versa. The network is a
    baseline for `AlexNetBN`.

    Args:
        num_classes: Number of classes, the last dimension of the logits.
        in_channels: Number of channels of the images.
        dropout: Dropout probability before the two hidden layers.
        checkpoint_activations: Recompute the activations inside each convolution stage in backward.
        slice_fc: As in `AlexNetBN`, for the three layers of the classifier.

    Shapes: images `"batch in_channels height width"`, 63 pixels at least, 224 as published -> logits
    `"batch num_classes"`, in the images' dtype.

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = AlexNet()
    >>> sum(parameter.numel() for parameter in network.parameters()), len(list(network.parameters()))
    (61100840, 16)
    """

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.5,
        checkpoint_activations: bool = False,
        slice_fc: SliceFC = "off",
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
        self.checkpoint_activations = checkpoint_activations
        self.node_slices = _node_slices(
            slice_fc, ("classifier.1", "classifier.4"), ("classifier.6",)
        )
        # Names, order and initialization (torch's default) are torchvision's.
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(POOL_KERNEL, stride=POOL_STRIDE),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(POOL_KERNEL, stride=POOL_STRIDE),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(POOL_KERNEL, stride=POOL_STRIDE),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, FC_FEATURES),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(FC_FEATURES, FC_FEATURES),
            nn.ReLU(inplace=True),
            nn.Linear(FC_FEATURES, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of normalized images."""
        x = run_stages(self.features, images, checkpoint_activations=self.checkpoint_activations)
        return self.classifier(self.avgpool(x).flatten(1))


def _node_slices(slice_fc: SliceFC, *layers: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    if slice_fc not in ("off", "node", False):
        raise ValueError(
            f"`slice_fc` (={slice_fc!r}) must be off or node. Set model.slice_fc=node to divide "
            "the fully connected layers among the ranks of a node, or leave it out."
        )
    if slice_fc == "node":
        return layers
    return ()


def _check(
    width: float, channels: list[int], bn_position: str, pool_padding: int, **kernels: int
) -> None:
    if min(channels) < 1:
        raise ValueError(
            f"`width` (={width}) is too small, because conv1 would have "
            f"{channels[0]} channels. Set model.width={1 / CONV_CHANNELS[0]:.4f} or more."
        )
    for name, kernel in kernels.items():
        if kernel % 2 == 0:
            raise ValueError(
                f"`{name}` (={kernel}) must be odd, because the padding must be a whole number of "
                f"pixels. Set model.{name}={kernel + 1}."
            )
    if bn_position not in get_args(BNPosition):
        raise ValueError(
            f"`bn_position` (={bn_position}) must be one of {', '.join(get_args(BNPosition))}. "
            "Set model.bn_position=before_relu, for example."
        )
    if pool_padding not in (0, 1):
        raise ValueError(
            f"`pool_padding` (={pool_padding}) must be 0 or 1, because padding can be at most half "
            "of the 3x3 window. Set model.pool_padding=1."
        )
