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


class EndsAt(pl.Callback):
    """Ends one rank at the third batch, before its forward."""

    def __init__(self, rank, end):
        self.rank, self.end = rank, end

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2 and dist.get_rank() == self.rank:
            self.end()


def fit_that_one_rank_dies_in(rank):
    """The module has BatchNorm: at its next forward the other rank is in DDP's own broadcast of the buffers."""
    start_s = time.monotonic()
    died = EndsAt(rank, lambda: os._exit(7))
    told = toy.error_of(toy.trainer(max_epochs=1, callbacks=[died]).fit, toy.Toy(), toy.loader())
    raise AssertionError(f"told after {time.monotonic() - start_s:.0f} s: {told}")


@pytest.mark.slow  # the processes are started afresh after it
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_before_its_forward_is_named_by_the_other(two_ranks, rank):
    with pytest.raises(RankError) as error:
        two_ranks.run(fit_that_one_rank_dies_in, rank, grace_s=20.0)
    text = str(error.value)
    assert f"comm: rank {rank} does not answer: its process is dead, stopped or unreachable." in text
    (seconds,) = re.findall(r"told after (\d+) s: RuntimeError", text)
    assert int(seconds) < 10, text
