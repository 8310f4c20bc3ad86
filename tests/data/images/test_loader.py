"""Loaders of images: threads as many and as far ahead as set, started late; memory, epochs and resume passed on."""

from __future__ import annotations

import threading
import time

import numpy as np

from lightning_hybrid.data.images.host_buffers import HostBuffers
from lightning_hybrid.data.images.loader import DecodeThreads, ImageEvalLoader, ImageTrainLoader
from lightning_hybrid.data.order import EpochOrder
from recipes.datasets.synthetic import StoredRows
from tests.data.images.test_decode_threads import living_threads, no_thread_is_left, wait_until  # noqa: F401  a fixture


def test_threads_are_not_started_before_the_first_batch_is_asked_for():
    """Lightning makes iterators before it tells the epoch, and loaders are pickled."""
    rows = StoredRows(num_images=8, num_stored=4, num_classes=2, image_size=4, seed=0)
    buffers = HostBuffers(max_images=4, image_size=4, pin_memory=False)
    generator = DecodeThreads(num_threads=2).fill(iter([np.arange(4)] * 9), rows, buffers, epoch=0)
    assert living_threads() == []
    next(generator)
    assert living_threads() != []
    generator.close()
    assert living_threads() == []


class Noted(StoredRows):
    """Rows that say which were loaded."""

    def __init__(self):
        super().__init__(num_images=80, num_stored=4, num_classes=2, image_size=4, seed=0)
        self.loaded = []

    def load(self, index, row, *, epoch):
        self.loaded.append((index, epoch, threading.current_thread().name))
        time.sleep(0.001)
        return super().load(index, row, epoch=epoch)


def test_a_loader_uses_the_threads_and_works_as_far_ahead_as_it_is_set():
    rows = Noted()
    buffers = HostBuffers(max_images=8, image_size=4, pin_memory=False)
    shares = (np.arange(start, start + 8) for start in range(0, 80, 8))
    generator = DecodeThreads(num_threads=3, num_batches_ahead=4).fill(shares, rows, buffers, epoch=6)
    next(generator)
    wait_until(lambda: len(rows.loaded) == 5 * 8)
    time.sleep(0.02)
    assert len(rows.loaded) == 5 * 8  # the batch taken, and four ahead
    assert {epoch for _, epoch, _ in rows.loaded} == {6}
    assert len({name for _, _, name in rows.loaded}) == 3
    generator.close()


def test_loaders_keep_no_more_memory_than_their_largest_batch():
    rows, filler = Noted(), DecodeThreads(num_threads=1, pin_memory=True)
    order = EpochOrder(num_images=80, global_batch_size=8, seed=0, world_size=2, rank=1)
    train = ImageTrainLoader(rows, order, filler=filler, on_device=lambda batch: batch)
    options = {"filler": filler, "on_device": lambda batch: batch}
    evaluation = ImageEvalLoader(rows, world_size=3, rank=0, batch_size_per_rank=1, **options)
    assert (train._buffers.max_images, train._buffers.pin_memory) == (4, True)
    # 80 images are 27, 27 and 26: to give 26 batches on every rank, one of them has two images
    assert (evaluation._buffers.max_images, evaluation._buffers.pin_memory) == (2, True)
