"""Failures before the engine exists, or in runs without an engine: the rank that blocks the others is named."""

import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.strategy.failures.setup_watchdog import SetupWatchdog
from tests import toy
from tests.rank_pool import RankError
from tests.scenes import at, fit, same

GLOO = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"


def explained_on_rank_zero(where, folder):
    """Return rank zero's explanation of a failed collective, while rank one is elsewhere and still answers."""
    explained = Path(folder, "explained")

    def wait():
        end_s = time.monotonic() + 30
        while not explained.exists() and time.monotonic() < end_s:
            time.sleep(0.05)

    watchdog = SetupWatchdog(device=torch.device("cpu"))
    message = ""
    dist.barrier()
    if dist.get_rank() == 0:
        try:
            with watchdog.waiting():
                raise RuntimeError(GLOO)
        except RuntimeError as error:
            message = watchdog.explain(error)
        explained.touch()
        watchdog.leave()  # rank 0 waits here until the other rank has read the error
    elif where == "gave up":
        watchdog.abort("OutOfMemoryError: no room")
    elif where == "in the collective":
        with watchdog.waiting():
            wait()
    else:
        wait()
    dist.barrier()
    watchdog.leave()
    return message


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("gave up", "comm: rank 1 gave up: OutOfMemoryError: no room. Rank 1 is on host "),
        (
            "in a hook",
            "comm: rank 1 does not join the collective in which others wait. State of rank 1: in no collective, in "
            "`wait` (",
        ),
        (
            "in the collective",
            "comm: every rank answers, so the network between them is the cause (rank 0: in a coll",
        ),
    ],
)
def test_the_error_of_a_failed_collective_names_its_cause(two_ranks, tmp_path, where, words):
    message, _ = two_ranks.run(explained_on_rank_zero, where, str(tmp_path))
    # If a rank gave up, either its collected status or its own report may come first.
    beginnings = (words,)
    if where == "gave up":
        beginnings = (words, "comm: rank 1 does not join the collective")
    assert message.startswith(beginnings)
    assert message.endswith(f"Seen here as RuntimeError: {GLOO}")


def fit_that_one_rank_dies_before(rank):
    def die(trainer, *_, stage):
        if trainer.global_rank == rank:
            os._exit(7)

    trainer = toy.trainer(max_epochs=1, callbacks=[at(setup=die)])
    message = toy.error_of(trainer.fit, toy.Toy(), toy.loader())
    raise AssertionError(f"message: {message}")


@pytest.mark.slow  # the pool restarts its processes after this test
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_dies_before_the_engine_is_built_is_named_by_the_other(two_ranks, rank):
    with pytest.raises(RankError) as error:
        two_ranks.run(fit_that_one_rank_dies_before, rank, grace_s=30.0)
    named = f"message: RuntimeError: comm: rank {rank} does not answer: "
    assert str(error.value).count(named) == 1
    assert f"ank {rank} is on host " in str(error.value)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "32-true"])
def test_ranks_that_begin_with_other_weights_train_rank_zeros_masters_included(
    two_ranks, precision
):
    """All ranks train rank zero's master weights, although DDP does not send their lower digits in half precision."""
    rank_0, rank_1 = fit(two_ranks, unseeded, precision=precision)
    assert same(rank_0.parameters, rank_1.parameters)


def unseeded():
    return toy.Toy(seed=dist.get_rank())


class BreaksInValidation(toy.Toy):
    def validation_step(self, batch, batch_idx):
        if dist.get_rank() == 1:
            raise FloatingPointError("of the user")


def test_an_error_of_the_users_names_its_rank_and_host(two_ranks):
    rank_0, rank_1 = fit(two_ranks, BreaksInValidation, call="validate", raises=True)
    message, rule, origin, location = rank_1.error.splitlines()
    assert message == "FloatingPointError: of the user"
    assert not rule.strip("-")
    assert re.fullmatch(r"On rank 1 \(host .+\): FloatingPointError: of the user", origin)
    assert re.fullmatch(r'  File ".+test_setup.py", line \d+, in validation_step', location)
    # Rank zero may have finished its batches by then.
    if rank_0.error:
        cause = f"comm: rank 1 gave up: FloatingPointError: of the user ({location.strip()})."
        assert cause in rank_0.error
