"""Prefetcher: unchanged batches and order, exact state, complete moves, and lookahead if the loader reads ahead."""

import copy
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.data.prefetch import _reads_ahead, prefetch
from recipes.datasets.images.loader import ImageEvalLoader, ImageTrainLoader
from recipes.datasets.images.normalize import NormalizeOnDevice
from recipes.datasets.in_memory.loader import TrainLoader
from tests import toy
from tests.scenes import fit

CPU = torch.device("cpu")


def same(batch):
    return batch


class CountingLoader:
    def __init__(self, num_batches):
        self.num_batches = num_batches
        self.num_fetched = 0

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        while self.num_fetched < self.num_batches:
            self.num_fetched += 1
            yield torch.tensor(float(self.num_fetched - 1))
        self.num_fetched = 0

    def state_dict(self):
        return {"num_fetched": self.num_fetched}

    def load_state_dict(self, state):
        self.num_fetched = state["num_fetched"]


@pytest.mark.parametrize("num_batches", [0, 1, 5])
def test_batches_come_once_each_in_order_when_they_are_due_with_the_state_of_each(num_batches):
    loader = CountingLoader(num_batches)
    ahead = prefetch(loader, CPU)
    assert len(ahead) == num_batches
    for _ in range(2):
        seen = [(int(batch), loader.num_fetched, ahead.state_dict()) for batch in ahead]
        assert seen == [(due, due + 1, {"num_fetched": due + 1}) for due in range(num_batches)]


class Refilling:
    def __len__(self):
        return 4

    def __iter__(self):
        array = np.zeros(3, dtype=np.float32)
        inputs = torch.from_numpy(array)
        labels = torch.zeros(3, dtype=torch.int64)
        for i in range(4):
            array[:] = i
            labels[:] = i
            yield inputs, labels


@pytest.mark.parametrize("num_workers", [0, 7])
def test_a_batch_is_copied_before_the_loader_fills_its_memory_again(num_workers):
    """For other classes than `DataLoader`, the number of workers does not show whether memory is reused."""
    loader = Refilling()
    loader.num_workers = num_workers
    seen = [(inputs.tolist(), labels.tolist()) for inputs, labels in prefetch(loader, CPU)]
    assert seen == [([i] * 3, [i] * 3) for i in range(4)]


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(TensorDataset(torch.arange(2)), num_workers=1), True),
        (DataLoader(TensorDataset(torch.arange(2))), False),
        (Refilling(), False),
        (ImageEvalLoader, True),
        (ImageTrainLoader, True),
        (TrainLoader, True),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_which_loaders_read_ahead_themselves(loader, expected):
    assert _reads_ahead(loader) is expected


def test_ahead_a_batch_is_fetched_before_the_one_before_it_is_handed_out_and_the_state_is_of_that():
    """On CUDA, the prefetcher does so for a loader that reads ahead itself."""
    loader = CountingLoader(4)
    resumed = prefetch(CountingLoader(4), CPU)
    ahead = prefetch(loader, CPU)
    ahead._looks_ahead = True
    iterator = iter(ahead)
    assert (int(next(iterator)), loader.num_fetched, ahead.state_dict()) == (
        0,
        2,
        {"num_fetched": 1},
    )
    resumed.load_state_dict(ahead.state_dict())
    assert [int(b) for b in iterator] == [int(b) for b in resumed] == [1, 2, 3]


def test_all_but_iteration_is_the_loaders_and_wrapping_twice_is_wrapping_once():
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    ahead = prefetch(loader, CPU)
    assert (ahead.batch_size, ahead.dataset) == (2, loader.dataset)
    ahead.worker_init_fn = same
    assert loader.worker_init_fn is same
    assert not hasattr(ahead, "state_dict"), "Lightning would take it for a stateful one"
    assert prefetch(ahead, CPU) is ahead


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_an_error_of_the_loader_comes_when_its_batch_is_due(looks_ahead):
    def broken():
        yield torch.tensor(0)
        yield torch.tensor(1)
        raise OSError("disk gone")

    ahead = prefetch(broken(), CPU)
    ahead._looks_ahead = looks_ahead
    ahead = iter(ahead)
    assert [int(next(ahead)), int(next(ahead))] == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(ahead)


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu_with_the_right_values():
    host = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(8)]
    device = torch.device("cuda", 0)
    for i, batch in enumerate(prefetch(host, device)):
        assert batch.device == device
        assert torch.equal(batch.cpu(), host[i])


class Images(list):
    def on_device(self, batch):
        assert batch.dtype is torch.uint8
        return batch / 255


def test_on_device_of_a_loader_runs_after_the_move_and_batches_are_in_the_compute_dtype():
    batches = Images([torch.full((2,), level, dtype=torch.uint8) for level in (0, 51, 255)])
    ahead = prefetch(batches, CPU, torch.float16)
    assert [batch.tolist() for batch in ahead] == [
        [0.0] * 2,
        [torch.tensor(0.2).half().item()] * 2,
        [1.0] * 2,
    ]
    assert [batch.dtype for batch in copy.deepcopy(ahead)] == [torch.float16] * 3


def test_waiting_for_the_loader_adds_up_until_it_is_taken():
    def slow():
        for i in range(3):
            time.sleep(0.02)
            yield torch.tensor(i)

    ahead = prefetch(slow(), CPU)
    iterator = iter(ahead)
    assert ahead.take_wait_s() == 0.0
    next(iterator)
    assert 0.02 <= ahead.take_wait_s() < 5
    time.sleep(0.05)  # the consumer's own time
    assert ahead.take_wait_s() == 0.0


@pytest.mark.gpu
def test_images_are_normalized_on_the_gpu_to_the_bits_of_the_cpu():
    images = (
        torch.arange(2 * 8 * 8 * 3)
        .remainder(256)
        .to(torch.uint8)
        .reshape(2, 8, 8, 3)
        .permute(0, 3, 1, 2)
    )
    labels = torch.tensor([1, 2])
    device = torch.device("cuda", 0)
    loader = Images([(images.pin_memory(), labels.pin_memory())] * 4)
    loader.on_device = NormalizeOnDevice()
    expected, _ = NormalizeOnDevice()((images, labels))
    for result, found_labels in prefetch(loader, device):
        assert result.device == found_labels.device == device
        assert result.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(result.cpu(), expected)


class OtherMeaning(DataLoader):
    """Loader of a user whose attributes have the names that the loaders of this package use."""

    on_device = "cpu"
    bind_trainer = False

    def reads_ahead(self):
        return False


def test_attributes_of_a_users_loader_with_another_meaning_are_not_used():
    result = fit(train=OtherMeaning(toy.Blobs(), batch_size=8), max_epochs=1)
    plain = fit(train=toy.loader(), max_epochs=1)
    assert result.losses == plain.losses
    assert not _reads_ahead(OtherMeaning(toy.Blobs()))
