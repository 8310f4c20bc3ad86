"""Errors of communication say on which host a rank is."""

import time

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.health import consensus
from lightning_hybrid.comm.health.diagnosis import places_of
from tests.comm.layouts import engine_over
from tests.toy import error_of

TWO_BY_TWO = ((0, 1), (2, 3))


def test_of_many_hosts_some_are_named():
    text = places_of([], [f"h{rank}" for rank in range(9)])
    assert text.startswith(" Rank 0 is on host h0, rank 1 is on host h1, ")
    assert text.endswith(" rank 3 is on host h3 and 5 hosts more.")


def gives_up(odd_rank):
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consensus, "host_identity", lambda: (f"host{rank}",))
        engine = engine_over(TWO_BY_TWO, CommPlan())
    if rank == odd_rank:
        engine.abort("OutOfMemoryError: no room")
        engine.abort("later")
    began_s = time.monotonic()
    text = error_of(lambda: engine.submit(torch.ones(4), bucket_index=0, is_last=True).wait())
    engine.close()
    engine.abort("too late")
    return text, time.monotonic() - began_s


def test_a_rank_that_gives_up_is_told_with_its_host_on_every_rank(four_ranks):
    for text, waited_s in four_ranks.run(gives_up, 1):
        assert "comm: rank 1 gave up: OutOfMemoryError: no room. Rank 1 is on host host1." in text
        assert waited_s < 15  # the time limit is 30 s
