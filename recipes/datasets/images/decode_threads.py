"""Decoder threads that prepare the next batches while the consumer works on the current one."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_hybrid.checks import require_whole
from lightning_hybrid.data.order import Batch, Indices

LoadRow = Callable[[int, Tensor], int]
"""Function `(image index, row to fill) -> label`, which several threads call.

The row is uint8 `"channels height width"`.
"""


@dataclass
class _Filling:
    """Batch that threads are filling with images."""

    indices: Indices
    images: Tensor
    labels: Tensor
    rows_left: int
    error: Exception | None = None
    full: threading.Event = field(default_factory=threading.Event)


class ThreadedBatches(Iterator[Batch]):
    """Iterator over batches that threads prepare up to `num_batches_ahead` batches in advance.

    All threads work on the rows of one batch, and start on the next batch without waiting until the current one is
    complete. An error in a row is raised when the consumer reaches its batch, and ends the iteration. The threads stop
    on `close`, at the end of the iteration, on garbage collection and at exit. Iterating in a forked process raises an
    error.

    Args:
        shares: Indices of the images of each batch.
        load_row: Function that fills one row and returns its label.
        take_buffer: Function that returns memory for the images of a batch with the given number of rows.
        num_threads: Number of threads, at least 1.
        num_batches_ahead: Number of batches that are filled in advance, at least 1. This many buffers are used in
            addition to those that the consumer holds.

    >>> import numpy as np
    >>> def load_row(index, row):
    ...     row.fill_(index)
    ...     return 10 * index
    >>> shares = [np.array([3, 4]), np.array([5])]
    >>> buffers = lambda num_rows: torch.zeros(num_rows, 1, 1, 1, dtype=torch.uint8)
    >>> batches = ThreadedBatches(shares, load_row, buffers, num_threads=2, num_batches_ahead=1)
    >>> [(images.flatten().tolist(), labels.tolist()) for images, labels in batches]
    [([3, 4], [30, 40]), ([5], [50])]
    """

    def __init__(
        self,
        shares: Iterable[Indices],
        load_row: LoadRow,
        take_buffer: Callable[[int], Tensor],
        *,
        num_threads: int,
        num_batches_ahead: int,
    ) -> None:
        for name, value in (("num_threads", num_threads), ("num_batches_ahead", num_batches_ahead)):
            require_whole(name, value, f"no batch would be filled otherwise. Set {name}=1")
        # Decoding and resizing release the GIL, so threads work in parallel, and need no start-up and copies as
        # processes do.
        self._work = _Work(iter(shares), load_row, take_buffer, num_batches_ahead)
        torch_threads = torch.get_num_threads()
        self._work.start(num_threads)
        # Threads that start later inherit the number of threads that was set last, which is 1 in the decoder threads.
        torch.set_num_threads(torch_threads)
        self._finalizer = weakref.finalize(self, self._work.stop)  # also runs at exit

    def __next__(self) -> Batch:
        try:
            return self._work.next_batch()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the threads and wait until each has finished its current image."""
        self._finalizer()


class _Work:
    # Holds no reference to the iterator, so that the iterator can be garbage-collected while threads run.

    def __init__(
        self,
        shares: Iterator[Indices],
        load_row: LoadRow,
        take_buffer: Callable[[int], Tensor],
        num_batches_ahead: int,
    ) -> None:
        self.load_row = load_row
        self.take_buffer = take_buffer
        self.room = threading.Semaphore(num_batches_ahead)
        self.begun: queue.SimpleQueue[_Filling | Exception | None] = queue.SimpleQueue()
        # Two locks: a thread that holds `lock` may wait for room, which is only freed when others finish their rows.
        self.lock = threading.Lock()  # protects `rows`
        self.counting = threading.Lock()  # protects `rows_left`
        self.stopped = False
        self.threads: list[threading.Thread] = []
        self.process_id = os.getpid()
        self.rows = self._rows(shares)

    def _rows(self, shares: Iterator[Indices]) -> Iterator[tuple[_Filling, int]]:
        # Yields every row of every batch in order. Only one thread at a time advances it.
        try:
            for indices in shares:
                self.room.acquire()
                if self.stopped:
                    return
                num_rows = len(indices)
                images = self.take_buffer(num_rows)
                labels = torch.empty(num_rows, dtype=torch.int64, pin_memory=images.is_pinned())
                filling = _Filling(indices, images, labels, num_rows)
                del images, labels  # only the consumer decides how long they live
                self.begun.put(filling)
                for row in range(num_rows):
                    yield filling, row
                del filling
            self.begun.put(None)
        except Exception as error:  # raised by the iterator of shares or by `take_buffer`
            self.begun.put(error)

    def start(self, num_threads: int) -> None:
        ready = threading.Barrier(num_threads + 1)
        self.threads = [
            threading.Thread(target=self._run, args=(ready,), name=f"decode-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self.threads:
            thread.start()
        ready.wait()

    def _run(self, ready: threading.Barrier) -> None:
        # The first operation in a thread copies the number that was set last in any thread, so it must run before this
        # thread sets its own number.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.wait()
        while not self.stopped:
            with self.lock:
                job = next(self.rows, None)
            if job is None:
                return
            self._fill(*job)
            del job  # otherwise it would keep a batch's buffer alive while this thread waits

    def _fill(self, filling: _Filling, row: int) -> None:
        try:
            # After an error the other rows are only counted, because nobody reads the batch.
            if filling.error is None:
                filling.labels[row] = self.load_row(int(filling.indices[row]), filling.images[row])
        except Exception as error:
            filling.error = error
        with self.counting:
            filling.rows_left -= 1
            last = filling.rows_left == 0
        if last:
            filling.full.set()

    def next_batch(self) -> Batch:
        # A fork copies this object without its threads, and would wait forever without this error.
        if self.process_id != os.getpid():
            raise RuntimeError(
                "This iterator cannot be used in a forked process, because its threads run only in "
                "the process that created it. Create a new iterator over the loader in this "
                "process."
            )
        if self.stopped:
            raise StopIteration
        # Batches are returned in the order of the shares, even if a later one is full earlier.
        filling = self.begun.get()
        if filling is None:
            raise StopIteration
        if isinstance(filling, Exception):
            raise filling
        filling.full.wait()
        # The consumer holds this buffer from now on, so a thread may take another one.
        self.room.release()
        if filling.error is not None:
            raise filling.error
        return filling.images, filling.labels

    def stop(self) -> None:
        if self.process_id != os.getpid():
            return
        self.stopped = True
        self.room.release()  # wakes a thread that may be waiting
        # garbage collection runs in one of the threads, which cannot join itself
        if threading.current_thread() in self.threads:
            return
        for thread in self.threads:
            thread.join()
