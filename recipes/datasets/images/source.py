"""Interfaces for image sources, and a source that decodes and crops images into rows of a batch."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recipes.datasets.images.crops import Frame, render_crop
from recipes.datasets.images.decode import CorruptImageError, Pixels, decode_rgb

log = logging.getLogger(__name__)


class ImageSource(ABC):
    """Abstract base class of collections of stored images with labels, which several threads can read."""

    classes: tuple[str, ...]
    labels: NDArray[np.int64]  # indices into `classes`

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return the content of an image file as bytes.

        Raises:
            OSError: The file cannot be read.
            CorruptImageError: The content differs from what was stored.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Return a name for an image, such as its path, for messages."""


class Crop(Protocol):
    """Protocol for objects that choose which region of an image the network sees.

    See `recipes.datasets.images.crops`.
    """

    @property
    def image_size(self) -> int:
        """Height and width of the crop in pixels."""

    def frame(self, height: int, width: int, *, image: int, epoch: int) -> Frame:
        """Return the crop parameters for an image of `height` x `width` pixels in a given epoch."""


class RowSource(ABC):
    """Abstract base class of image sources from which several threads fill the rows of a batch."""

    num_images: int
    image_size: int

    @abstractmethod
    def load(self, index: int, row: Tensor, *, epoch: int) -> int:
        """Write an image into a row of a batch, and return its label.

        `row` is uint8 `"3 image_size image_size"`. The augmentation may depend on the epoch.
        """


class DecodedImages(RowSource):
    """Source of batch rows that decodes and crops the images of an `ImageSource`.

    An image that cannot be read or decoded does not stop the run. The next readable image replaces it, with its own
    label and the crop of the corrupt one. Each corrupt image is logged once and counted on its rank. If there are more
    than `max_corrupt_images`, `load` raises a `CorruptImageError`, which ends the run.
    """

    def __init__(
        self, source: ImageSource, crop: Crop, *, decoder: str, max_corrupt_images: int
    ) -> None:
        if max_corrupt_images < 0:
            raise ValueError(
                f"`max_corrupt_images` (={max_corrupt_images}) must not be negative. Set "
                "data.max_corrupt_images=0 to stop at the first corrupt image."
            )
        self.source = source
        self.crop = crop
        self.decoder = decoder
        self.num_images = len(source)
        self.image_size = crop.image_size
        self.max_corrupt_images = max_corrupt_images
        self.corrupt: dict[int, str] = {}

    def load(self, index: int, row: Tensor, *, epoch: int) -> int:
        """Decode and crop an image, write it into a row of a batch, and return its label."""
        pixels, label = self._find(index)
        render_crop(pixels, row, self.crop.frame(*pixels.shape[:2], image=index, epoch=epoch))
        return label

    def _find(self, index: int) -> tuple[Pixels, int]:
        """Return the pixels and label of an image, or of the next readable image if it is corrupt."""
        # The replacement depends only on the dataset, so ranks and resumed runs agree, and every batch is full.
        for step in range(self.num_images):
            candidate = (index + step) % self.num_images
            if candidate in self.corrupt:  # known to be corrupt: do not read or count it again
                continue
            try:
                pixels = decode_rgb(self.source.read(candidate), decoder=self.decoder)
            except (CorruptImageError, OSError) as error:
                self._count(candidate, error)
                continue
            return pixels, int(self.source.labels[candidate])
        raise CorruptImageError(
            f"None of the {self.num_images} images can be read. Check the dataset, starting with "
            f"{self.source.name(index)}."
        )

    def _count(self, index: int, error: Exception) -> None:
        name = self.source.name(index)
        # `setdefault` is atomic under the GIL, so exactly one of several threads counts the image. The others return.
        if self.corrupt.setdefault(index, name) is not name:
            return
        num_corrupt = len(self.corrupt)
        if num_corrupt > self.max_corrupt_images:
            raise CorruptImageError(
                f"`max_corrupt_images` (={self.max_corrupt_images}) is exceeded. This rank found "
                f"{num_corrupt} unreadable images, the last of which is {name} "
                f"({error}). Repair the dataset, or increase data.max_corrupt_images to replace more "
                "images by others."
            ) from error
        log.warning(
            "%s cannot be read (%s) and is replaced by the next readable image (%d of at most %d "
            "on this rank).",
            *(name, error, num_corrupt, self.max_corrupt_images),
        )
