"""One batch ahead: same batches, same order, exact state, and nothing left to move."""

import copy
import pickle
import time

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.data.on_device import NormaliseOnDevice
from lightning_hybrid.data.prefetch import prefetch

CPU = torch.device("cpu")


def same(batch):
    return batch


class CountingLoader:
    """Batches 0, 1, 2, ...; its state is the number fetched."""

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


@pytest.mark.parametrize("num_batches", [0, 1, 2, 5])
def test_batches_come_once_each_and_in_order(num_batches):
    batches = [torch.tensor(i) for i in range(num_batches)]
    ahead = prefetch(batches, CPU, same)
    for _ in range(2):
        assert [int(b) for b in ahead] == list(range(num_batches))
    assert len(ahead) == num_batches


def test_next_batch_is_fetched_before_the_current_one_is_handed_out():
    loader = CountingLoader(4)
    ahead = iter(prefetch(loader, CPU, same))
    assert next(ahead) == 0
    assert loader.num_fetched == 2


def test_state_is_that_of_the_batch_handed_out():
    loader = CountingLoader(5)
    ahead = prefetch(loader, CPU, same)
    iterator = iter(ahead)
    next(iterator), next(iterator)
    assert ahead.state_dict() == {"num_fetched": 2}
    resumed = prefetch(CountingLoader(5), CPU, same)
    resumed.load_state_dict(ahead.state_dict())
    assert [int(b) for b in resumed] == [2, 3, 4]


def test_prefetched_batch_is_not_moved_or_cast_again():
    ahead = prefetch([torch.randn(3)], CPU, lambda batch: batch.half())
    (batch,) = ahead
    assert batch.dtype is torch.float16
    assert move_data_to_device(batch, CPU).data_ptr() == batch.data_ptr()


def test_loader_without_state_is_not_taken_for_a_stateful_one():
    assert not hasattr(prefetch([1, 2], CPU, same), "state_dict")


def test_attributes_are_read_from_and_written_to_the_loader():
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    ahead = prefetch(loader, CPU, same)
    assert ahead.batch_size == 2
    assert ahead.dataset is loader.dataset
    ahead.worker_init_fn = same
    assert loader.worker_init_fn is same


def test_wrapping_twice_is_wrapping_once():
    once = prefetch([1], CPU, same)
    assert prefetch(once, CPU, same) is once


def test_copy_and_pickle_keep_the_loader():
    ahead = prefetch(CountingLoader(3), CPU, same)
    for twin in (copy.deepcopy(ahead), pickle.loads(pickle.dumps(ahead))):
        assert [int(b) for b in twin] == [0, 1, 2]


def test_an_error_of_the_loader_comes_when_its_batch_is_due():
    def broken():
        yield torch.tensor(0)
        yield torch.tensor(1)
        raise OSError("disk gone")

    ahead = iter(prefetch(broken(), CPU, same))
    assert [int(next(ahead)), int(next(ahead))] == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(ahead)


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu_with_the_right_values():
    host = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(8)]
    device = torch.device("cuda", 0)
    for i, batch in enumerate(prefetch(host, device, lambda b: b.half())):
        assert batch.device == device
        assert torch.equal(batch.cpu(), host[i].half())


class Images(list):
    """Batches, and what is left to do with each on the device."""

    def on_device(self, batch):
        assert batch.dtype is torch.uint8
        return batch / 255


def test_what_a_loader_leaves_to_the_device_is_done_between_moving_and_casting():
    batches = Images([torch.full((2,), level, dtype=torch.uint8) for level in (0, 51, 255)])

    def cast(batch):
        assert batch.dtype is torch.float32
        return batch.half()

    ahead = prefetch(batches, CPU, cast)
    assert [batch.tolist() for batch in ahead] == [[0.0] * 2, [torch.tensor(0.2).half().item()] * 2, [1.0] * 2]
    assert [batch.dtype for batch in copy.deepcopy(ahead)] == [torch.float16] * 3


def test_waiting_for_the_loader_adds_up_until_it_is_taken():
    def slow():
        for i in range(3):
            time.sleep(0.02)
            yield torch.tensor(i)

    ahead = prefetch(slow(), CPU, same)
    iterator = iter(ahead)
    assert ahead.take_wait_s() == 0.0
    next(iterator)  # two batches: one handed out, one ahead
    assert 0.04 <= ahead.take_wait_s() < 5
    time.sleep(0.05)  # the consumer's own time
    next(iterator)
    assert 0.02 <= ahead.take_wait_s() < 5
    next(iterator)  # the last one came before
    assert ahead.take_wait_s() < 0.02


@pytest.mark.gpu
def test_images_are_normalised_on_the_gpu_to_the_bits_of_the_cpu():
    images = torch.arange(2 * 8 * 8 * 3).remainder(256).to(torch.uint8).reshape(2, 8, 8, 3).permute(0, 3, 1, 2)
    labels, device = torch.tensor([1, 2]), torch.device("cuda", 0)
    loader = Images([(images.pin_memory(), labels.pin_memory())] * 4)
    loader.on_device = NormaliseOnDevice()
    expected, _ = NormaliseOnDevice()((images, labels))
    for found, found_labels in prefetch(loader, device, same):
        assert found.device == found_labels.device == device
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found.cpu(), expected)
