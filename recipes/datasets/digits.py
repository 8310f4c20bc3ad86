"""Handwritten digits from scikit-learn, a real dataset of 57 KB that needs no download.

    1,797 gray images of 8 x 8 pixels, 10 classes (UCI "Optical Recognition of Handwritten Digits", CC BY 4.0)
    -> 16 x 16, uint8 -> fixed stratified split: 1,257 train, 180 validation, 360 test

The dataset is small and easy. It shows that a run works, but its accuracies say nothing about ImageNet.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold, train_test_split

from lightning_hybrid.checks import require_choice
from recipes.datasets.in_memory.datamodule import InMemoryDataModule
from recipes.datasets.in_memory.loader import ImageSet

NUM_CLASSES = 10
IMAGE_SIZE = 16
NUM_TRAIN = 1257
NUM_VAL = 180
NUM_TEST = 360
NUM_FOLDS = 5
SPLIT_SEED = 0  # seed of the split only: the three sets are the same in every run


def digits_split(fold: int | None = None) -> dict[str, ImageSet]:
    """Load the digits, split into `train`, `val` and `test` in the same way in every run.

    If `fold` (0 to 4) is set, the test images are that cross-validation fold. Each image is a test image in exactly one
    of the five folds. A fold may have one more training image and one fewer test image than the fixed split.

    >>> {name: len(image_set.labels) for name, image_set in digits_split().items()}
    {'train': 1257, 'val': 180, 'test': 360}
    >>> sum(len(digits_split(fold)["test"].labels) for fold in range(NUM_FOLDS))
    1797
    """
    digits = load_digits()
    gray = torch.from_numpy(digits.images).float()[:, None] * (255 / 16)
    gray = F.interpolate(gray, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    whole = ImageSet(
        images=gray.round().to(torch.uint8), labels=torch.from_numpy(digits.target).long()
    )

    def split(
        indices: NDArray[np.int64], num_second: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return train_test_split(
            indices,
            test_size=num_second,
            stratify=digits.target[indices],
            random_state=SPLIT_SEED,
            shuffle=True,
        )

    indices = np.arange(len(whole.labels))
    if fold is None:
        remaining, test = split(indices, NUM_TEST)
    else:
        folds = StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=SPLIT_SEED)
        remaining, test = list(folds.split(indices, digits.target))[fold]
    train, val = split(remaining, NUM_VAL)
    parts = {"train": train, "val": val, "test": test}
    return {
        name: ImageSet(whole.images[indices], whole.labels[indices])
        for name, indices in parts.items()
    }


class DigitsDataModule(InMemoryDataModule):
    """Data module for scikit-learn's handwritten digits, with images of 16 x 16 pixels.

    Args:
        fold: Cross-validation fold that serves as test set, 0 to 4. None: the fixed split.
        global_batch_size, seed, shift_pixels, eval_batch_size_per_rank: As in `InMemoryDataModule`.

    Raises:
        ValueError: The fold does not exist, or as in `InMemoryDataModule`.
    """

    num_train = NUM_TRAIN
    num_classes = NUM_CLASSES
    image_shape = (1, IMAGE_SIZE, IMAGE_SIZE)

    def __init__(
        self,
        *,
        global_batch_size: int,
        seed: int,
        shift_pixels: int = 1,
        eval_batch_size_per_rank: int = 128,
        fold: int | None = None,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size,
            seed=seed,
            shift_pixels=shift_pixels,
            eval_batch_size_per_rank=eval_batch_size_per_rank,
        )
        if fold is not None:
            require_choice(
                "fold",
                fold,
                tuple(range(NUM_FOLDS)),
                "the images of this fold are the test set. Set data.fold=null to use the fixed split",
            )
        self.fold = fold

    def load(self) -> dict[str, ImageSet]:
        """Load the training, validation and test images with `digits_split`."""
        return digits_split(self.fold)
