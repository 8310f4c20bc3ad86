"""Random numbers of a step."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist

from recipes.training.callbacks.seed_each_step import SeedEachStep
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


class DrawsEverywhere(pl.Callback):
    """Of all three generators: before the first batch, in each batch, in validation."""

    def __init__(self):
        self.numbers = []

    def draw(self, *_):
        self.numbers.append((torch.rand(()).item(), np.random.rand(), random.random()))

    on_train_epoch_start = on_train_batch_start = on_validation_start = draw


def numbers_drawn_everywhere(num_before):
    for _ in range(num_before):
        torch.rand(()), np.random.rand(), random.random()
    draws = DrawsEverywhere()
    trainer = toy.trainer(callbacks=[SeedEachStep(0), draws], precision="32-true", max_epochs=2)
    trainer.fit(toy.Toy(), toy.loader(), toy.loader())
    return draws.numbers


def test_all_generators_are_seeded_wherever_a_run_draws(two_ranks):
    """The sanity check, 2 epochs of a start, 4 batches and a validation: each draws its own, whatever was before."""
    one, other = two_ranks.run(numbers_drawn_everywhere, 0)
    assert len(one) == 13
    for generator in range(3):
        assert len({numbers[generator] for numbers in one + other}) == 26
    assert two_ranks.run(numbers_drawn_everywhere, 5) == [one, other]
