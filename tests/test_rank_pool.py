"""The pool is a measuring instrument: it must report failures and hangs, and recover from both."""

import logging
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RankError, RankTimeoutError


def rank_and_sum(value):
    flat = torch.tensor([float(value * (dist.get_rank() + 1))])
    dist.all_reduce(flat)
    return dist.get_rank(), dist.get_world_size(), flat


def process_id():
    return os.getpid()


def raise_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("the telling line")
    dist.barrier()


def warn():
    warnings.warn("the telling warning", UserWarning, stacklevel=1)
    return "went on"


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)


def a_place_to_hang():
    time.sleep(60)


def leave_the_world():
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_runs_in_a_world_of_the_size_asked(rank_pool, world_size):
    total = 7.0 * sum(range(1, world_size + 1))
    results = rank_pool.ranks(world_size).run(rank_and_sum, 7)
    assert results == [(rank, world_size, torch.tensor([total])) for rank in range(world_size)]


def test_processes_are_started_once(two_ranks, four_ranks):
    assert four_ranks.run(process_id)[:2] == two_ranks.run(process_id)
    assert os.getpid() not in two_ranks.run(process_id)


def test_a_lost_default_group_is_made_again(two_ranks):
    before = two_ranks.run(process_id)
    two_ranks.run(leave_the_world)
    assert [total.item() for _, _, total in two_ranks.run(rank_and_sum, 1)] == [3.0, 3.0]
    assert two_ranks.run(process_id) == before


@pytest.mark.filterwarnings("ignore:the telling")
def test_filters_of_the_test_hold_on_the_ranks(two_ranks):
    assert two_ranks.run(warn) == ["went on", "went on"]


@pytest.mark.long
def test_failures_and_hangs_are_told_and_survived(two_ranks):
    """One test for all kinds, because each costs a restart of the processes."""
    with pytest.raises(RankError, match=r"rank 1 of 2:\n(.|\n)*KeyError: 'the telling line'"):
        two_ranks.run(raise_on, 1)
    with pytest.raises(RankError, match="UserWarning: the telling warning"):
        two_ranks.run(warn)
    with pytest.raises(RankError, match="the process died, exit code 3"):
        two_ranks.run(die_on, 0)
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"not done after 0.5 s(.|\n)*a_place_to_hang"):
        two_ranks.run(a_place_to_hang, timeout_s=0.5)
    assert time.monotonic() - start < 45
    assert [total.item() for _, _, total in two_ranks.run(rank_and_sum, 1)] == [3.0, 3.0]


def quiet():
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    return level


def test_a_logger_that_a_test_makes_quiet_speaks_in_the_next(one_rank):
    assert one_rank.run(quiet) == one_rank.run(quiet) != [logging.ERROR]
