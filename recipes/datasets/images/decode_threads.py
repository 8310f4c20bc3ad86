"""Threads that fill the next batches while the consumer works on the present one."""

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
"""`(image's index, uint8 row of the batch "channels height width" to fill) -> label`; called from several threads."""


@dataclass
class _Filling:
    """A batch whose rows threads fill."""

    indices: Indices
    images: Tensor
    labels: Tensor
    rows_left: int
    error: Exception | None = None
    full: threading.Event = field(default_factory=threading.Event)


class ThreadedBatches(Iterator[Batch]):
    """An iterator over batches that threads fill, up to `num_batches_ahead` of them ahead of the consumer.

    All threads work on the same batch, row by row, and go on to the next one without waiting for the last row. An error
    in a row reaches the consumer when its batch is due, and ends the iteration. `close`, the end of the iteration,
    garbage collection and the end of the program stop the threads. In a forked process to iterate is an error.

    Args:
        shares: The images of each batch.
        load_row: Fills one row and returns its label.
        take_buffer: Gives memory for the images of one batch of the given number of rows.
        num_threads: At least 1.
        num_batches_ahead: At least 1; so many buffers are in use besides those that the consumer holds.

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
            require_whole(name, value, f"with none no batch would be filled. Set {name}=1")
        # Decoding and resizing release Python's lock: threads do what worker processes do, without start-up and copies.
        self._work = _Work(iter(shares), load_row, take_buffer, num_batches_ahead)
        torch_threads = torch.get_num_threads()
        self._work.start(num_threads)
        # torch hands the number last set, here the threads' 1, to every thread that starts later.
        torch.set_num_threads(torch_threads)
        self._finalizer = weakref.finalize(self, self._work.stop)  # also at the end of the program

    def __next__(self) -> Batch:
        try:
            return self._work.next_batch()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the threads and wait for them: at most as long as one image takes."""
        self._finalizer()


class _Work:
    # It does not refer to the iterator, so that the iterator can be collected while threads run.

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
        # Two locks: the thread that holds `lock` may wait for room, which comes only while others finish their rows.
        self.lock = threading.Lock()  # of `rows`
        self.counting = threading.Lock()  # of `rows_left`
        self.stopped = False
        self.threads: list[threading.Thread] = []
        self.process_id = os.getpid()
        self.rows = self._rows(shares)

    def _rows(self, shares: Iterator[Indices]) -> Iterator[tuple[_Filling, int]]:
        # Every row of every batch, in order; one thread at a time advances it.
        try:
            for indices in shares:
                self.room.acquire()
                if self.stopped:
                    return
                num_rows = len(indices)
                images = self.take_buffer(num_rows)
                labels = torch.empty(num_rows, dtype=torch.int64, pin_memory=images.is_pinned())
                filling = _Filling(indices, images, labels, num_rows)
                del images, labels  # the consumer alone decides how long they live
                self.begun.put(filling)
                for row in range(num_rows):
                    yield filling, row
                del filling
            self.begun.put(None)
        except Exception as error:  # of the consumer's own shares or buffers
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
        torch.get_num_threads()  # a thread's first operation takes the number over from the last one that set it ...
        torch.set_num_threads(1)  # ... so this comes second; it is for operations in this thread
        ready.wait()
        while not self.stopped:
            with self.lock:
                job = next(self.rows, None)
            if job is None:
                return
            self._fill(*job)
            del job  # else it would hold the buffer of a batch while this thread waits

    def _fill(self, filling: _Filling, row: int) -> None:
        try:
            # After an error the other rows are only counted: nothing reads the batch.
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
        # A fork copies this object but not its threads: without the error this would wait without end.
        if self.process_id != os.getpid():
            raise RuntimeError(
                "the threads of this iterator live in the process that made it, and this is a fork of it: iterate over "
                "the loader again here"
            )
        if self.stopped:
            raise StopIteration
        # Batches come in the order of the shares, whichever is full first.
        filling = self.begun.get()
        if filling is None:
            raise StopIteration
        if isinstance(filling, Exception):
            raise filling
        filling.full.wait()
        # From here on the consumer holds the buffer: a thread may take another one.
        self.room.release()
        if filling.error is not None:
            raise filling.error
        return filling.images, filling.labels

    def stop(self) -> None:
        if self.process_id != os.getpid():
            return
        self.stopped = True
        self.room.release()  # for a thread that may wait
        # garbage collection runs in this one, which cannot join itself
        if threading.current_thread() in self.threads:
            return
        for thread in self.threads:
            thread.join()
