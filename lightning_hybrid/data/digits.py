"""Scikit-learn's handwritten digits: a real image set of 57 KB that comes with its library, so nothing is downloaded.

    1,797 grey images of 8 x 8 pixels, 10 classes (UCI "Optical Recognition of Handwritten Digits", CC BY 4.0)
    -> 16 x 16, uint8 -> fixed stratified split: 1,257 train, 180 validation, 360 test

Small and easy: it shows that a run works, and says nothing about ImageNet.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lightning_hybrid.data.loaders import EvalLoader, ImageSet, Normalise, TrainLoader
from lightning_hybrid.data.resume import recounting

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


class DigitsDataModule(pl.LightningDataModule):
    """Handwritten digits, 16 x 16, for any number of ranks.

    Args:
        global_batch_size: Images per optimizer step, over all ranks and accumulation rounds. What one rank takes at a
            time follows from it and the trainer.
        seed: Of the order of images and of augmentation. Every rank must have the same.
        shift_pixels: Training images move by up to this many pixels, each in its own direction; 0 = off.
        eval_batch_size_per_rank: Images per batch of one rank in validation and test; no influence on results.

    Raises:
        ValueError: `global_batch_size` does not divide by the ranks and accumulation rounds, or exceeds the set.
    """

    def __init__(
        self, *, global_batch_size: int, seed: int, shift_pixels: int = 1, eval_batch_size_per_rank: int = 128
    ) -> None:
        super().__init__()
        if global_batch_size > NUM_TRAIN:
            raise ValueError(
                f"`global_batch_size` (={global_batch_size}) must be at most the number of training images "
                f"(={NUM_TRAIN}): an epoch would have no step. Set global_batch_size={NUM_TRAIN} or less."
            )
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shift_pixels = shift_pixels
        self.eval_batch_size_per_rank = eval_batch_size_per_rank

    def setup(self, stage: str) -> None:
        """Load the split; every rank does, it is 0.5 MB."""
        self.image_sets = load_split()
        self.normalise = Normalise.fitted_to(self.image_sets["train"].images)

    def _ranks(self) -> dict[str, int]:
        trainer = self.trainer
        return {"world_size": trainer.world_size, "rank": trainer.global_rank} if trainer else _ALONE

    def train_dataloader(self) -> TrainLoader:
        """Batches of this rank; Lightning tells the loader the epoch."""
        trainer = self.trainer
        return TrainLoader(
            self.image_sets["train"],
            global_batch_size=self.global_batch_size,
            accumulate_grad_batches=trainer.accumulate_grad_batches if trainer else 1,
            seed=self.seed,
            shift_pixels=self.shift_pixels,
            normalise=self.normalise,
            on_other_accumulation=recounting(trainer),
            **self._ranks(),
        )

    def _eval_loader(self, name: str) -> EvalLoader:
        return EvalLoader(
            self.image_sets[name],
            batch_size_per_rank=self.eval_batch_size_per_rank,
            normalise=self.normalise,
            **self._ranks(),
        )

    def val_dataloader(self) -> EvalLoader:
        """The share of this rank in the 180 validation images."""
        return self._eval_loader("val")

    def test_dataloader(self) -> EvalLoader:
        """The share of this rank in the 360 test images."""
        return self._eval_loader("test")


_ALONE: dict[str, Any] = {"world_size": 1, "rank": 0}
