"""A rank that hangs outside of the engine is named with its place, whatever collective the others wait in."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.health.diagnosis import diagnose
from lightning_hybrid.comm.health.thread_place import place_of_error
from tests.comm.layouts import engine_over

WAITS = {
    "broadcast": lambda model: dist.broadcast(torch.ones(1), src=0),
    "backward": lambda model: model(torch.ones(2, 4) + dist.get_rank()).sum().backward(),
}


def user_code(seconds):
    time.sleep(seconds)


def status_beside(wait):
    """Rank 1 is in user code, and rank 0 waits for it; of each rank what another thread sees meanwhile."""
    engine, found = engine_over(((0, 1),), CommPlan()), []
    model = DistributedDataParallel(nn.BatchNorm1d(4))
    dist.barrier()
    asks = threading.Timer(0.2, lambda: found.append(engine._latch.status()))
    asks.start()
    if dist.get_rank() == 1:
        user_code(0.4)
    WAITS[wait](model)
    asks.join()
    engine.close()
    return found[0]


@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_in_user_code_is_the_cause_of_a_wait_in_any_collective(two_ranks, wait):
    statuses = two_ranks.run(status_beside, wait)
    assert [each.is_inside for each in statuses] == [True, False]
    assert diagnose("Rank 0 saw it", statuses).startswith(
        "comm: rank 1 does not come to the collective in which others wait; now with no bucket in flight, in "
        "`user_code` (test_thread_place.py:"
    )


def test_an_error_of_a_collective_says_which_it_was_and_who_called_it(one_rank):
    assert "in `broadcast`, called by `failed_call` (test_thread_place.py:" in one_rank.run(failed_call)[0]


def failed_call():
    try:
        dist.broadcast("no tensor", src=0)
    except TypeError as error:
        return place_of_error(error)
