"""Loaders of images that are read and decoded as they are needed, by threads, a bounded number of batches ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from lightning_hybrid.data.images.decode_threads import ThreadedBatches
from lightning_hybrid.data.images.host_buffers import HostBuffers
from lightning_hybrid.data.images.source import RowSource
from lightning_hybrid.data.order import Batch, EpochOrder, Indices, ResumableLoader, eval_shares


class BatchFiller(Protocol):
    """Who decodes for a loader: :class:`Staff`, or `lightning_hybrid.data.images.dali.DaliStaff`."""

    @property
    def pin_memory(self) -> bool:
        """Whether batches on the host are page-locked."""

    def fill(self, shares: Iterator[Indices], rows: RowSource, buffers: HostBuffers, *, epoch: int) -> Iterator[Batch]:
        """Batches of the images in `shares`, in their order; what works ahead ends with the generator."""


@dataclass(frozen=True, kw_only=True)
class DecodeThreads:
    """How a loader works, whatever it loads: no influence on what comes out.

    Args:
        num_threads: That fill batches, beside the consumer's own.
        num_batches_ahead: Filled or being filled while the consumer works.
        pin_memory: Page-locked batches, from which copies to a GPU run beside its work.
    """

    num_threads: int
    num_batches_ahead: int = 2
    pin_memory: bool = False

    def fill(self, shares: Iterator[Indices], rows: RowSource, buffers: HostBuffers, *, epoch: int) -> Iterator[Batch]:
        """Batches of the images in `shares`; the threads end with the generator."""
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
    """One rank's share of shuffled epochs, resumable after any batch: order and state are `ResumableLoader`'s.

    `on_device(batch)`, where given, is what remains to be done on the device: `DevicePrefetcher` and the data modules
    call it.

    Yields:
        `(images, labels)`: images uint8 `"batch 3 image_size image_size"`, channels_last; labels int64 `"batch"`.
    """

    reads_ahead = True  # and hands out new memory: see `DevicePrefetcher`

    def __init__(
        self,
        rows: RowSource,
        order: EpochOrder,
        *,
        staff: BatchFiller,
        on_device: Callable[[Batch], Batch],
        on_other_accumulation: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(order, on_other_accumulation=on_other_accumulation)
        self.rows, self.staff, self.on_device = rows, staff, on_device
        self._buffers = HostBuffers(
            max_images=order.batch_size_per_rank, image_size=rows.image_size, pin_memory=staff.pin_memory
        )

    def _batches(self, epoch: int, shares: Iterator[Indices]) -> Iterator[Batch]:
        return self.staff.fill(shares, self.rows, self._buffers, epoch=epoch)


class ImageEvalLoader:
    """One rank's share of an image set in which every image comes exactly once over all ranks: see `eval_shares`.

    Raises:
        ValueError: There are more ranks than images.
    """

    reads_ahead = True  # and hands out new memory: see `DevicePrefetcher`

    def __init__(
        self,
        rows: RowSource,
        *,
        world_size: int,
        rank: int,
        batch_size_per_rank: int,
        staff: BatchFiller,
        on_device: Callable[[Batch], Batch],
    ) -> None:
        self.rows, self.staff, self.on_device = rows, staff, on_device
        self.shares = eval_shares(
            num_images=rows.num_images, world_size=world_size, rank=rank, batch_size_per_rank=batch_size_per_rank
        )
        self._buffers = HostBuffers(
            max_images=max(map(len, self.shares)), image_size=rows.image_size, pin_memory=staff.pin_memory
        )

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.staff.fill(iter(self.shares), self.rows, self._buffers, epoch=0)
