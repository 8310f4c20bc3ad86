"""Base class of data modules for large image datasets, which are loaded on demand on any number of ranks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import lightning.pytorch as pl

from lightning_hybrid.checks import require_whole
from lightning_hybrid.data.batch_counters import share_of
from lightning_hybrid.data.order import Batch, EpochOrder
from recipes.datasets.images.loader import DecodeThreads, ImageEvalLoader, ImageTrainLoader
from recipes.datasets.images.normalize import NormalizeOnDevice
from recipes.datasets.images.source import RowSource
from recipes.datasets.seed_check import require_seed


class ImageDataModule(pl.LightningDataModule, ABC):
    """Base class of data modules for large image datasets, which are loaded on demand.

    Subclasses set the image sources in `setup`. Batches leave the loader as uint8. `DevicePrefetcher` normalizes them
    on the device. Without a prefetcher, `on_after_batch_transfer` does.

    Args:
        global_batch_size: Images per optimizer step, over all ranks and accumulation steps.
        seed: Seed of the image order and of augmentation. It must be the same on every rank.
        eval_batch_size_per_rank: Images per batch and rank in validation and test. It does not influence results.
        num_threads: Decoder threads per rank. None: the number of usable cores divided by the ranks on this machine.
        num_batches_ahead: Number of batches that are prepared while the consumer works.
        mean: Mean levels of red, green and blue, as fractions of 255.
        std: Standard deviations of these levels, as fractions of 255.
    """

    train_rows: RowSource
    eval_rows: RowSource

    def __init__(
        self,
        *,
        global_batch_size: int,
        seed: int,
        eval_batch_size_per_rank: int,
        num_threads: int | None,
        num_batches_ahead: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        for name, value, least, why in (
            (
                "global_batch_size",
                global_batch_size,
                1,
                "each step needs at least one image. Set global_batch_size=128",
            ),
            (
                "eval_batch_size_per_rank",
                eval_batch_size_per_rank,
                1,
                "each batch needs at least one image. Set data.eval_batch_size_per_rank=128",
            ),
            (
                "num_batches_ahead",
                num_batches_ahead,
                1,
                "this number of batches is loaded ahead of training. Set data.num_batches_ahead=2",
            ),
        ):
            require_whole(name, value, why, least=least)
        require_seed(seed)
        if num_threads is not None:
            require_whole(
                "num_threads",
                num_threads,
                "images are decoded in threads. Set data.num_threads=null for a share of the cores",
            )
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.eval_batch_size_per_rank = eval_batch_size_per_rank
        self.num_threads = num_threads
        self.num_batches_ahead = num_batches_ahead
        self.on_device = NormalizeOnDevice(mean=mean, std=std)

    @abstractmethod
    def setup(self, stage: str) -> None:
        """Create the image sources `train_rows` (training) and `eval_rows` (evaluation) on every rank."""

    def _num_threads(self) -> int:
        return self.num_threads or share_of_cores(self.trainer.num_devices if self.trainer else 1)

    def _filler(self) -> DecodeThreads:
        trainer = self.trainer
        return DecodeThreads(
            num_threads=self._num_threads(),
            num_batches_ahead=self.num_batches_ahead,
            pin_memory=trainer is not None and trainer.strategy.root_device.type == "cuda",
        )

    def train_dataloader(self) -> ImageTrainLoader:
        """Create this rank's training loader. Lightning sets the loader's epoch."""
        trainer = self.trainer
        order = EpochOrder(
            num_images=self.train_rows.num_images,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            **share_of(trainer),
            accumulate_grad_batches=trainer.accumulate_grad_batches if trainer else 1,
        )
        return ImageTrainLoader(
            self.train_rows, order, filler=self._filler(), on_device=self.on_device, trainer=trainer
        )

    def val_dataloader(self) -> ImageEvalLoader:
        """Create this rank's validation loader. Each image is loaded by exactly one rank."""
        return ImageEvalLoader(
            self.eval_rows,
            **share_of(self.trainer),
            batch_size_per_rank=self.eval_batch_size_per_rank,
            filler=self._filler(),
            on_device=self.on_device,
        )

    def test_dataloader(self) -> ImageEvalLoader:
        """Create a loader of the validation images, because ImageNet's test labels are not public.

        Published accuracies use the validation images too.
        """
        return self.val_dataloader()

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalize the images on the device, and cast them to the input dtype of the precision plugin.

        Batches that a prefetcher has already normalized are returned unchanged.
        """
        # Images that a `DevicePrefetcher` has normalized are no longer uint8, and stay unchanged.
        normalized = self.on_device(batch)
        if normalized is batch or self.trainer is None:
            return normalized
        converted: Batch = self.trainer.precision_plugin.convert_input(normalized)
        return converted


def share_of_cores(num_ranks: int) -> int:
    """Return the number of decoder threads for each of `num_ranks` processes on this machine.

    It is the number of usable cores divided by `num_ranks`, at least 1.

    >>> share_of_cores(10**6)
    1
    """
    # A container or a job scheduler may give a process fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(1, num_cores // num_ranks)
