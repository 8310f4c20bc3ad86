"""Loaders, modules and options that `uneven_batches="join"` does not support, and failures while ranks join."""

import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridAllReduceStrategy, HybridElasticStrategy
from tests import toy
from tests.scenes import Saves
from tests.strategy.uneven_batches import support
from tests.strategy.uneven_batches.support import Network, fits, largest_error, same_weights

FP32_ERROR = 1e-6


class TwoLoaders(Network):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["first"], batch_idx)


def two_loaders_of_a_rank():
    return CombinedLoader({"first": support.loader(), "second": support.loader()}, "max_size")


class ReadsByItself(Network):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Gathers(Network):
    def training_step(self, batch, batch_idx):
        self.all_gather(batch[1])
        return super().training_step(batch, batch_idx)


class WithBatchNorm(Network):
    def __init__(self):
        super().__init__()
        self.net.append(nn.BatchNorm1d(support.NUM_CLASSES))


class SumsLocally(Network):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.trainer.strategy.model.require_backward_grad_sync = batch_idx % 2 == 1
        self.manual_backward(super().training_step(batch, batch_idx))


class CountsWrongly(Network):
    def count_samples(self, batch):
        return 0.5


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return "a text"


def texts():
    return DataLoader(Texts(), batch_size=2)


REFUSED = {
    "several loaders": (
        {"module": TwoLoaders, "train": two_loaders_of_a_rank},
        "2 training loaders and `uneven_batches` (='join') cannot be combined",
    ),
    "dataloader_iter": (
        {"module": ReadsByItself},
        "`training_step(dataloader_iter)` and `uneven_batches` (='join') cannot be combined",
    ),
    "gather": (
        {"module": Gathers},
        "`all_gather` in `training_step` and `uneven_batches` (='join') cannot be combined",
    ),
    "SyncBatchNorm": (
        {"module": WithBatchNorm, "sync_batchnorm": True},
        "`net.3` (=SyncBatchNorm) and `uneven_batches` (='join') cannot be combined",
    ),
    "local fp16 sums": (
        {"module": SumsLocally, "precision": "16-true"},
        "`require_backward_grad_sync` (=False) with 16-true and `uneven_batches` (='join')",
    ),
    "no tensor": (
        {"train": texts},
        "in a batch of type list is unknown, because the batch contains no tensor. Add a method `count_samples",
    ),
    "wrong number": (
        {"module": CountsWrongly},
        "`count_samples(batch)` (=0.5) must be a whole number of samples, 0 or more",
    ),
}


def error_of_fit(scene):
    return toy.error_of(support.fit, **scene)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name_before_a_step(one_rank, name):
    scene, message = REFUSED[name]
    (error,) = one_rank.run(error_of_fit, scene)
    assert message in error


def test_values_of_the_option_are_checked():
    with pytest.raises(
        ValueError, match=r"^`uneven_batches` \(='skip'\) must be one of 'error', 'jo"
    ):
        HybridAllReduceStrategy(uneven_batches="skip")
    with pytest.raises(
        ValueError, match=r"`uneven_batches` \(='join'\) and `strategy` \(='hybrid_el"
    ):
        HybridElasticStrategy(max_hosts=2, meet="10.0.0.1:29400", uneven_batches="join")


def option_of_one_rank():
    """Return the error if only rank one has the option."""
    option = ("error", "join")[dist.get_rank()]
    return error_of_fit({"uneven_batches": option})


def test_ranks_must_agree_on_the_option(two_ranks):
    for error in two_ranks.run(option_of_one_rank):
        assert "`uneven_batches` is None on rank 0 and 'join' on rank 1" in error


def empty_on_rank_one():
    return DataLoader(support.Numbered(dist.get_rank(), (10, 0)), batch_size=4)


def test_a_rank_with_an_empty_loader_joins_all_steps(two_ranks):
    results = fits(two_ranks, train=empty_on_rank_one)
    assert largest_error(results) < FP32_ERROR
    assert same_weights(results)
    assert [rank["global_step"] for rank in results] == [3, 3]


class NoneNowAndThen:
    """Loader that yields None in place of the second batch on both ranks, and of the third batch on one rank."""

    def __iter__(self):
        batches = list(support.loader())[:3]
        batches.insert(1, None)
        if dist.get_rank() == 1:
            batches.insert(2, None)
        return iter(batches)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_none_in_place_of_a_batch_counts_for_nothing(two_ranks):
    """A None batch adds no samples. Lightning skips a step only if all ranks have None."""
    results = fits(two_ranks, train=NoneNowAndThen)
    assert largest_error(results) < FP32_ERROR
    assert len(support.numbers_of(results)) == 24
    assert [rank["global_step"] for rank in results] == [4, 4]


class FailsInTheTail(Network):
    def training_step(self, batch, batch_idx):
        if batch_idx == 6 and dist.get_rank() == 0:
            raise FloatingPointError("of the user")
        return super().training_step(batch, batch_idx)


class FailingSamples(support.Numbered):
    def __getitem__(self, index):
        if dist.get_rank() == 0 and index == 25:
            raise OSError("disk of rank zero")
        return super().__getitem__(index)


def failing_loader():
    return support.loader(FailingSamples)


@pytest.mark.parametrize(
    ("scene", "cause"),
    [
        ({"module": FailsInTheTail}, "FloatingPointError: of the user"),
        ({"train": failing_loader}, "OSError: disk of rank zero"),
    ],
)
def test_a_rank_that_fails_while_others_have_joined_ends_all_with_its_name(
    four_ranks, scene, cause
):
    errors = four_ranks.run(error_of_fit, scene, timeout_s=40.0)
    assert errors[0].startswith(cause)
    for error in errors[1:]:
        assert "comm: rank 0 gave up" in error
        assert cause in error


class HangsOnRankOne(support.Numbered):
    def __getitem__(self, index):
        if dist.get_rank() == 1 and index == 10:
            time.sleep(8)
        return super().__getitem__(index)


def hanging_loader():
    return support.loader(HangsOnRankOne)


@pytest.mark.long
def test_a_rank_that_has_no_batch_in_time_is_named_with_its_line(two_ranks):
    first, _ = two_ranks.run(error_of_fit, {"train": hanging_loader, "timeout": 3.0})
    assert "comm: rank 1 does not join the collective in which others wait" in first
    assert "`__getitem__` (test_refusals.py" in first


def test_user_code_reads_the_batches_of_its_rank_only(two_ranks):
    """Reading the training loader in a hook on one rank neither blocks nor changes anything."""
    results = fits(two_ranks, Looks)
    assert largest_error(results) < FP32_ERROR
    assert sorted(support.numbers_of(results)) == list(range(sum(support.NUM_SAMPLES[:2])))


class Looks(Network):
    def on_train_batch_end(self, *args):
        if dist.get_rank() == 1:
            batches = list(self.trainer.train_dataloader)
            assert sum(len(numbers) for numbers, *_ in batches) == support.NUM_SAMPLES[1]


def test_a_checkpoint_loads_without_the_option(two_ranks, tmp_path):
    path = tmp_path / "one.ckpt"
    fits(two_ranks, callbacks=[Saves(path, epoch=0)])
    equal = {"train": equal_loader, "max_epochs": 2, "uneven_batches": "error"}
    assert same_weights(fits(two_ranks, ckpt_path=path, **equal))


def equal_loader():
    return DataLoader(support.Numbered(dist.get_rank(), (8, 8)), batch_size=4)
