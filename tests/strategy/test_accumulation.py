"""Gradient accumulation: gradients of several batches are added in fp32 and rounded once."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.scenes import at, fit, this_rank
from tests.toy import Toy

NUM_BATCHES = 16
SUM = 0.875 + 14 * 2.0**-11
"""Sum of a step: the mean over ranks of 1 and 0.75, and 14 small numbers. Exact in fp16."""


class Counts(Toy):
    """Module whose gradient is the batch, to detect accumulation in fp16.

    The gradient is 1 - rank / 4 in the first batch of a step, 2**-11 in the others, and zero in the last one. In fp16,
    1 + 2**-11 is 1, so accumulation in fp16 would lose all batches but the first.
    """

    def __init__(self, leaves_out=False):
        super().__init__(lr=1.0)
        self.net = nn.Linear(3, 1, bias=False)
        self.leaves_out = leaves_out
        nn.init.zeros_(self.net.weight)

    def training_step(self, batch, batch_idx):
        if self.leaves_out and batch_idx == NUM_BATCHES - 1:
            return None
        return (self.net.weight.float() * batch.float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def batches(num_steps=1, first=None):
    """Return a loader of float32 `"batch 3"`. The first batch of a step holds `first`, by default 1 - rank / 4."""
    if first is None:
        first = 1.0 - this_rank() / 4
    step = torch.full((NUM_BATCHES, 3), 2.0**-11)
    step[0] = first
    step[-1] = 0.0
    return torch.utils.data.DataLoader(step.repeat(num_steps, 1), batch_size=1)


def fit_steps(ranks, module=Counts, num_steps=1, first=None, **options):
    settings = {
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "accumulate_grad_batches": NUM_BATCHES,
        "precision": "16-true",
        "loss_scale": 1024,
        "train": partial(batches, num_steps, first),
    }
    return fit(ranks, module, **settings | options)


def weight_of(seen):
    """Return the weight at the end. It began at zero."""
    return seen.weights["net.weight"][0]


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}],
    ids=["plain", "unused", "own"],
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_small_batches_of_a_step_are_not_lost_in_fp16(two_ranks, options):
    for seen in fit_steps(two_ranks, **options):
        assert weight_of(seen).tolist() == [-SUM / NUM_BATCHES] * 3, f"rank {seen.rank}"


def test_every_step_begins_its_sum_at_zero(two_ranks):
    after_one_step, _ = fit_steps(two_ranks, num_steps=1)
    after_three_steps, _ = fit_steps(two_ranks, num_steps=3)
    assert torch.equal(weight_of(after_three_steps), 3 * weight_of(after_one_step))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_its_last_batch_takes_the_others_and_leaves_nothing_to_the_next(one_rank):
    (seen,) = fit_steps(one_rank, partial(Counts, leaves_out=True), num_steps=2)
    # The last batch has a gradient of zero in the second step.
    assert weight_of(seen).tolist() == [-2 * (1.0 + 14 * 2.0**-11) / NUM_BATCHES] * 3


def gradient(trainer, module):
    return module.net.weight.grad[0, 0].item()


def test_hooks_see_the_sum_of_the_batches_so_far_and_in_the_last_the_average_over_ranks(two_ranks):
    """Hooks see fp32 gradients without the loss scale, as under `ddp`."""
    _, rank_1 = fit_steps(two_ranks, callbacks=[at(on_after_backward=gradient)])
    sums = rank_1.looks["on_after_backward"]
    expected = [(0.75 + number * 2.0**-11) / NUM_BATCHES for number in range(3)]
    assert sums[:3] == expected
    assert sums[-1] == SUM / NUM_BATCHES


@pytest.mark.parametrize(("first", "num_skipped"), [(float("inf"), 1), (1.0, 0)])
def test_an_inf_in_one_batch_skips_the_step(one_rank, first, num_skipped):
    (seen,) = fit_steps(one_rank, first=first)
    assert seen.num_skipped == num_skipped
    has_moved = bool(weight_of(seen).any())
    assert has_moved == (num_skipped == 0)


class OwnLoop(Counts):
    """Module with manual optimization that accumulates gradients without averaging, as under DDP's `no_sync`."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        model = self.trainer.strategy.model
        assert isinstance(model, DistributedDataParallel)
        is_last = (batch_idx + 1) % NUM_BATCHES == 0
        model.require_backward_grad_sync = is_last
        self.manual_backward(super().training_step(batch, batch_idx))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def test_a_manual_loop_that_puts_averaging_off_adds_up_in_fp32_too(two_ranks):
    for seen in fit_steps(two_ranks, OwnLoop, loss_scale=16, accumulate_grad_batches=1):
        assert weight_of(seen).tolist() == [-SUM] * 3, f"rank {seen.rank}"
