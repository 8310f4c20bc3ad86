"""Data loaders that read and decode images on demand, and prepare a few batches in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import lightning.pytorch as pl
from torch import Tensor

from lightning_hybrid.data.order import Batch, EpochOrder, Indices, ResumableLoader, eval_shares
from recipes.datasets.images.decode_threads import ThreadedBatches
from recipes.datasets.images.host_buffers import HostBuffers
from recipes.datasets.images.source import RowSource


@dataclass(frozen=True, kw_only=True)
class DecodeThreads:
    """Settings of a loader's decoder threads, which do not influence the content of batches.

    Args:
        num_threads: Number of threads that fill batches, in addition to the consumer's thread.
        num_batches_ahead: Number of batches that are filled while the consumer works.
        pin_memory: Use page-locked memory, so that copies to a GPU overlap with its computation.
    """

    num_threads: int
    num_batches_ahead: int = 2
    pin_memory: bool = False

    def fill(
        self, shares: Iterator[Indices], rows: RowSource, buffers: HostBuffers, *, epoch: int
    ) -> Iterator[Batch]:
        """Yield one batch for each array of image indices in `shares`.

        The decoder threads stop when the generator ends.
        """
        batches = ThreadedBatches(
            shares,
            partial(rows.load, epoch=epoch),
            buffers.take,
            num_threads=self.num_threads,
            num_batches_ahead=self.num_batches_ahead,
        )
        try:
            yield from batches
        finally:
            batches.close()


class ImageTrainLoader(ResumableLoader):
    """Training loader of one rank that shuffles each epoch and can resume after any batch.

    Order and state are those of `ResumableLoader`. `on_device(batch)` is the remaining preprocessing, which
    `DevicePrefetcher` and the data modules run on the device.

    Yields:
        `(images, labels)`: images uint8 `"batch 3 image_size image_size"`, channels_last; labels int64 `"batch"`.
    """

    reads_ahead = True  # and returns new memory for each batch, see `DevicePrefetcher`

    def __init__(
        self,
        rows: RowSource,
        order: EpochOrder,
        *,
        filler: DecodeThreads,
        on_device: Callable[[Batch], Batch],
        trainer: pl.Trainer | None = None,
    ) -> None:
        super().__init__(order, trainer=trainer)
        self.rows = rows
        self.filler = filler
        self.on_device = on_device
        self._buffers = HostBuffers(
            max_images=order.batch_size_per_rank,
            image_size=rows.image_size,
            pin_memory=filler.pin_memory,
        )

    def _batches(self, epoch: int, shares: Iterator[Indices]) -> Iterator[Batch]:
        return self.filler.fill(shares, self.rows, self._buffers, epoch=epoch)


class ImageEvalLoader:
    """Evaluation loader of one rank. Each image is loaded by exactly one rank (see `eval_shares`)."""

    reads_ahead = True  # and returns new memory for each batch, see `DevicePrefetcher`

    def __init__(
        self,
        rows: RowSource,
        *,
        world_size: int,
        rank: int,
        batch_size_per_rank: int,
        filler: DecodeThreads,
        on_device: Callable[[Batch], Batch],
    ) -> None:
        self.rows = rows
        self.filler = filler
        self.on_device = on_device
        self.shares = eval_shares(
            num_images=rows.num_images,
            world_size=world_size,
            rank=rank,
            batch_size_per_rank=batch_size_per_rank,
        )
        self._buffers = HostBuffers(
            max_images=max(map(len, self.shares)),
            image_size=rows.image_size,
            pin_memory=filler.pin_memory,
        )

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.filler.fill(iter(self.shares), self.rows, self._buffers, epoch=0)
