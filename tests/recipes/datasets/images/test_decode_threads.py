"""Threads that decode ahead: every batch in order, a bounded number, and no thread left when the consumer stops."""

import gc
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from recipes.datasets.images.decode_threads import ThreadedBatches
from recipes.datasets.images.host_buffers import HostBuffers
from recipes.datasets.images.loader import DecodeThreads
from recipes.datasets.synthetic import StoredRows

LIMIT_S = 90  # the programs below have their own limit of 60 s
SHARES = [np.arange(start, start + 5) for start in range(0, 40, 5)]


def buffer_of(num_rows):
    return torch.zeros(num_rows, 1, 1, 1, dtype=torch.uint8)


def fill(index, row):
    row.fill_(index)
    return 10 * index


def batches(
    load_row=fill, *, shares=SHARES, num_threads=3, num_batches_ahead=2, take_buffer=buffer_of
):
    return ThreadedBatches(
        shares, load_row, take_buffer, num_threads=num_threads, num_batches_ahead=num_batches_ahead
    )


def living_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("decode-")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert living_threads() == []
    yield
    gc.collect()
    assert living_threads() == []


@pytest.fixture(autouse=True)
def a_wait_without_end_is_a_failure():
    """Turn an endless wait into a failure: the signal handler can raise while Python waits."""

    def fail(number, frame):
        raise TimeoutError(f"nothing came in {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def wait_until(condition, limit_s=10.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.002)


def test_threads_are_not_started_before_the_first_batch_is_asked_for():
    """Lightning creates iterators before it sets the epoch, and loaders are pickled."""
    rows = StoredRows(num_images=8, num_stored=4, num_classes=2, image_size=4, seed=0)
    buffers = HostBuffers(max_images=4, image_size=4, pin_memory=False)
    generator = DecodeThreads(num_threads=2).fill(iter([np.arange(4)] * 9), rows, buffers, epoch=0)
    assert living_threads() == []
    next(generator)
    assert len(living_threads()) == 2
    generator.close()
    assert living_threads() == []


@pytest.mark.parametrize(("num_threads", "num_batches_ahead"), [(1, 1), (2, 3), (7, 1)])
def test_batches_come_in_order_with_their_rows_and_labels(num_threads, num_batches_ahead):
    def uneven(index, row):
        time.sleep(0.001 * (index * 7 % 4))  # threads overtake one another
        return fill(index, row)

    read = list(batches(uneven, num_threads=num_threads, num_batches_ahead=num_batches_ahead))
    assert [images.flatten().tolist() for images, _ in read] == [share.tolist() for share in SHARES]
    assert [labels.tolist() for _, labels in read] == [(10 * share).tolist() for share in SHARES]
    assert {labels.dtype for _, labels in read} == {torch.int64}  # as a loss requires


def test_an_error_comes_when_its_batch_is_due_and_ends_the_iteration():
    def broken(index, row):
        if index == 12:
            raise OSError("disk gone at n01/12.JPEG")
        return fill(index, row)

    ahead = batches(broken)
    assert next(ahead)[1].tolist() == [0, 10, 20, 30, 40]
    assert next(ahead)[1].tolist() == [50, 60, 70, 80, 90]
    with pytest.raises(OSError, match=r"n01/12\.JPEG"):
        next(ahead)
    assert living_threads() == []
    with pytest.raises(StopIteration):
        next(ahead)


def test_an_iterator_that_is_collected_in_one_of_its_threads_ends_too():
    """The thread that drops the last reference runs the finalizer, and a thread cannot wait for itself."""
    held = []
    go_on = threading.Event()

    def drop(index, row):
        go_on.wait()
        held.clear()
        return 0

    held.append(batches(drop, num_threads=2))
    go_on.set()
    wait_until(lambda: not living_threads())


def test_an_error_of_the_shares_or_the_buffers_is_not_a_wait_without_end():
    def shares():
        yield SHARES[0]
        raise KeyError("no more")

    ahead = batches(shares=shares())
    next(ahead)
    with pytest.raises(KeyError, match="no more"):
        next(ahead)

    def no_memory(num_rows):
        raise MemoryError("full")

    with pytest.raises(MemoryError, match="full"):
        next(batches(take_buffer=no_memory))


@pytest.mark.parametrize("num_taken", [0, 1, 8])
def test_an_iterator_that_is_left_takes_its_threads_with_it_and_one_without_work_ends_them(
    num_taken,
):
    ahead = batches()
    for _ in range(num_taken):
        next(ahead)
    del ahead
    assert living_threads() == []
    done = batches(shares=SHARES[:1])
    wait_until(lambda: not living_threads())
    assert next(done)[1].tolist() == [0, 10, 20, 30, 40]


def test_torch_keeps_its_number_of_threads():
    """Each decoding thread uses one torch thread. Existing and later threads elsewhere keep their number."""
    before = torch.get_num_threads()
    inside = set()
    later = []

    def note_threads(index, row):
        inside.add(torch.get_num_threads())
        return 0

    torch.set_num_threads(2)
    try:
        list(batches(note_threads))
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert inside == {1}
        assert torch.get_num_threads() == 2
        assert later == [2]
    finally:
        torch.set_num_threads(before)


IN_A_PROGRAM = """
import atexit, os, sys, threading
atexit.register(lambda: print("at the end", threading.active_count() - 1))  # first in, last out
import numpy as np, torch
from recipes.datasets.images.decode_threads import ThreadedBatches

def load(index, row):
    return 0

batches = (np.arange(4) for _ in range(10**6))
ahead = ThreadedBatches(batches, load, lambda n: torch.zeros(n, 1, 1, 1, dtype=torch.uint8),
                     num_threads=2, num_batches_ahead=2)
next(ahead)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        try:
            next(ahead)
        except RuntimeError as error:
            print(error, flush=True)
        del ahead
        os._exit(0)
    os.waitpid(child, 0)
    next(ahead)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["exit", "fork"])
def test_a_program_ends_in_mid_epoch_and_a_fork_gets_an_error(how):
    """The program runs in a separate process, because the order of exit handlers depends on imports."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROGRAM, how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", "at the end 0")
    assert ("Create a new iterator over the loader" in done.stdout) == (how == "fork")


def test_host_memory_is_used_again_only_when_nobody_looks_at_it():
    buffers = HostBuffers(max_images=2, image_size=4, pin_memory=False)
    first = buffers.take(2)
    second = buffers.take(2)
    first_address = first.data_ptr()
    assert first_address != second.data_ptr()
    row_of_first = first[1]
    del first
    third = buffers.take(2)
    # A row of the first buffer is still referenced.
    assert third.data_ptr() not in (first_address, second.data_ptr())
    del row_of_first
    assert buffers.take(2).data_ptr() == first_address


@pytest.mark.gpu
def test_pinned_memory_is_pinned_and_in_the_same_order():
    images = HostBuffers(max_images=2, image_size=4, pin_memory=True).take(2)
    assert images.is_pinned()
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.cuda(non_blocking=True).is_contiguous(memory_format=torch.channels_last)
