"""Pool of host memory for image batches. A block is reused once no tensor refers to it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Our choice: more than a loader and its consumer hold at a time. Memory of further batches is freed.
MAX_FREE = 8


class HostBuffers:
    """Pool of memory for batches of uint8 images `"batch channels height width"` in channels_last format.

    A batch has at most `max_images` images. Memory returns to the pool when the last tensor on it is deleted. Consumers
    may therefore hold batches as long as they like, and a loop that does not hold them reuses the same few blocks.

    >>> buffers = HostBuffers(max_images=2, image_size=4, pin_memory=False)
    >>> images = buffers.take(2)
    >>> images.shape, images.is_contiguous(memory_format=torch.channels_last)
    (torch.Size([2, 3, 4, 4]), True)
    >>> first = images.data_ptr()
    >>> del images
    >>> buffers.take(1).data_ptr() == first
    True
    """

    def __init__(self, *, max_images: int, image_size: int, pin_memory: bool) -> None:
        self.max_images = max_images
        self.image_size = image_size
        self.pin_memory = pin_memory
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=MAX_FREE)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        # A lock cannot be pickled, and free blocks are useless in another process.
        sizes = {"max_images": self.max_images, "image_size": self.image_size}
        return partial(HostBuffers, **sizes, pin_memory=self.pin_memory), ()

    def take(self, num_images: int) -> Tensor:
        """Return an uninitialized tensor for a batch of `num_images` images, reusing memory if possible."""
        shape = (num_images, self.image_size, self.image_size, 3)
        # torch's caching allocator already pools pinned memory, and also waits for copies to the device.
        if self.pin_memory:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True).permute(0, 3, 1, 2)
        # New pages cost as much as a copy of the batch, so reuse the most recently used block.
        with self._lock:
            if self._free:
                block = self._free.pop()
            else:
                block = None
        if block is None:
            block = np.empty((self.max_images, *shape[1:]), dtype=np.uint8)
        # Only torch holds this view, so it is deleted together with the last tensor on it.
        lent = block[:num_images]
        # At exit the pool no longer exists.
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.from_numpy(lent).permute(0, 3, 1, 2)
