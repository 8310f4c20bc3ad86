"""A LightningDataModule around image sets that fit in memory: what digits and glyphs have in common."""

from __future__ import annotations

from abc import abstractmethod

import lightning.pytorch as pl

from lightning_hybrid.checks import require_whole
from lightning_hybrid.data.batch_counters import recounting
from lightning_hybrid.data.in_memory.loader import EvalLoader, ImageSet, Normalize, TrainLoader


class InMemoryDataModule(pl.LightningDataModule):
    """Three image sets in memory, for any number of ranks; a subclass says which.

    Args:
        num_train: Training images.
        global_batch_size: Images per optimizer step, over all ranks and accumulation rounds. What one rank takes at a
            time follows from it and the trainer.
        seed: Of the order of images and of augmentation. Every rank must have the same.
        shift_pixels: Training images move by up to this many pixels, each in its own direction; 0 = off.
        eval_batch_size_per_rank: Images per batch of one rank in validation and test; no influence on results.

    Raises:
        ValueError: `global_batch_size` does not divide by the ranks and accumulation rounds, or exceeds the set; a
            shift leaves nothing of an image; a batch is empty.
    """

    num_classes: int
    image_shape: tuple[int, int, int]  # "channels height width"

    def __init__(
        self, *, num_train: int, global_batch_size: int, seed: int, shift_pixels: int, eval_batch_size_per_rank: int
    ) -> None:
        super().__init__()
        require_whole("global_batch_size", global_batch_size, "a step takes images. Set global_batch_size=1 or more")
        require_whole("seed", seed, "NumPy's generators take no other. Set data.seed=0", least=0)
        if global_batch_size > num_train:
            raise ValueError(
                f"`global_batch_size` (={global_batch_size}) must be at most the number of training images "
                f"(={num_train}): an epoch would have no step. Set global_batch_size={num_train} or less."
            )
        if not 0 <= shift_pixels < self.image_shape[1]:
            raise ValueError(
                f"`shift_pixels` (={shift_pixels}) must be from 0 to less than the {self.image_shape[1]} pixels of an "
                "image: beyond that nothing is left of it. Set data.shift_pixels=1."
            )
        if eval_batch_size_per_rank < 1:
            raise ValueError(
                f"`eval_batch_size_per_rank` (={eval_batch_size_per_rank}) must be at least 1: it counts images. Set "
                "data.eval_batch_size_per_rank=128."
            )
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shift_pixels = shift_pixels
        self.eval_batch_size_per_rank = eval_batch_size_per_rank

    @abstractmethod
    def load(self) -> dict[str, ImageSet]:
        """The sets `train`, `val` and `test`, the same on every rank."""

    def setup(self, stage: str) -> None:
        """Load the sets; every rank does."""
        self.image_sets = self.load()
        self.normalise = Normalize.fitted_to(self.image_sets["train"].images)

    def _ranks(self) -> dict[str, int]:
        trainer = self.trainer
        if trainer is None:
            return {"world_size": 1, "rank": 0}
        return {"world_size": trainer.world_size, "rank": trainer.global_rank}

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
        """The share of this rank in the validation images."""
        return self._eval_loader("val")

    def test_dataloader(self) -> EvalLoader:
        """The share of this rank in the test images."""
        return self._eval_loader("test")
