"""Seeds of the random numbers in each step."""

import random

import numpy as np
import torch

from recipes.training.callbacks.seed_each_step import SeedEachStep
from tests import toy
from tests.scenes import at, fit


def draw(*_):
    return torch.rand(()).item(), np.random.rand(), random.random()


def draw_before(num):
    """Draw the given number of random numbers before a run."""
    return [draw() for _ in range(num)] and None


def drawn(ranks, seed=0, num_before=0):
    ranks.run(draw_before, num_before)
    hooks = ("on_train_epoch_start", "on_train_batch_start", "on_validation_start")
    callbacks = [SeedEachStep(seed), at(**dict.fromkeys(hooks, draw))]
    results = fit(
        ranks, callbacks=callbacks, val=toy.loader, limit_train_batches=4, precision="32-true"
    )
    return [[numbers for hook in hooks for numbers in seen.looks[hook]] for seen in results]


def test_all_generators_are_seeded_wherever_a_run_draws(two_ranks):
    """The sanity check, 2 epoch starts, 8 batches and 2 validations draw different numbers, independent of history."""
    rank_0, rank_1 = drawn(two_ranks)
    assert len(rank_0) == 13
    for generator in range(3):
        assert len({numbers[generator] for numbers in rank_0 + rank_1}) == 26
    assert drawn(two_ranks, num_before=5) == [rank_0, rank_1]
    assert set(drawn(two_ranks, seed=1)[0]).isdisjoint(rank_0)
