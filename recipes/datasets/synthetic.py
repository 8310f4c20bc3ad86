"""Synthetic dataset of noise images with the size of ImageNet, which needs no image files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_hybrid.checks import require_whole
from recipes.datasets.images.datamodule import ImageDataModule
from recipes.datasets.images.normalize import IMAGENET_MEAN, IMAGENET_STD
from recipes.datasets.images.source import RowSource

# sizes of ImageNet (ILSVRC 2012)
NUM_TRAIN = 1_281_167
NUM_VAL = 50_000


class StoredRows(RowSource):
    """Source of `num_images` noise images that cycles through `num_stored` different images.

    Image i is the stored image `i mod num_stored`, and its label is `i mod num_stored mod num_classes`. The images
    depend only on the seed, and not on the epoch.

    >>> rows = StoredRows(num_images=10, num_stored=4, num_classes=3, image_size=2, seed=0)
    >>> row = torch.empty(3, 2, 2, dtype=torch.uint8)
    >>> [rows.load(index, row, epoch=0) for index in range(8)]
    [0, 1, 2, 0, 0, 1, 2, 0]
    """

    def __init__(
        self, *, num_images: int, num_stored: int, num_classes: int, image_size: int, seed: int
    ) -> None:
        for name, value in (
            ("num_stored_images", num_stored),
            ("num_classes", num_classes),
            ("num_images", num_images),
        ):
            require_whole(name, value, f"no images could be generated. Set data.{name}=1 or more")
        self.num_images = num_images
        self.num_classes = num_classes
        self.image_size = image_size
        levels = np.random.default_rng([seed, 0]).integers(
            0, 256, size=(min(num_stored, num_images), image_size, image_size, 3), dtype=np.uint8
        )
        self._images = torch.from_numpy(levels).permute(0, 3, 1, 2)

    def load(self, index: int, row: Tensor, *, epoch: int) -> int:
        """Copy a stored noise image into a row of a batch, and return its label."""
        # The label belongs to the stored image and not to the index, so that a network can memorize the images.
        stored = index % len(self._images)
        row.copy_(self._images[stored])
        return stored % self.num_classes


class SyntheticImageNetDataModule(ImageDataModule):
    """Data module that yields noise images with the shape and dtype of those of `ImageNetDataModule`.

    Nothing is read or decoded. Use it to measure the throughput of a network without the influence of data loading, and
    to test recipes without a dataset. Accuracies on noise are meaningless. Arguments that are not listed here are those
    of `ImageDataModule`.

    Args:
        seed: Seed of the noise and of the image order. It must be the same on every rank.
        num_classes: Number of classes of the network.
        image_size: Height and width of the images in pixels.
        num_train_images: Images per epoch, by default as many as in ImageNet.
        num_val_images: Images per evaluation, by default as many as in ImageNet.
        num_stored_images: Number of different images in memory. 256 of 224 x 224 take 38.5 MB on each rank (our choice:
            several times a processor's cache, and fast to create).
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        seed: int,
        num_classes: int = 1000,
        image_size: int = 224,
        num_train_images: int = NUM_TRAIN,
        num_val_images: int = NUM_VAL,
        num_stored_images: int = 256,
        eval_batch_size_per_rank: int = 128,
        num_threads: int | None = None,
        num_batches_ahead: int = 2,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size,
            seed=seed,
            eval_batch_size_per_rank=eval_batch_size_per_rank,
            num_threads=num_threads,
            num_batches_ahead=num_batches_ahead,
            mean=mean,
            std=std,
        )
        for name, value in (
            ("num_classes", num_classes),
            ("image_size", image_size),
            ("num_train_images", num_train_images),
            ("num_val_images", num_val_images),
            ("num_stored_images", num_stored_images),
        ):
            require_whole(name, value, f"no images could be generated. Set data.{name}=1 or more")
        self.num_classes = num_classes
        self.image_size = image_size
        self.num_train_images = num_train_images
        self.num_val_images = num_val_images
        self.num_stored_images = num_stored_images
        self.image_shape = (3, image_size, image_size)

    def num_train_images_up_to(self, most: int) -> int:
        """Return the number of training images, but at most `most`."""
        return min(most, self.num_train_images)

    def setup(self, stage: str) -> None:
        """Generate the noise images on every rank, unless they already exist."""
        if hasattr(self, "train_rows"):
            return
        self.train_rows, self.eval_rows = (
            StoredRows(
                num_images=num_images,
                num_stored=self.num_stored_images,
                num_classes=self.num_classes,
                image_size=self.image_size,
                seed=self.seed,
            )
            for num_images in (self.num_train_images, self.num_val_images)
        )
