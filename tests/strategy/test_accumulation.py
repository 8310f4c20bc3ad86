"""Gradients of several batches in a step: added up in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid import HybridAllReduceStrategy
from tests import toy

NUM_BATCHES = 64


class Counts(toy.Toy):
    """Its gradient is the batch: 1 - rank / 4 in the first of a step, 2**-11 in the others, none in the last.

    In fp16, 1 + 2**-11 is 1: added one by one in it, all but the first batch would be lost. In bf16 sooner.
    """

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1, bias=False)
        self.seen = []

    def training_step(self, batch, batch_idx):
        return (self.net.weight.float() * batch.float()).sum()

    def on_after_backward(self):
        self.seen.append(None if self.net.weight.grad is None else self.net.weight.grad.clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def batches(num_steps=1, small=2.0**-11):
    """float32 `"batch 3"`; rank r's first is 1 - r / 4."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    step = torch.full((NUM_BATCHES, 3), small)
    step[0], step[-1] = 1.0 - rank / 4, 0.0
    return torch.utils.data.DataLoader(step.repeat(num_steps, 1), batch_size=1)


def change_of_the_weights(precision, options, num_steps=1):
    module = Counts()
    with torch.no_grad():
        module.net.weight.zero_()
    strategy = HybridAllReduceStrategy(**options)
    trainer = toy.trainer(
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        accumulate_grad_batches=NUM_BATCHES,
        use_distributed_sampler=False,
    )
    trainer.fit(module, batches(num_steps))
    return module.net.weight.detach()[0], module.seen


OPTIONS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "own_memory": {"gradient_as_bucket_view": False},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_small_batches_of_a_step_are_not_lost_in_fp16(two_ranks, options):
    expected = (
        -(0.875 + 62 * 2.0**-11) / NUM_BATCHES
    )  # the mean over ranks of 1 and 0.75, and 62 small ones: exact in fp16
    for change, _ in two_ranks.run(change_of_the_weights, "16-true", {**OPTIONS[options], "loss_scale": 1024}):
        assert change.tolist() == [expected] * 3


def test_nor_in_bf16(two_ranks):
    exact = -(0.875 + 62 * 2.0**-11) / NUM_BATCHES
    for change, _ in two_ranks.run(change_of_the_weights, "bf16-true", {}):
        assert (change - exact).abs().max() <= 2.0**-8 * abs(
            exact
        ) * 1.01  # the sum, rounded on each rank, and their mean


def test_halves_would_lose_them():
    """Were this not so, the tests above could not fail."""
    for dtype in (torch.float16, torch.bfloat16):
        total = torch.tensor(1.0, dtype=dtype)
        for _ in range(62):
            total = total + torch.tensor(2.0**-11, dtype=dtype)
        assert total == 1.0


def test_each_step_begins_at_zero(two_ranks):
    one = two_ranks.run(change_of_the_weights, "16-true", {"loss_scale": 1024})[0][0]
    three = two_ranks.run(change_of_the_weights, "16-true", {"loss_scale": 1024}, 3)[0][0]
    assert torch.equal(three, 3 * one)


def test_hooks_see_the_gradient_of_their_batch_and_in_the_last_that_of_the_step(two_ranks):
    _, seen = two_ranks.run(change_of_the_weights, "16-true", {"loss_scale": 1024})[1]
    scale = 1024 / NUM_BATCHES
    assert [gradient[0, 0].item() for gradient in seen[:3]] == [0.75 * scale, 2.0**-11 * scale, 2.0**-11 * scale]
    assert seen[-1][0, 0].item() == (0.875 + 62 * 2.0**-11) * scale  # averaged over ranks


def what_a_first_batch_of_does(first):
    """Whether the weights stay, and the number of skipped steps."""
    module = Counts()
    data = torch.zeros(NUM_BATCHES, 3)
    data[0] = first
    trainer = toy.trainer(precision="16-true", max_epochs=1, accumulate_grad_batches=NUM_BATCHES)
    before = module.net.weight.detach().clone()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1))
    return torch.equal(module.net.weight, before), trainer.precision_plugin.num_skipped_steps


def test_an_inf_in_one_batch_skips_the_step(one_rank):
    assert one_rank.run(what_a_first_batch_of_does, float("inf")) == [(True, 1)]
    assert one_rank.run(what_a_first_batch_of_does, 1.0) == [(False, 0)]


class LeavesOut(Counts):
    """Makes no loss in the last batch of its first step."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == NUM_BATCHES - 1 else super().training_step(batch, batch_idx)


def change_by_two_steps_of_which_the_first_has_no_last_batch():
    module = LeavesOut()
    with torch.no_grad():
        module.net.weight.zero_()
    strategy = HybridAllReduceStrategy(loss_scale=1024)
    trainer = toy.trainer(
        strategy=strategy,
        precision="16-true",
        max_epochs=1,
        accumulate_grad_batches=NUM_BATCHES,
        use_distributed_sampler=False,
    )
    trainer.fit(module, batches(num_steps=2))
    return module.net.weight.detach()[0]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_does_not_come_about_leaves_nothing_to_the_next(one_rank):
    (change,) = one_rank.run(change_by_two_steps_of_which_the_first_has_no_last_batch)
    assert change.tolist() == [-(1.0 + 62 * 2.0**-11) / NUM_BATCHES] * 3


class OwnLoop(toy.Toy):
    """Manual optimization that adds up under DDP's `no_sync`."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            self.net.weight.zero_()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        model = self.trainer.strategy.model
        assert isinstance(model, DistributedDataParallel)
        is_last = (batch_idx + 1) % NUM_BATCHES == 0
        model.require_backward_grad_sync = is_last
        self.manual_backward((self.net.weight.float() * batch.float()).sum())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def change_by_an_own_loop():
    module = OwnLoop()
    strategy = HybridAllReduceStrategy(loss_scale=16)
    trainer = toy.trainer(strategy=strategy, precision="16-true", max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, batches())
    return module.net.weight.detach()[0]


def test_an_own_loop_that_puts_averaging_off_adds_up_in_fp32_too(two_ranks):
    for change in two_ranks.run(change_by_an_own_loop):
        assert change.tolist() == [-(0.875 + 62 * 2.0**-11)] * 3
