"""Waits between streams of a GPU, in the prefetcher and in checkpoint copies."""

import numpy as np
import pytest
import torch

from lightning_hybrid.checkpoint import host_copy
from lightning_hybrid.checkpoint.host_copy import HostCopies
from lightning_hybrid.data.prefetch import prefetch
from tests.stand_in.recording_cuda import CUDA, Cuda


class Loader:
    """Loader of images and labels, with an `on_device` like that of images that are sent as uint8."""

    def __init__(self, num_batches, *, reads_ahead):
        self.num_batches = num_batches
        self.reads_ahead = reads_ahead

    def __iter__(self):
        for index in range(self.num_batches):
            yield {
                "images": torch.full((2, 3), index, dtype=torch.uint8),
                "labels": torch.arange(2),
            }

    def on_device(self, batch):
        return {**batch, "images": batch["images"] / 255}


def train_on(loader):
    """Return the races of four steps that read a batch, change it, and keep the last loss."""
    with Cuda().on_fake_tensors() as gpu:
        ahead = prefetch(loader, CUDA, torch.float16)
        weight = torch.ones(3, device=CUDA, dtype=torch.float16)
        seen = 0
        for batch in ahead:
            assert batch["images"].device == batch["labels"].device == CUDA
            assert batch["images"].dtype is torch.float16
            weight = weight + (batch["images"] * weight).sum(0) + batch["labels"].sum()
            batch["images"].zero_()
            del batch
            seen += 1
        assert seen == 4
        del weight
    return gpu.violations


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_prefetched_batch_is_there_before_it_is_read_and_stays_until_it_was(reads_ahead):
    assert train_on(Loader(4, reads_ahead=reads_ahead)) == []


class Refills:
    """Loader that refills the memory of one batch, as custom loaders do with page-locked memory."""

    def __iter__(self):
        batch = {
            "images": torch.zeros(2, 3, dtype=torch.uint8),
            "labels": torch.zeros(2, dtype=torch.int64),
        }
        for index in range(4):
            batch["images"].fill_(index)
            yield batch

    on_device = Loader.on_device


def test_a_loader_is_not_asked_to_fill_what_is_still_being_copied():
    assert train_on(Refills()) == []


class Block:
    def __init__(self, num_bytes):
        self.memory = np.zeros(num_bytes, dtype=np.uint8)

    def numpy(self):
        return self.memory


def races_of_a_checkpoint(monkeypatch, *, waits=True, on_side=False):
    """Change the weights, copy them, change them again, write the copy to a file, and return the races."""
    monkeypatch.setattr(
        HostCopies, "_block_of", lambda self, num_bytes, *, is_locked: Block(num_bytes)
    )
    monkeypatch.setattr(host_copy, "_key_of", id)  # a fake tensor has no address
    monkeypatch.setattr(host_copy, "_is_plain_memory", lambda tensor: True)  # and a special type
    with Cuda().on_fake_tensors() as gpu:
        weights = torch.ones(8, device=CUDA)
        host = HostCopies()
        weights.mul_(2)
        if on_side:
            side = torch.cuda.Stream(CUDA)
        else:
            side = torch.cuda.current_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copies = host.take({"weights": weights, "some": weights[2:5]})
        torch.cuda.current_stream().wait_stream(side)
        weights.mul_(2)
        if waits:
            host.wait()
        for copy in copies.values():
            gpu.host_reads(copy)
    return gpu.violations


@pytest.mark.parametrize("on_side", [False, True])
def test_a_checkpoint_is_written_only_when_its_copies_are_there(monkeypatch, on_side):
    assert races_of_a_checkpoint(monkeypatch, on_side=on_side) == []
    raced = races_of_a_checkpoint(monkeypatch, waits=False, on_side=on_side)
    assert len(raced) == 2
    assert raced[0].startswith("race: a read on host is not ordered after a use on")
