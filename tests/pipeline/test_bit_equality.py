"""A pipeline trains what accumulation trains, to the bit: weights, BatchNorm statistics and counts, optimizer state."""

from __future__ import annotations

import pytest
import torch

from lightning_hybrid.optim import LAMB, LARS
from tests import toy
from tests.pipeline import cases
from tests.rank_pool import RankPool


def assert_equal(ranks, plain, options, settings):
    piped = ranks.run(cases.by_pipeline, options, settings)
    expected = plain.run(cases.by_accumulation, options["num_microbatches"], settings)
    for each in piped:
        assert cases.same(each["weights"], expected[0]["weights"])
        assert each["num_skipped"] == expected[0]["num_skipped"]
    assert cases.same(cases.joined(piped), expected[0]["optimizer"])
    return expected[0]


class WithLars(toy.Toy):
    optimizer = LARS
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "trust_coefficient": 0.02}

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WithLamb(WithLars):
    optimizer = LAMB
    options = {"lr": 0.01, "weight_decay": 0.01}


class Overflows(toy.Toy):
    """Its gradients are inf in one step, in the layer `at`, as far as fp16 goes."""

    at = 1

    def __init__(self):
        super().__init__()
        self.net[self.at].register_full_backward_pre_hook(self.to_inf)
        self.num_calls = 0

    def to_inf(self, module, gradients):
        self.num_calls += 1
        return tuple(g * float("inf") if self.num_calls == 6 else g for g in gradients)


class OverflowsInTheMiddle(Overflows):
    at = 5


class OverflowsInTheLast(Overflows):
    at = 8


TWO = {"num_stages": 2, "num_microbatches": 4}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_stages_train_what_accumulation_trains(one_rank, two_ranks, schedule):
    assert_equal(two_ranks, one_rank, {**TWO, "schedule": schedule}, {})


def test_four_stages_in_fp16_with_lars_and_a_schedule(one_rank, four_ranks):
    options = {"num_stages": 4, "num_microbatches": 4}
    assert_equal(four_ranks, one_rank, options, {"precision": "16-true", "module": WithLars})


def test_interleaved_stages_in_bf16_with_lamb(one_rank, two_ranks):
    options = {**TWO, "schedule": "interleaved"}
    assert_equal(two_ranks, one_rank, options, {"precision": "bf16-true", "module": WithLamb})


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("module", [OverflowsInTheMiddle, Overflows, OverflowsInTheLast])
def test_overflow_in_one_stage_skips_the_step_of_all(one_rank, four_ranks, module):
    options = {"num_stages": 4, "num_microbatches": 4}
    left = assert_equal(four_ranks, one_rank, options, {"precision": "16-true", "module": module})
    assert left["num_skipped"] == 1


def test_clipping_by_norm_counts_all_stages(one_rank, two_ranks):
    assert_equal(two_ranks, one_rank, TWO, {"gradient_clip_val": 0.3})


def test_activation_checkpoints_change_nothing(one_rank, two_ranks):
    options = {**TWO, "checkpoint_activations": True}
    assert_equal(two_ranks, one_rank, options, {"precision": "16-true"})


def test_data_ranks_average(two_ranks, four_ranks):
    piped = four_ranks.run(cases.by_pipeline, TWO, {"precision": "16-true"})
    expected = two_ranks.run(cases.by_accumulation, 4, {"precision": "16-true"})
    for each in piped:
        assert cases.same(each["weights"], expected[0]["weights"])
    assert cases.same(cases.joined(piped), expected[0]["optimizer"])


PLACES = {
    "2 stages": (2, 1, (2, 3, 4, 8)),
    "2 stages x 2 data ranks": (2, 2, (2, 3, 4, 8)),
    "4 stages": (4, 1, (4, 8)),
    "4 stages x 2 data ranks": (4, 2, (4, 8)),
}


def all_of(num_stages, counts, precision):
    """Every schedule and number of micro-batches; two steps of 24 samples on each data rank."""
    return [
        cases.by_pipeline({"num_stages": num_stages, "num_microbatches": num, "schedule": schedule}, short(precision))
        for schedule in ("gpipe", "1f1b", "interleaved")
        for num in counts
    ]


def all_by_accumulation(counts, precision):
    return [cases.by_accumulation(num, short(precision)) for num in counts]


def short(precision):
    return {"precision": precision, "batch_size": 24, "max_epochs": 1, "num_samples": 96}


@pytest.fixture
def eight_ranks():
    pool = RankPool(num_ranks=8)
    yield pool
    pool.close()


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true"])
@pytest.mark.parametrize("place", PLACES)
def test_every_schedule_trains_what_accumulation_trains(rank_pool, eight_ranks, place, precision):
    num_stages, num_data_ranks, counts = PLACES[place]
    num_ranks = num_stages * num_data_ranks
    pool = rank_pool if num_ranks <= rank_pool.num_ranks else eight_ranks
    piped = pool.ranks(num_ranks).run(all_of, num_stages, counts, precision, timeout_s=600)
    expected = pool.ranks(num_data_ranks).run(all_by_accumulation, counts, precision, timeout_s=600)[0] * 3
    for number, one in enumerate(expected):
        for each in piped:
            assert cases.same(each[number]["weights"], one["weights"]), number
        assert cases.same(cases.joined([each[number] for each in piped]), one["optimizer"]), number
