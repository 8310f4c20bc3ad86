"""Ranks that die, hang or fail within a schedule: every other rank names them with stage and micro-batch."""

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from lightning_hybrid import HybridPipelineStrategy
from tests import toy
from tests.rank_pool import RankError

# On a busy machine another rank may answer late, and is then named as well.
SILENT = re.compile(r"comm: rank(s [0-9, ]*\b1\b[0-9, ]* do| 1 does) not answer")


# Position in the schedule of the rank that noticed the fault, such as a dead rank's neighbor, whose message fails.
POSITION = re.compile(r"micro-batch [0-3] on stage [0-5] of [36]")


class Sick(torch.nn.Module):
    """Block that dies, fails or hangs in the third micro-batch of the second training step."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.num_calls = 0

    def forward(self, x):
        is_fake = x.device.type == "meta" or isinstance(x, torch._subclasses.FakeTensor)
        if is_fake or not self.training:
            return x
        self.num_calls += 1
        if self.num_calls == 7:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault == "raises":
                raise ArithmeticError("the batch is odd")
            else:
                time.sleep(60)
        return x


# The sick block is on stage 1 of rank 1.
CUTS = {
    "gpipe": [2, 6],
    "1f1b": [2, 6],
    "interleaved": [2, 4, 6, 7, 8],
}


def error_of_a_fit(fault, folder, timeout_s, schedule):
    module = toy.Toy()
    module.net.insert(3, Sick(fault))
    strategy = HybridPipelineStrategy(
        num_stages=3,
        num_microbatches=4,
        schedule=schedule,
        cuts=CUTS[schedule],
        timeout=timedelta(seconds=timeout_s),
    )
    trainer = toy.trainer(strategy=strategy, max_epochs=1)
    error = toy.error_of(trainer.fit, module, toy.loader())
    Path(folder, os.environ["RANK"]).write_text(error)
    # Raising makes the pool end these processes, because pending messages in Gloo cannot be cancelled.
    raise AssertionError(error)


def errors(ranks, fault, tmp_path, *, timeout_s=30, schedule="1f1b"):
    """Return the errors of a fit with this fault, by rank."""
    arguments = (fault, str(tmp_path), timeout_s, schedule)
    with pytest.raises(RankError):
        ranks.run(error_of_a_fit, *arguments, timeout_s=100, grace_s=45)
    return {int(path.name): path.read_text() for path in tmp_path.iterdir()}


@pytest.mark.slow  # the pool restarts its processes after this test
@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_a_killed_rank_is_named(three_ranks, tmp_path, schedule):
    result = errors(three_ranks, "killed", tmp_path, schedule=schedule)
    assert result.keys() == {0, 2}
    for rank, text in result.items():
        assert SILENT.search(text), f"rank {rank}"
        assert POSITION.search(text), f"rank {rank}"


@pytest.mark.slow  # as above
def test_a_rank_that_raises_is_named_with_its_error(three_ranks, tmp_path):
    result = errors(three_ranks, "raises", tmp_path)
    for rank in (0, 2):
        assert "comm: rank 1 gave up: " in result[rank]
        assert "ArithmeticError: the batch is odd" in result[rank]


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    [
        ("1f1b", 3),
        pytest.param("gpipe", 3, marks=pytest.mark.battery),
        pytest.param("interleaved", 6, marks=pytest.mark.battery),
    ],
)
def test_a_rank_that_hangs_is_named_with_stage_and_micro_batch(
    three_ranks, tmp_path, schedule, num_stages
):
    result = errors(three_ranks, "hangs", tmp_path, timeout_s=10, schedule=schedule)
    for rank in (0, 2):
        assert "rank 1 does not join the collective in which others wait" in result[rank]
        assert f"now in forward of micro-batch 2 on stage 1 of {num_stages}" in result[rank]
