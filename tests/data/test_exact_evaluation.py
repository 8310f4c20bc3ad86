"""Evaluation batches in which every sample appears once, and the loaders that stay padded, with the reason."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hybrid.data.exact_evaluation import (
    EvaluationShare,
    ExactBatchSampler,
    ExactEvaluationLoader,
    evaluation_share,
    obstacle_of,
    with_exact_batches,
)


class Watch:
    """Mock watch that has seen `calls` collectives by the time of the last batch."""

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls
        self.num_asked = 0
        self.padded = []

    def num_collectives(self) -> int:
        self.num_asked += 1
        return self.calls * (self.num_asked - 1)

    def num_before_step(self) -> int:
        return 0

    def note_padding(self, share: EvaluationShare) -> None:
        self.padded.append(share.rank)


def loader_of(rank: int, num_samples: int, num_ranks: int, batch_size: int) -> DataLoader:
    data = range(num_samples)
    sampler = DistributedSampler(data, num_ranks, rank, shuffle=False)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def batches_of(
    rank: int, num_samples: int, num_ranks: int, batch_size: int, watch: Watch
) -> list[list[int]]:
    loader = loader_of(rank, num_samples, num_ranks, batch_size)
    share = evaluation_share(loader)
    exact_loader = ExactEvaluationLoader(with_exact_batches(loader, share), share, watch)
    assert len(exact_loader) == share.num_batches
    return [batch.tolist() for batch in exact_loader]


sizes = st.tuples(st.integers(2, 7), st.integers(2, 60), st.integers(1, 12)).filter(
    lambda sizes: sizes[1] >= sizes[0]
)


@given(sizes)
def test_every_sample_comes_once_in_batches_that_differ_at_the_end_alone(sizes):
    num_ranks, num_samples, batch_size = sizes
    ranks = [
        batches_of(rank, num_samples, num_ranks, batch_size, Watch()) for rank in range(num_ranks)
    ]
    samples = [index for batches in ranks for batch in batches for index in batch]
    assert sorted(samples) == list(range(num_samples))

    lengths = [[len(batch) for batch in batches] for batches in ranks]
    longest = lengths[0]
    assert max(longest) <= batch_size
    for rank_lengths in lengths:
        assert rank_lengths  # at least one sample
        assert rank_lengths[: len(longest) - 1] == longest[:-1]
        assert longest[-1] - sum(rank_lengths[len(longest) - 1 :]) in (0, 1)
    if batch_size > 1 and -(-num_samples // num_ranks) > 2:
        assert {len(rank_lengths) for rank_lengths in lengths} == {len(longest)}
    if num_samples % num_ranks:
        assert len(longest) > 1  # a batch before the last one shows whether user code gathers


@given(sizes)
def test_after_a_collective_all_ranks_have_the_samples_of_the_padded_sampler(sizes):
    num_ranks, num_samples, batch_size = sizes
    lengths = set()
    for rank in range(num_ranks):
        watch = Watch(calls=1)
        batches = batches_of(rank, num_samples, num_ranks, batch_size, watch)
        lengths.add(tuple(len(batch) for batch in batches))
        sampler = loader_of(rank, num_samples, num_ranks, batch_size).sampler
        assert [index for batch in batches for index in batch] == list(sampler)
        assert watch.padded == [rank]
    assert len(lengths) == 1


def test_the_order_is_that_of_the_users_sampler_in_every_epoch():
    data = range(23)
    sampler = DistributedSampler(data, 2, 0, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    share = evaluation_share(loader)
    exact_loader = ExactEvaluationLoader(with_exact_batches(loader, share), share, Watch())
    orders = []
    for epoch in range(2):
        exact_loader.batch_sampler.sampler.set_epoch(epoch)
        orders.append(torch.cat(list(exact_loader)).tolist())
        assert orders[epoch] == list(sampler)  # a rank with a full share has no repeat
    assert orders[0] != orders[1]


def test_workers_end_with_the_last_batch_though_a_short_rank_loads_one_more():
    loader = loader_of(1, 7, 2, 2)
    share = evaluation_share(loader)
    with_workers = DataLoader(range(7), batch_size=2, sampler=loader.sampler, num_workers=1)
    exact_loader = ExactEvaluationLoader(with_exact_batches(with_workers, share), share, Watch())
    for _ in range(2):
        iterator = iter(exact_loader)
        batches = [next(iterator).tolist() for _ in range(len(exact_loader))]
        assert batches == [[1, 3], [5]]
        assert iterator._batches is None


class Chooses(DistributedSampler):
    def __iter__(self):
        return iter(range(self.rank, len(self.dataset), self.num_replicas))


class Buckets(BatchSampler):
    pass


class Reads(DataLoader):
    def __iter__(self):
        return super().__iter__()


def sampler(num_samples=101, kind=DistributedSampler, **options):
    return kind(range(num_samples), num_replicas=4, rank=1, **options)


def loader(num_samples=101, kind=DataLoader, **options):
    if "batch_sampler" not in options:
        options = {"sampler": sampler(num_samples), "batch_size": 5, **options}
    return kind(range(num_samples), **options)


OBSTACLES = {
    "`Chooses` selects samples in its own way": lambda: loader(sampler=sampler(kind=Chooses)),
    "`drop_last=True` leaves samples out": lambda: loader(drop_last=True),
    "it has 3 samples for 4 ranks, but every rank needs one": lambda: loader(3),
    "it has `batch_size=None`": lambda: loader(batch_size=None),
    "`Buckets` forms batches in its own way": lambda: loader(
        batch_sampler=Buckets(sampler(), 5, False)
    ),
    "`Reads` defines its own `__iter__`": lambda: loader(kind=Reads),
    "`in_order=False` changes the order of its batches": lambda: loader(in_order=False),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_a_loader_whose_repeats_cannot_be_left_out_is_named_with_the_reason(reason):
    unsuited = OBSTACLES[reason]()
    assert obstacle_of(unsuited, evaluation_share(unsuited)).reason == reason


def test_a_sampler_that_drops_samples_is_named():
    unsuited = loader(sampler=sampler(drop_last=True))
    obstacle = obstacle_of(unsuited, evaluation_share(unsuited))
    assert obstacle.reason == "`drop_last=True` leaves samples out"


def test_a_loader_of_torchs_own_has_no_obstacle_and_one_without_a_distributed_sampler_no_share():
    plain = loader()
    assert obstacle_of(plain, evaluation_share(plain)) is None
    assert evaluation_share(DataLoader(range(8))) is None


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loader_gives_every_sample_once():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    plain = loader(7, kind=stateful.StatefulDataLoader, batch_size=2)
    share = evaluation_share(plain)
    assert obstacle_of(plain, share) is None
    assert isinstance(with_exact_batches(plain, share).batch_sampler, ExactBatchSampler)
