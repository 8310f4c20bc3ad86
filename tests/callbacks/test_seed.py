"""Random numbers of a step."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_hybrid.callbacks import SeedEachStep
from tests import toy


class Draws(pl.Callback):
    def __init__(self):
        self.numbers = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.numbers.append(torch.rand(()).item())


def test_random_numbers_of_a_step_are_its_own(two_ranks):
    """Different on each rank and in each step and for each seed; the same whatever was drawn before."""
    one, other = two_ranks.run(numbers_drawn, 0, 0)
    assert len(set(one + other)) == 16
    assert two_ranks.run(numbers_drawn, 0, 7) == [one, other]
    assert set(two_ranks.run(numbers_drawn, 1, 0)[0]).isdisjoint(one)


def numbers_drawn(seed, num_before):
    torch.manual_seed(0)
    torch.rand(num_before)
    draws = Draws()
    trainer = toy.trainer(callbacks=[SeedEachStep(seed), draws], precision="32-true")
    trainer.fit(toy.Toy(), toy.loader())
    assert trainer.world_size == dist.get_world_size()
    return draws.numbers
