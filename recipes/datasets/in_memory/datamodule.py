"""Base class of data modules whose images fit in memory."""

from __future__ import annotations

from abc import abstractmethod

import lightning.pytorch as pl

from lightning_hybrid.checks import require_whole
from lightning_hybrid.data.batch_counters import share_of
from recipes.datasets.in_memory.loader import EvalLoader, ImageSet, Normalize, TrainLoader
from recipes.datasets.seed_check import require_seed


class InMemoryDataModule(pl.LightningDataModule):
    """Base class of data modules for images that fit in memory, for any number of ranks.

    Args:
        global_batch_size: Images per optimizer step, over all ranks and accumulation steps.
        seed: Seed of the image order and of augmentation. It must be the same on every rank.
        shift_pixels: Maximum random shift of training images in pixels, per direction. 0 disables it.
        eval_batch_size_per_rank: Images per batch and rank in validation and test. It does not influence results.

    Raises:
        ValueError: An argument is out of range, or `global_batch_size` is not divisible or exceeds the training set.
    """

    num_train: int
    num_classes: int
    image_shape: tuple[int, int, int]  # "channels height width"

    def __init__(
        self,
        *,
        global_batch_size: int,
        seed: int,
        shift_pixels: int = 1,
        eval_batch_size_per_rank: int = 128,
    ) -> None:
        super().__init__()
        require_whole(
            "global_batch_size",
            global_batch_size,
            "each step needs at least one image. Set global_batch_size=128",
        )
        require_seed(seed)
        if global_batch_size > self.num_train:
            raise ValueError(
                f"`global_batch_size` (={global_batch_size}) must be at most the number of training "
                f"images (={self.num_train}), because an epoch would have no step otherwise. Set "
                f"global_batch_size={self.num_train} or less."
            )
        if not 0 <= shift_pixels < self.image_shape[1]:
            raise ValueError(
                f"`shift_pixels` (={shift_pixels}) must be at least 0 and below the "
                f"{self.image_shape[1]} pixels of an image. Set data.shift_pixels=1."
            )
        why = "each batch needs at least one image. Set data.eval_batch_size_per_rank=128"
        require_whole("eval_batch_size_per_rank", eval_batch_size_per_rank, why)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shift_pixels = shift_pixels
        self.eval_batch_size_per_rank = eval_batch_size_per_rank

    @abstractmethod
    def load(self) -> dict[str, ImageSet]:
        """Load the splits `train`, `val` and `test`, which must be the same on every rank."""

    def setup(self, stage: str) -> None:
        """Load all images, and compute the mean and standard deviation of the training images, on every rank."""
        self.image_sets = self.load()
        # Evaluation uses the statistics of the training images too.
        self.normalize = Normalize.fitted_to(self.image_sets["train"].images)

    def train_dataloader(self) -> TrainLoader:
        """Create this rank's training loader. Lightning sets the loader's epoch."""
        trainer = self.trainer
        return TrainLoader(
            self.image_sets["train"],
            global_batch_size=self.global_batch_size,
            accumulate_grad_batches=trainer.accumulate_grad_batches if trainer else 1,
            seed=self.seed,
            shift_pixels=self.shift_pixels,
            normalize=self.normalize,
            trainer=trainer,
            **share_of(self.trainer),
        )

    def _eval_loader(self, name: str) -> EvalLoader:
        return EvalLoader(
            self.image_sets[name],
            batch_size_per_rank=self.eval_batch_size_per_rank,
            normalize=self.normalize,
            **share_of(self.trainer),
        )

    def val_dataloader(self) -> EvalLoader:
        """Create this rank's loader of the validation images."""
        return self._eval_loader("val")

    def test_dataloader(self) -> EvalLoader:
        """Create this rank's loader of the test images."""
        return self._eval_loader("test")
