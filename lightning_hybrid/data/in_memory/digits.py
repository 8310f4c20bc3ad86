"""Scikit-learn's handwritten digits: a real image set of 57 KB that comes with its library, without a download.

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


def digits_split() -> dict[str, ImageSet]:
    """Load the image sets `train`, `val` and `test`: the same ones every time.

    >>> {name: len(image_set.labels) for name, image_set in digits_split().items()}
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
    """A data module of handwritten digits, 16 x 16; arguments as in `InMemoryDataModule`."""

    num_train = NUM_TRAIN
    num_classes = NUM_CLASSES
    image_shape = (1, IMAGE_SIZE, IMAGE_SIZE)

    def load(self) -> dict[str, ImageSet]:
        """Load the sets; see `digits_split`."""
        return digits_split()
