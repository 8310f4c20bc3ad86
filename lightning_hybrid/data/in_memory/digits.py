"""Scikit-learn's handwritten digits: a real image set of 57 KB that comes with its library, so nothing is downloaded.

    1,797 grey images of 8 x 8 pixels, 10 classes (UCI "Optical Recognition of Handwritten Digits", CC BY 4.0)
    -> 16 x 16, uint8 -> fixed stratified split: 1,257 train, 180 validation, 360 test

Small and easy: it shows that a run works, and says nothing about ImageNet.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lightning_hybrid.data.in_memory.datamodule import InMemoryDataModule
from lightning_hybrid.data.in_memory.loader import ImageSet

NUM_CLASSES = 10
IMAGE_SIZE = 16
NUM_TRAIN, NUM_VAL, NUM_TEST = 1257, 180, 360
SPLIT_SEED = 0  # of the split alone: the three sets are the same in every run


def load_split() -> dict[str, ImageSet]:
    """The three image sets, by name: `train`, `val`, `test`. The same ones every time.

    >>> {name: len(image_set.labels) for name, image_set in load_split().items()}
    {'train': 1257, 'val': 180, 'test': 360}
    """
    digits = load_digits()
    grey = torch.from_numpy(digits.images).float()[:, None] * (255 / 16)
    grey = F.interpolate(grey, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    whole = ImageSet(images=grey.round().to(torch.uint8), labels=torch.from_numpy(digits.target).long())

    def split(indices: NDArray[np.int64], num_second: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return train_test_split(
            indices, test_size=num_second, stratify=digits.target[indices], random_state=SPLIT_SEED, shuffle=True
        )

    rest, test = split(np.arange(len(whole.labels)), NUM_TEST)
    train, val = split(rest, NUM_VAL)
    parts = {"train": train, "val": val, "test": test}
    return {name: ImageSet(whole.images[indices], whole.labels[indices]) for name, indices in parts.items()}


class DigitsDataModule(InMemoryDataModule):
    """Handwritten digits, 16 x 16, for any number of ranks; arguments as in `InMemoryDataModule`."""

    num_classes = NUM_CLASSES
    image_shape = (1, IMAGE_SIZE, IMAGE_SIZE)

    def __init__(
        self, *, global_batch_size: int, seed: int, shift_pixels: int = 1, eval_batch_size_per_rank: int = 128
    ) -> None:
        super().__init__(
            num_train=NUM_TRAIN,
            global_batch_size=global_batch_size,
            seed=seed,
            shift_pixels=shift_pixels,
            eval_batch_size_per_rank=eval_batch_size_per_rank,
        )

    def load(self) -> dict[str, ImageSet]:
        """See `load_split`."""
        return load_split()
