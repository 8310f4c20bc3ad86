"""A rank that fails or dies outside of its averaging, seen by the others through the strategy: they name it, soon."""

from __future__ import annotations

import os
import re
import time

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from tests import toy
from tests.rank_pool import RankError
from tests.scenes import fit


class EndsAt(pl.Callback):
    """Ends one rank at the third batch, before its forward."""

    def __init__(self, rank, end):
        self.rank, self.end = rank, end

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2 and dist.get_rank() == self.rank:
            self.end()


def words_of(error):
    """What the living rank said, after how many seconds; its first line."""
    ((seconds, words),) = re.findall(r"AssertionError: message after (\d+) s: (.*)", str(error.value))
    return int(seconds), words


def fit_that_one_rank_dies_in(rank):
    """The module has BatchNorm: at its next forward the other rank is in DDP's own broadcast of the buffers."""
    start_s = time.monotonic()
    died = EndsAt(rank, lambda: os._exit(7))
    message = toy.error_of(toy.trainer(max_epochs=1, callbacks=[died]).fit, toy.Toy(), toy.loader())
    raise AssertionError(f"message after {time.monotonic() - start_s:.0f} s: {message}")


@pytest.mark.long
@pytest.mark.slow  # the processes are started afresh after it
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_dies_before_its_forward_is_named_by_the_other(two_ranks, rank):
    with pytest.raises(RankError) as error:
        two_ranks.run(fit_that_one_rank_dies_in, rank, grace_s=30.0)
    seconds, words = words_of(error)
    assert words.count(f"comm: rank {rank} does not answer: its process is dead, stopped or unreachable.") == 1
    assert seconds < 20  # soon: the collective itself waits for 45


def fit_that_rank_zero_leaves_by_an_error():
    """It raises before its forward; rank one waits for its buffers, which no alarm ends, until the process is gone."""

    def end():
        raise FloatingPointError("of the user")

    start_s = time.monotonic()
    message = toy.error_of(toy.trainer(max_epochs=1, callbacks=[EndsAt(0, end)]).fit, toy.Toy(), toy.loader())
    if dist.get_rank() == 0:
        time.sleep(2)
        os._exit(7)
    raise AssertionError(f"message after {time.monotonic() - start_s:.0f} s: {message}")


@pytest.mark.slow
def test_an_error_before_the_forward_reaches_the_other_in_its_own_words(two_ranks):
    with pytest.raises(RankError) as error:
        two_ranks.run(fit_that_rank_zero_leaves_by_an_error, grace_s=30.0)
    seconds, words = words_of(error)
    assert words.count("comm: rank 0 gave up: FloatingPointError: of the user") == 1
    assert "Seen here as RuntimeError: " in words
    assert seconds < 20  # soon: the collective itself waits for 45


class Wraps(toy.Toy):
    """As torch's pipelining does: what it raises says nothing of the average that failed in backward."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and dist.get_rank() == 1:
            raise FloatingPointError("of the user")
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        try:
            loss.backward()
        except RuntimeError as error:
            raise RuntimeError("Failed to run stage backward") from error


def test_an_error_that_was_raised_from_a_failed_average_says_which_rank_it_was(two_ranks):
    seen, _ = fit(two_ranks, Wraps, max_epochs=1, raises=True)
    assert seen.error.startswith("RuntimeError: Failed to run stage backward")
    assert seen.error.count("comm: rank 1 gave up: FloatingPointError: of the user") == 1
    assert "\nOn rank 0" not in seen.error


class HasABrokenDatabase(toy.Toy):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and dist.get_rank() == 1:
            raise RuntimeError("the database's connection timed out")
        return super().training_step(batch, batch_idx)


def test_a_users_error_that_sounds_like_a_networks_is_the_users(two_ranks):
    other, own = fit(two_ranks, HasABrokenDatabase, max_epochs=1, raises=True)
    assert own.error.startswith("RuntimeError: the database's connection timed out\n")
    assert "comm: rank 1 gave up: RuntimeError: the database's connection timed out" in other.error
