"""Fashion-MNIST, a dataset of 70,000 gray images of clothing, with 28 x 28 pixels and 10 classes.

    60,000 training images -> train, of which some may be held out as validation images
    10,000 test images     -> test; validation too, if no training image is held out

Xiao et al. 2017, arXiv:1708.07747, MIT license. The four published files are read from disk, and nothing is downloaded.
Debian has them in the package `dataset-fashion-mnist`.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor

from lightning_hybrid.checks import require_whole
from recipes.datasets.fashion_mnist_files import DEBIAN_FOLDER, check_files, content_of
from recipes.datasets.in_memory.datamodule import InMemoryDataModule
from recipes.datasets.in_memory.loader import ImageSet

NUM_CLASSES = 10
IMAGE_SIZE = 28
NUM_TRAIN = 60_000
SPLIT_SEED = 0  # seed of the held-out images only: they are the same in every run


def array_of(content: bytes) -> Tensor:
    """Parse the content of an IDX file into a uint8 tensor.

    The format is: two zero bytes, 8 for "unsigned byte", the number of dimensions, the size of each dimension as a
    big-endian 32-bit number, and the values.

    >>> array_of(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6]))
    tensor([[1, 2, 3],
            [4, 5, 6]], dtype=torch.uint8)

    Raises:
        ValueError: The content is not an IDX file of unsigned bytes.
    """
    if len(content) >= 4:
        num_dims = content[3]
    else:
        num_dims = 0
    first_value = 4 + 4 * num_dims
    if content[:3] != b"\0\0\x08" or num_dims == 0 or len(content) < first_value:
        raise ValueError(
            f"`content` (={content[:8]!r}...) does not begin like an IDX file of unsigned "
            "bytes. Use the published file."
        )
    shape = struct.unpack(f">{num_dims}I", content[4:first_value])
    values = np.frombuffer(content, np.uint8, offset=first_value)
    if len(values) != prod(shape):
        raise ValueError(
            f"`content` (={len(values)} values) does not have the size that its header specifies, "
            f"which is {' x '.join(map(str, shape))}. Use the published file."
        )
    return torch.from_numpy(values.reshape(shape).copy())


def image_set_of(root: str | Path, name: str) -> ImageSet:
    """Read the images and labels of the split `train` or `t10k` (test) from disk."""
    images = array_of(content_of(root, f"{name}-images-idx3-ubyte.gz"))
    labels = array_of(content_of(root, f"{name}-labels-idx1-ubyte.gz"))
    return ImageSet(images=images[:, None], labels=labels.long())


class FashionMNISTDataModule(InMemoryDataModule):
    """Data module for Fashion-MNIST, with images of 28 x 28 pixels.

    Args:
        root: Folder with the four files, each `.gz`.
        num_held_out: Number of training images that are held out for validation. They are the same in every run and
            stratified by class. 0: train on all images, and validate on the test images, as is usual for ImageNet.
        global_batch_size, seed, shift_pixels, eval_batch_size_per_rank: As in `InMemoryDataModule`.

    Raises:
        ValueError: A file is missing, an argument is invalid as in `InMemoryDataModule`, or, in `setup`, the checksum
            of a file differs.
    """

    num_classes = NUM_CLASSES
    image_shape = (1, IMAGE_SIZE, IMAGE_SIZE)

    def __init__(
        self,
        *,
        global_batch_size: int,
        seed: int,
        root: str = DEBIAN_FOLDER,
        shift_pixels: int = 2,
        eval_batch_size_per_rank: int = 500,
        num_held_out: int = 0,
    ) -> None:
        require_whole(
            "num_held_out",
            num_held_out,
            "this many training images are held out for validation. Set data.num_held_out=10000",
            least=0,
        )
        if num_held_out >= NUM_TRAIN:
            raise ValueError(
                f"`num_held_out` (={num_held_out}) must be below the number of training images (={NUM_TRAIN}). Set "
                "data.num_held_out=10000."
            )
        check_files(root)
        self.root = root
        self.num_held_out = num_held_out
        self.num_train = NUM_TRAIN - num_held_out
        super().__init__(
            global_batch_size=global_batch_size,
            seed=seed,
            shift_pixels=shift_pixels,
            eval_batch_size_per_rank=eval_batch_size_per_rank,
        )

    def load(self) -> dict[str, ImageSet]:
        """Read the dataset from disk, and hold out training images for validation if configured."""
        train = image_set_of(self.root, "train")
        test = image_set_of(self.root, "t10k")
        if self.num_held_out == 0:
            return {"train": train, "val": test, "test": test}
        trained, held_out = train_test_split(
            np.arange(len(train.labels)),
            test_size=self.num_held_out,
            stratify=train.labels.numpy(),
            random_state=SPLIT_SEED,
        )
        return {
            "train": ImageSet(train.images[trained], train.labels[trained]),
            "val": ImageSet(train.images[held_out], train.labels[held_out]),
            "test": test,
        }
