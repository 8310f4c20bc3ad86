"""Cropping of images, at random in training and from the center in evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recipes.datasets.images.decode import Pixels

NUM_TRIES = 10  # as published; after that the center crop is used
NUM_DRAWS = 3 + 2 * NUM_TRIES


class Box(NamedTuple):
    """Rectangular region of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Frame(NamedTuple):
    """Parameters of a square crop: a region, its new size, an offset and a flip.

    The region `box` of the image is resized to `height` x `width`. The square is taken from the result at `top`,
    `left`, and flipped horizontally if `flip` is set.
    """

    box: Box
    height: int
    width: int
    top: int
    left: int
    flip: bool


def draws_of(*, seed: int, epoch: int, image: int) -> NDArray[np.float64]:
    """Draw the uniform random numbers in [0, 1) that determine the crop of an image in an epoch.

    They do not depend on rank or order, because the generator is counter-based (Philox, Salmon et al. 2011). Its key is
    (seed, epoch), and its counter is the image.

    >>> float(draws_of(seed=0, epoch=1, image=2)[0]) == float(draws_of(seed=0, epoch=1, image=2)[0])
    True
    """
    # The generator has no state: a resumed run, or another rank, draws the same numbers directly.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    counter = np.array([0, image, 0, 0], dtype=np.uint64)
    bit_generator = np.random.Philox(key=key, counter=counter)
    generator = np.random.Generator(bit_generator)
    return generator.random(NUM_DRAWS)


def random_box(
    height: int,
    width: int,
    draws: Sequence[float] | NDArray[np.float64],
    *,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> Box:
    """Choose a box of random area and aspect ratio, as in Inception (Szegedy et al. 2014, arXiv:1409.4842).

    As in torchvision, boxes are tried until one fits into the image:

        try k:  area_k   = height * width * uniform(area)                 draw 3 + 2k
                aspect_k = exp(uniform(log aspect))                       draw 4 + 2k
                box      = round(sqrt(area_k / aspect_k)) x round(sqrt(area_k * aspect_k))

    The first of 10 boxes that fits is positioned uniformly (draw 0: top, draw 1: left). If none fits, the result is the
    largest centered box whose aspect ratio is in the range. Draw 2 is reserved for the flip.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        draws: `NUM_DRAWS` numbers, uniform in [0, 1).
        area: Minimum and maximum area, as fractions of the image's area.
        aspect: Minimum and maximum ratio of width to height.

    >>> random_box(100, 200, [0.5] * 23, area=(0.25, 0.25), aspect=(1.0, 1.0))
    Box(top=15, left=65, height=71, width=71)
    >>> random_box(10, 200, [0.5] * 23, area=(1.0, 1.0), aspect=(0.75, 1.25))
    Box(top=0, left=94, height=10, width=12)
    """
    min_area = area[0]
    max_area = area[1]
    min_aspect = aspect[0]
    max_aspect = aspect[1]
    # The aspect ratio is uniform in the logarithm, so that 4:3 is as likely as 3:4.
    min_log = math.log(min_aspect)
    max_log = math.log(max_aspect)
    for k in range(NUM_TRIES):
        area_draw = draws[3 + 2 * k]
        aspect_draw = draws[4 + 2 * k]
        box_area = height * width * (min_area + (max_area - min_area) * area_draw)
        box_aspect = math.exp(min_log + (max_log - min_log) * aspect_draw)
        box_width = round(math.sqrt(box_area * box_aspect))
        box_height = round(math.sqrt(box_area / box_aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            # + 1: the last position is as likely as the others. A draw is below 1, so the box stays inside the image.
            top = int(draws[0] * (height - box_height + 1))
            left = int(draws[1] * (width - box_width + 1))
            return Box(top, left, box_height, box_width)

    box_width = width
    box_height = height
    image_aspect = width / height
    if image_aspect < min_aspect:
        box_height = round(width / min_aspect)
    elif image_aspect > max_aspect:
        box_width = round(height * max_aspect)
    return _centered_box(height, width, box_height, box_width)


def _centered_box(height: int, width: int, box_height: int, box_width: int) -> Box:
    top = (height - box_height) // 2
    left = (width - box_width) // 2
    return Box(top, left, box_height, box_width)


def resized(pixels: Pixels, *, height: int, width: int) -> Tensor:
    """Resize an image with antialiased bilinear interpolation, to uint8 `"1 3 height width"`.

    Values differ from Pillow's by at most one gray level.
    """
    images = torch.from_numpy(pixels)[None]
    # This gives channels_last strides, which the result keeps.
    images = images.permute(0, 3, 1, 2)
    return F.interpolate(images, size=(height, width), mode="bilinear", antialias=True)


def render_crop(pixels: Pixels, row: Tensor, frame: Frame) -> None:
    """Crop, resize and optionally flip an image, and write it into a row of a batch.

    `row` is uint8 `"3 image_size image_size"`.
    """
    # Crop first, then resize, as in torchvision's `resized_crop`.
    box = frame.box
    region = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    image = resized(region, height=frame.height, width=frame.width)[0]

    size = row.shape[-1]
    bottom = frame.top + size
    right = frame.left + size
    crop = image[:, frame.top : bottom, frame.left : right]
    if frame.flip:
        crop = crop.flip(-1)
    row.copy_(crop)


def _is_range(values: Sequence[float]) -> bool:
    """Return whether values are two positive numbers in ascending order."""
    if len(values) != 2:
        return False
    low, high = values
    return 0 < low <= high


@dataclass(frozen=True, kw_only=True)
class TrainCrop:
    """Random resized crop with horizontal flip for training, which depends only on (seed, epoch, image).

    Raises:
        ValueError: A range is empty or out of bounds.
    """

    image_size: int
    seed: int
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def __post_init__(self) -> None:
        if not _is_range(self.area) or self.area[1] > 1:
            raise ValueError(
                f"`area` (={list(self.area)}) must be two fractions of an image's area in ascending "
                "order. Set data.area=[0.08,1.0], the usual values for ImageNet."
            )
        if not _is_range(self.aspect):
            raise ValueError(
                f"`aspect` (={list(self.aspect)}) must be two ratios of width to height in ascending "
                "order. Set data.aspect=[0.75,1.3333333333333333], the usual values for ImageNet."
            )

    def frame(self, height: int, width: int, *, image: int, epoch: int) -> Frame:
        """Return the crop parameters for an image of `height` x `width` pixels in a given epoch."""
        draws = draws_of(seed=self.seed, epoch=epoch, image=image)
        box = random_box(height, width, draws, area=self.area, aspect=self.aspect)
        # The draw is reserved even without `flip`, so that the option does not change the crops.
        is_flipped = self.flip and bool(draws[2] < 0.5)
        size = self.image_size
        return Frame(box, height=size, width=size, top=0, left=0, flip=is_flipped)


# Maximum aspect ratio that evaluation resizes. Our choice, far beyond any photograph.
MAX_ASPECT = 64


@dataclass(frozen=True, kw_only=True)
class EvalCrop:
    """Center crop for evaluation, after resizing the shorter side to `eval_resize` pixels.

    Raises:
        ValueError: The crop is larger than the resized image.
    """

    image_size: int
    eval_resize: int

    def __post_init__(self) -> None:
        if self.eval_resize < self.image_size:
            raise ValueError(
                f"`eval_resize` (={self.eval_resize}) must be at least `image_size` "
                f"(={self.image_size}), because the center is cropped from the resized image. Set "
                f"data.eval_resize={round(self.image_size / 0.875)}."
            )

    def frame(self, height: int, width: int, *, image: int, epoch: int) -> Frame:
        """Return the parameters of the center crop for an image of `height` x `width` pixels.

        They are the same in every epoch.
        """
        # A more elongated image would take gigabytes after resizing.
        max_side = MAX_ASPECT * min(height, width)
        box_height = min(height, max_side)
        box_width = min(width, max_side)
        box = _centered_box(height, width, box_height, box_width)
        height, width = short_side_resized(box_height, box_width, short_side=self.eval_resize)

        # round() and not //, as in torchvision's CenterCrop.
        top = round((height - self.image_size) / 2)
        left = round((width - self.image_size) / 2)
        return Frame(box, height=height, width=width, top=top, left=left, flip=False)


def short_side_resized(height: int, width: int, *, short_side: int) -> tuple[int, int]:
    """Scale a height and width so that the shorter side becomes `short_side` pixels.

    The longer side is rounded down, as in torchvision.

    >>> short_side_resized(375, 500, short_side=256)
    (256, 341)
    """
    if height <= width:
        return short_side, short_side * width // height
    return short_side * height // width, short_side
