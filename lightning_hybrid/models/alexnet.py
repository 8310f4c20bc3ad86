"""AlexNet with BatchNorm, as large-batch training uses it, for images of any (small) size."""

from __future__ import annotations

import math

from torch import Tensor, nn

CONV_CHANNELS = (96, 256, 384, 384, 256)
FC_FEATURES = 4096
POOL_KERNEL, POOL_STRIDE, POOL_PADDING = 3, 2, 1


def _conv_bn_relu(in_channels: int, out_channels: int, *, kernel: int, stride: int = 1) -> list[nn.Module]:
    """No bias: the normalisation that follows would take it away again."""
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]


def _max_pool() -> nn.Module:
    return nn.MaxPool2d(POOL_KERNEL, stride=POOL_STRIDE, padding=POOL_PADDING)


def _out_size(size: int, *, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


class AlexNetBN(nn.Module):
    """AlexNet with BatchNorm after every convolution and after the last pooling.

    ======  ==========================================================  =======================
    layer   what                                                        channels / features
    ======  ==========================================================  =======================
    conv1   `stem_kernel`, stride `stem_stride`; BN, ReLU; max-pool     96 * width
    conv2   3x3; BN, ReLU; max-pool                                     256 * width
    conv3   3x3; BN, ReLU                                               384 * width
    conv4   3x3; BN, ReLU                                               384 * width
    conv5   3x3; BN, ReLU; max-pool; **BN** ("bn5", the paper's change) 256 * width
    fc6     ReLU, dropout                                               4096 * width
    fc7     ReLU, dropout                                               4096 * width
    fc8     logits                                                      `num_classes`
    ======  ==========================================================  =======================

    Every pooling is the overlapping 3x3 with stride 2 of AlexNet, padded by one, so that it halves any size (8 -> 4 ->
    2 -> 1). Convolutions are padded to keep the size and are not grouped: the groups of Krizhevsky et al. (2012) were
    there to fit two GPUs.

    Sources. Five convolutions, three poolings, three fully connected layers: Krizhevsky et al. 2012. BatchNorm
    between convolution and ReLU: Ioffe and Szegedy 2015, arXiv:1502.03167. BatchNorm after pool5, whose output
    distribution otherwise widens with training, and no weight decay on biases and BatchNorm (the optimizer's matter,
    not the network's): Jia et al. 2018, arXiv:1807.11205. Initialisation follows the same article: convolutions scaled
    by fan-in, fully connected layers Gaussian. It leaves the Gaussian's width open; here it is sqrt(2 / fan_in) for fc6
    and fc7, since a fixed 0.005 (usual at 4096 features) would silence layers as narrow as these, and 0.01 for fc8.

    Args:
        num_classes: Classes, the last dimension of the logits.
        in_channels: Channels of the images.
        image_size: Height and width of the images, in pixels.
        width: Factor on the channels and features of the original network.
        stem_kernel: Kernel of conv1, odd, in pixels (11 for ImageNet).
        stem_stride: Stride of conv1, in pixels (4 for ImageNet).
        dropout: Probability of a zero after fc6 and fc7.

    Shapes: images `"batch in_channels image_size image_size"` -> logits `"batch num_classes"`, in the images' dtype.

    Raises:
        ValueError: A `width` that leaves a layer without channels, an even `stem_kernel`, or an `image_size` that
            the strides reduce to nothing.

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
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        c1, c2, c3, c4, c5 = channels = [round(width * c) for c in CONV_CHANNELS]
        if min(channels) < 1:
            raise ValueError(
                f"`width` (={width}) must leave every layer at least one channel: conv1 would have {c1}. "
                f"The smallest that fits is model.width={1 / CONV_CHANNELS[0]:.4f}."
            )
        if stem_kernel % 2 == 0:
            raise ValueError(
                f"`stem_kernel` (={stem_kernel}) must be odd: the padding that centres it would be half a pixel. "
                f"Use model.stem_kernel={stem_kernel + 1}."
            )
        size = _out_size(image_size, kernel=stem_kernel, stride=stem_stride, padding=stem_kernel // 2)
        for _ in range(3):
            size = _out_size(size, kernel=POOL_KERNEL, stride=POOL_STRIDE, padding=POOL_PADDING)
        if size < 1:
            raise ValueError(f"`image_size` (={image_size}) must be at least 1 pixel. Set model.image_size.")

        self.features = nn.Sequential(
            *_conv_bn_relu(in_channels, c1, kernel=stem_kernel, stride=stem_stride),
            _max_pool(),
            *_conv_bn_relu(c1, c2, kernel=3),
            _max_pool(),
            *_conv_bn_relu(c2, c3, kernel=3),
            *_conv_bn_relu(c3, c4, kernel=3),
            *_conv_bn_relu(c4, c5, kernel=3),
            _max_pool(),
            nn.BatchNorm2d(c5),  # bn5, Jia et al. 2018
        )
        fc = round(width * FC_FEATURES)
        self.fc6 = nn.Linear(c5 * size * size, fc)
        self.fc7 = nn.Linear(fc, fc)
        self.fc8 = nn.Linear(fc, num_classes)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        for layer in (self.fc6, self.fc7, self.fc8):
            std = 0.01 if layer is self.fc8 else math.sqrt(2 / layer.in_features)
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of normalised images."""
        x = self.features(images).flatten(1)
        x = self.dropout(self.relu(self.fc6(x)))
        x = self.dropout(self.relu(self.fc7(x)))
        return self.fc8(x)
