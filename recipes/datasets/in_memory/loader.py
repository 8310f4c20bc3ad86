"""Per-rank data loaders for image datasets that fit in memory, which can resume after any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.data.order import Batch, EpochOrder, Indices, ResumableLoader, eval_shares


class ImageSet(NamedTuple):
    """Images and labels of one split, held in memory.

    Images are uint8 `"sample channels height width"`. Labels are int64 `"sample"`.
    """

    images: Tensor
    labels: Tensor


class Normalize(NamedTuple):
    """Callable that normalizes uint8 images to fp32: `(level - mean) / std`."""

    mean: float
    std: float

    @classmethod
    def fitted_to(cls, images: Tensor) -> Normalize:
        """Create a normalization with the mean and standard deviation of the given training images."""
        levels = images.double()
        return cls(mean=levels.mean().item(), std=levels.std().item())

    def __call__(self, images: Tensor) -> Tensor:
        """Convert a batch of uint8 images to normalized fp32 images."""
        return (images.float() - self.mean) / self.std


class TrainLoader(ResumableLoader):
    """Training loader of one rank that shuffles each epoch and can resume after any batch.

    Yields:
        `(images, labels)`: images fp32 `"batch channels height width"`, normalized; labels int64 `"batch"`.
    """

    reads_ahead = True  # and returns new memory for each batch, see `DevicePrefetcher`

    def __init__(
        self,
        image_set: ImageSet,
        *,
        global_batch_size: int,
        world_size: int,
        rank: int,
        accumulate_grad_batches: int,
        seed: int,
        shift_pixels: int,
        normalize: Normalize,
        trainer: pl.Trainer | None = None,
    ) -> None:
        order = EpochOrder(
            num_images=len(image_set.labels),
            global_batch_size=global_batch_size,
            seed=seed,
            world_size=world_size,
            rank=rank,
            accumulate_grad_batches=accumulate_grad_batches,
        )
        super().__init__(order, trainer=trainer)
        self.image_set = image_set
        self.shift_pixels = shift_pixels
        self.normalize = normalize

    def _batches(self, epoch: int, shares: Iterator[Indices]) -> Iterator[Batch]:
        shifts = self._shifts(epoch)
        # Shifts depend on (seed, epoch, image), so augmentation needs no state in a checkpoint.
        for share in shares:
            indices = torch.from_numpy(share)
            images, labels = (stored[indices] for stored in self.image_set)
            yield self.normalize(shifted(images, shifts[indices])), labels

    def _shifts(self, epoch: int) -> Tensor:
        # Drawn for the whole set and indexed by image, so that they do not depend on rank or order.
        generator = np.random.default_rng([self.order.seed, epoch, 1])
        size = (len(self.image_set.labels), 2)
        return torch.from_numpy(
            generator.integers(-self.shift_pixels, self.shift_pixels + 1, size=size)
        )


class EvalLoader:
    """Evaluation loader of one rank. Each image is loaded by exactly one rank (see `eval_shares`)."""

    reads_ahead = True  # and returns new memory for each batch, see `DevicePrefetcher`

    def __init__(
        self,
        image_set: ImageSet,
        *,
        world_size: int,
        rank: int,
        batch_size_per_rank: int,
        normalize: Normalize,
    ) -> None:
        self.image_set = image_set
        self.shares = eval_shares(
            num_images=len(image_set.labels),
            world_size=world_size,
            rank=rank,
            batch_size_per_rank=batch_size_per_rank,
        )
        self.normalize = normalize

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[Batch]:
        for share in self.shares:
            images, labels = (stored[torch.from_numpy(share)] for stored in self.image_set)
            yield self.normalize(images), labels


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift each image down and to the right by its own offset in pixels, and fill the margins with black.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> shifted(image, torch.tensor([[1, 0]]))
    tensor([[[[0, 0],
              [1, 2]]]], dtype=torch.uint8)
    """
    height, width = images.shape[-2:]
    if len(shifts):
        margin = int(shifts.abs().max())
    else:
        margin = 0
    if margin == 0:
        return images
    # Each image has its own row and column indices into a copy with black margins.
    padded = F.pad(images, (margin,) * 4)
    rows = torch.arange(height) + margin - shifts[:, 0, None]
    columns = torch.arange(width) + margin - shifts[:, 1, None]
    batch = torch.arange(len(images))
    channel = torch.arange(images.shape[1])
    return padded[
        batch[:, None, None, None],
        channel[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
