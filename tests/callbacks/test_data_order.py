"""What decides who reads which sample is read off any loader, and compared between ranks."""

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hybrid.callbacks import ReplicaCheck
from lightning_hybrid.callbacks.replica_check import order_of
from lightning_hybrid.data.order import EpochOrder, ResumableLoader
from tests import toy
from tests.scenes import fit


class Loader(ResumableLoader):
    def _batches(self, epoch, shares):
        return iter(())

    def __len__(self):
        return 3


def test_of_our_loaders_the_order_and_the_epoch_are_told():
    order = {"num_images": 12, "global_batch_size": 4, "seed": 3, "world_size": 2}
    found = order_of(Loader(EpochOrder(**order, rank=1)))
    assert found.items() >= {**order, "epoch": 0}.items()
    assert found == order_of(Loader(EpochOrder(**order, rank=0)))


def with_a_seed_of_its_own():
    sampler = DistributedSampler(toy.Blobs(), num_replicas=2, rank=dist.get_rank(), seed=2 + 7 * dist.get_rank())
    return DataLoader(toy.Blobs(), batch_size=8, sampler=sampler)


def test_another_seed_of_the_data_on_one_rank_is_an_error_on_both_before_the_first_step(two_ranks):
    for seen in fit(two_ranks, train=with_a_seed_of_its_own, callbacks=[ReplicaCheck(100)], raises=True):
        words = "DataOrderError: The ranks read the data in different orders; seen when training started"
        assert seen.error.startswith(words)
        assert "`seed` is 2 on rank 0 and 9 on rank 1. Samples are read twice" in seen.error
        assert "ranks 0, 1 are on host " in seen.error.lower()
        assert seen.global_step == 0


def test_ranks_that_read_in_one_order_hear_nothing(two_ranks):
    assert [seen.global_step for seen in fit(two_ranks, max_epochs=1, callbacks=[ReplicaCheck(2)])] == [4, 4]
