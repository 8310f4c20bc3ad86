"""A rank that dies or is stopped in the middle of Adasum's exchange is named on all others."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.adasum import combine as adasum
from tests.comm.layouts import engine_over
from tests.rank_pool import RankError
from tests.toy import error_of

FOUR_NODES = ((0,), (1,), (2,), (3,))
PLAN = CommPlan(algorithm="hierarchical", chunk_bytes=2**50)
SICK = 1  # the rank


def ending(factors, signal_number):
    """Adasum's factors of its second level: halves have been exchanged, quarters have not all come back."""
    num_calls = 0

    def called(products):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            os.kill(os.getpid(), signal_number)
        return factors(products)

    return called


def one_falls_ill(number, timeout_s):
    engine = engine_over(FOUR_NODES, PLAN, timeout_s=timeout_s)

    def combine():
        engine.submit(torch.ones(4000), bucket_index=0, is_last=True, adasum_numels=(1500, 2500)).wait()

    combine()
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == SICK:
            patch.setattr(adasum, "adasum_factors", ending(adasum.adasum_factors, number))
        raise AssertionError(f"error: {error_of(combine)}")  # this way the pool prints it next to the dead rank's


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "timeout_s", "words"),
    [
        (signal.SIGKILL, 60.0, r"comm: ranks? [0-9, ]*\b1\b[^.]* not answer"),
        (signal.SIGSTOP, 10.0, r"comm: rank 1 does not answer"),
    ],
)
def test_a_rank_that_falls_ill_within_adasum_is_named_on_all_others(four_ranks, number, timeout_s, words):
    with pytest.raises(RankError) as raised:
        four_ranks.run(one_falls_ill, number, timeout_s, timeout_s=100.0, grace_s=30.0)
    assert len(re.findall(f"AssertionError: error: .*{words}", str(raised.value))) == 3, str(raised.value)
