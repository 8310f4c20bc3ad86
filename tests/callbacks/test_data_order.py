"""What decides who reads which sample is read off any loader, and compared between ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_hybrid.callbacks import ReplicaCheck
from lightning_hybrid.callbacks.replica_check import order_of
from lightning_hybrid.data.order import EpochOrder, ResumableLoader
from tests import toy


class Loader(ResumableLoader):
    def _batches(self, epoch, shares):
        return iter(())

    def __len__(self):
        return 3


def test_of_our_loaders_the_order_and_the_epoch_are_told():
    order = EpochOrder(num_images=12, global_batch_size=4, seed=3, world_size=2, rank=1)
    found = order_of(Loader(order))
    assert {name: found[name] for name in ("seed", "global_batch_size", "num_images", "world_size", "epoch")} == {
        "seed": 3,
        "global_batch_size": 4,
        "num_images": 12,
        "world_size": 2,
        "epoch": 0,
    }
    assert found == order_of(Loader(EpochOrder(num_images=12, global_batch_size=4, seed=3, world_size=2, rank=0)))


def test_a_sampler_behind_a_batch_sampler_is_found():
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1, seed=5)
    batches = DataLoader(range(10), batch_size=2, sampler=sampler).batch_sampler
    assert order_of(DataLoader(range(10), batch_sampler=batches))["seed"] == 5


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_of_several_loaders_each_is_told_and_what_has_no_length_has_none():
    found = order_of([DataLoader(range(6), batch_size=2), DataLoader(Stream())])
    assert found["number of batches of loader 0"] == 3
    assert found["number of batches of loader 1"] is None
    assert found["batch_size of loader 0"] == 2


def fit_with_a_seed_of_its_own(odd_rank, every_n_steps):
    rank = dist.get_rank()
    sampler = DistributedSampler(toy.Blobs(), num_replicas=2, rank=rank, seed=9 if rank == odd_rank else 2)
    loader = DataLoader(toy.Blobs(), batch_size=8, sampler=sampler)
    trainer = toy.trainer(max_epochs=1, callbacks=[ReplicaCheck(every_n_steps)])
    return toy.error_of(trainer.fit, toy.Toy(), loader), trainer.global_step


@pytest.mark.parametrize("odd_rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_another_seed_of_the_data_on_one_rank_is_an_error_on_both_before_the_first_step(two_ranks, odd_rank):
    for error, num_steps in two_ranks.run(fit_with_a_seed_of_its_own, odd_rank, 100):
        assert error.startswith(
            "DataOrderError: The ranks read the data in different orders; seen when training started"
        )
        seeds = ("9 on rank 0 and 2 on rank 1", "2 on rank 0 and 9 on rank 1")
        assert f"`seed` is {seeds[odd_rank]}. Samples are read twice" in error
        assert "ranks 0, 1 are on host " in error.lower()
        assert num_steps == 0


def test_ranks_that_read_in_one_order_hear_nothing(two_ranks):
    assert two_ranks.run(fit_with_a_seed_of_its_own, None, 2) == [("", 4), ("", 4)]
