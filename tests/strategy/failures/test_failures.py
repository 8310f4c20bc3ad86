"""Ranks that fail or die outside of the all-reduce: the strategy on every other rank soon names them."""

import os
import re
import time
from functools import partial

import pytest
import torch.distributed as dist

from tests import toy
from tests.rank_pool import RankError
from tests.scenes import at, fit


def end_at(rank, end, trainer, module, batch, batch_idx):
    if batch_idx == 2 and dist.get_rank() == rank:
        end()


def die():
    os._exit(7)


def fail():
    raise FloatingPointError("of the user")


def fit_that_ends(rank, end):
    """Fit until one rank ends. Raise the message of the other rank as an error, together with the elapsed seconds.

    The module has BatchNorm. In its next forward pass, the other rank is therefore in DDP's broadcast of the buffers,
    which no alarm can interrupt until the failed process has exited.
    """
    start_s = time.monotonic()
    look = at(on_train_batch_start=partial(end_at, rank, end))
    trainer = toy.trainer(max_epochs=1, callbacks=[look])
    message = toy.error_of(trainer.fit, toy.Toy(), toy.loader())
    if dist.get_rank() == rank:
        time.sleep(2)
        os._exit(7)
    raise AssertionError(f"message after {time.monotonic() - start_s:.0f} s: {message}")


DEAD = "does not answer: its process is dead, stopped or unreachable."


@pytest.mark.slow  # the pool restarts its processes after this test
@pytest.mark.parametrize(
    ("rank", "end", "words"),
    [
        (0, fail, "comm: rank 0 gave up: FloatingPointError: of the user"),
        pytest.param(0, die, f"comm: rank 0 {DEAD}", marks=pytest.mark.long),
        pytest.param(1, die, f"comm: rank 1 {DEAD}", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_ends_before_its_forward_is_named_by_the_other(two_ranks, rank, end, words):
    with pytest.raises(RankError) as error:
        two_ranks.run(fit_that_ends, rank, end, grace_s=30.0)
    pattern = r"AssertionError: message after (\d+) s: (.*)"
    ((seconds, message),) = re.findall(pattern, str(error.value))
    assert message.count(words) == 1
    assert int(seconds) < 20, "soon: the collective itself waits for 45 s"


class Wraps(toy.Toy):
    """Module that hides the cause of an error as torch's pipelining does.

    The error that it raises does not mention the failed all-reduce.
    """

    error = FloatingPointError("of the user")

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and dist.get_rank() == 1:
            raise self.error
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        try:
            loss.backward()
        except RuntimeError as error:
            raise RuntimeError("Failed to run stage backward") from error


def test_an_error_that_was_raised_from_a_failed_average_names_the_rank_that_failed(two_ranks):
    seen, _ = fit(two_ranks, Wraps, max_epochs=1, raises=True)
    assert seen.error.startswith("RuntimeError: Failed to run stage backward")
    assert seen.error.count("comm: rank 1 gave up: FloatingPointError: of the user") == 1
    assert "\nOn rank 0" not in seen.error


class HasABrokenDatabase(Wraps):
    error = RuntimeError("the database's connection timed out: gloomy.example:5432")


def test_a_users_error_with_the_words_of_a_network_error_is_reported_as_the_users(two_ranks):
    rank_0, rank_1 = fit(two_ranks, HasABrokenDatabase, max_epochs=1, raises=True)
    text = "RuntimeError: the database's connection timed out: gloomy.example:5432"
    assert rank_1.error.startswith(f"{text}\n")
    assert f"comm: rank 1 gave up: {text}" in rank_0.error
