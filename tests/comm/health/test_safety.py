"""Checks that values are equal on all ranks, and errors that reach all ranks together with their cause."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.engine.order_check import ChecksummedCopy
from lightning_hybrid.comm.health import consensus
from lightning_hybrid.comm.health.diagnosis import (
    IDLE,
    RankStatus,
    diagnose,
    differing,
    name_ranks,
    places_of,
)
from tests.comm.layouts import engine_over, error_of_another_order, integers, sum_of_integers
from tests.rank_pool import RankError
from tests.toy import error_of

TWO_BY_TWO = ((0, 1), (2, 3))
ALGORITHMS = ["flat", "parallel_flat", "hierarchical", "two_level"]


def error_and_time_of(wait):
    """Return the error that `wait` raises, without torch's surrounding text, and the elapsed seconds."""
    start = time.monotonic()
    words = error_of(wait)
    return words[max(0, words.find("comm: ")) :].split("\n")[0], time.monotonic() - start


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=300),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_a_checksum_is_wrong_on_every_rank_where_any_two_differ_and_nowhere_else(values, dtype):
    total = ChecksummedCopy(2, dtype)
    copy_of_rank = ChecksummedCopy(2, dtype)
    equal_values = values[:1] * len(values)
    for values_of_ranks in (values, equal_values):
        total.whole.zero_()
        for value in values_of_ranks:
            copy_of_rank.fill(torch.ones(2, dtype=dtype), value)
            total.whole.add_(copy_of_rank.whole)
        any_differ = len(set(values_of_ranks)) > 1
        for rank, value in enumerate(values_of_ranks):
            assert total.is_wrong(value) is any_differ, f"rank {rank}"


def another_order(algorithm, is_known):
    return error_of_another_order(
        engine_over(TWO_BY_TWO, CommPlan(algorithm=algorithm)), is_known=is_known
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_buckets_in_another_order_are_an_error_on_every_rank(four_ranks, algorithm, is_known):
    for rank, text in enumerate(four_ranks.run(another_order, algorithm, is_known)):
        assert "comm: rank 2 submitted bucket 1 (40 x float32" in text, f"rank {rank}: {text}"
        assert "where ranks 0, 1, 3 submitted bucket 0 (40 x float32" in text, f"rank {rank}"


def with_another_plan_and_other_software():
    """Return the errors of an engine with another plan, and of one with another torch version, on rank 1."""
    plan = CommPlan(chunk_bytes=2**20)
    software = consensus.software()
    plan_of_rank = plan
    if dist.get_rank() == 1:
        plan_of_rank = CommPlan(chunk_bytes=2**19)
        software["torch"] = "2.5.0"
    error_of_plan = error_of(engine_over, TWO_BY_TWO, plan_of_rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consensus, "software", lambda: software)
        return error_of_plan, error_of(engine_over, TWO_BY_TWO, plan)


def test_plans_and_software_that_differ_are_refused_on_every_rank(four_ranks):
    of_plan = "The communication plan must be the same on all ranks: `chunk_bytes` is 1048576 on ranks 0, 2, 3 and "
    of_torch = f"The software must be the same on all ranks: `torch` is '{torch.__version__}' on ranks 0, 2, 3 and "
    for rank, errors in enumerate(four_ranks.run(with_another_plan_and_other_software)):
        error_of_plan, error_of_torch = errors
        assert error_of_plan.startswith(f"ValueError: {of_plan}524288 on rank 1. "), f"rank {rank}"
        assert error_of_torch.startswith(f"ValueError: {of_torch}'2.5.0' on rank 1"), f"rank {rank}"


def of_another_size(odd_rank):
    engine = engine_over(TWO_BY_TWO, CommPlan())
    if dist.get_rank() == odd_rank:
        numel = 41
    else:
        numel = 40
    result = error_and_time_of(
        lambda: engine.submit(torch.ones(numel), bucket_index=0, is_last=True).wait()
    )
    engine.close()
    return result


def test_a_bucket_of_another_size_is_found_before_it_is_sent(four_ranks):
    """Sending such a bucket would end the process, because Gloo calls abort()."""
    for rank, (text, waited_s) in enumerate(four_ranks.run(of_another_size, 3)):
        assert "comm: rank 3 submitted bucket 0 (41 x float32" in text, f"rank {rank}"
        assert waited_s < 15, f"rank {rank}; the time limit is 30 s"


def one_rank_ends(number, ended_rank, algorithm):
    if dist.get_world_size() == 4:
        nodes = TWO_BY_TWO
    else:
        nodes = ((0,), (1,))
    if algorithm == "adasum":
        numels = (1500, 2500)
        plan = CommPlan(algorithm="hierarchical", chunk_bytes=2**50)
    else:
        numels = ()
        plan = CommPlan(algorithm=algorithm)
    engine = engine_over(nodes, plan, timeout_s=2.0)

    def submit_and_wait():
        flat = torch.ones(4000)
        engine.submit(flat, bucket_index=0, is_last=True, adasum_numels=numels).wait()

    submit_and_wait()
    dist.barrier()
    if dist.get_rank() == ended_rank:
        os.kill(os.getpid(), number)
    text, _ = error_and_time_of(submit_and_wait)
    # so that the pool prints it next to the dead rank's error
    raise AssertionError(f"error: {text}")


@pytest.mark.slow  # the pool restarts its processes after this test
@pytest.mark.parametrize(
    ("number", "world_size", "ended_rank", "algorithm"),
    [
        (signal.SIGKILL, 2, 0, "flat"),
        pytest.param(signal.SIGKILL, 4, 3, "two_level", marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, 2, 1, "hierarchical", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 4, 1, "adasum", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_or_was_stopped_is_named_on_all_others(
    rank_pool, number, world_size, ended_rank, algorithm
):
    with pytest.raises(RankError) as raised:
        rank_pool.ranks(world_size).run(
            one_rank_ends, number, ended_rank, algorithm, timeout_s=40.0, grace_s=10.0
        )
    text = f"error: comm: rank {ended_rank} does not answer: its process is dead, stopped or unreachable. rank"
    assert str(raised.value).count(text) == world_size - 1, str(raised.value)


def chunked_sums(algorithm, nodes, numels, dtype):
    plan = CommPlan(algorithm=algorithm, chunk_bytes=2**16, num_parallel_groups=3)
    engine = engine_over(nodes, plan)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    futures = []
    for index, numel in enumerate(numels):
        flat = integers(rank, numel, dtype, seed=index)
        is_last = index == len(numels) - 1
        futures.append(engine.submit(flat, bucket_index=index, is_last=is_last))
    are_right = []
    for index, (future, numel) in enumerate(zip(futures, numels, strict=True)):
        expected = sum_of_integers(world_size, numel, dtype, seed=index)
        are_right.append(torch.equal(future.wait(), expected))
    chunks = [bucket.num_chunks for bucket in engine.buckets]
    engine.close()
    return are_right, chunks


@pytest.mark.sampled(4)
@pytest.mark.parametrize("nodes", [TWO_BY_TWO, ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,))], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chunks_of_large_buckets_round_several_groups_sum_up_right(four_ranks, algorithm, nodes):
    numels = [0, 3, 100_000, 70_001, 16_385, 300_001, 5]
    is_cut = algorithm == "parallel_flat" or (algorithm != "flat" and len(nodes) < 4)
    for sizes in (numels, numels[::-1], [1_200_017]):
        results = four_ranks.run(chunked_sums, algorithm, nodes, sizes, torch.float32)
        for rank, (are_right, chunks) in enumerate(results):
            assert not is_cut or max(chunks) > 1, f"rank {rank}"
            assert are_right == [True] * len(sizes), f"rank {rank}"


def at(position, num=2, order="b", recent="xy", *, is_inside=False):
    return RankStatus(
        num_submitted=num, order=order, place=position, recent=tuple(recent), is_inside=is_inside
    )


RING = "in stage `ring`"
WAITS = "waiting for stage `ring`"
AT_TWO = at(f"bucket 1 {RING}", is_inside=True)
OUTSIDE = at(f"bucket 1 {WAITS}")
INSIDE_ONE = at(f"bucket 0 {RING}", 1, "a", "x", is_inside=True)
WAITING_ONE = at(f"bucket 0 {WAITS}", 1, "a", "x")
AT_ONE = at("with no bucket in flight", 1, "a", "x")
IN_HOOK = at(f"{IDLE}, in `hook` (a.py:3)")
IN_LOADER = at(f"{IDLE}, in `load` (b.py:5)")
IN_BARRIER = at(f"{IDLE}, in `barrier`, called by `c` (c.py:7)", is_inside=True)
IN_GATHER = at(f"{IDLE}, in `x`, called by `d` (d.py:9)", is_inside=True)
OTHER_BUCKET = at(f"bucket 1 {RING}", order="c", recent="xz")
LONG_AGO = at(f"bucket 1 {RING}", order="d")
LEFT = RankStatus(num_submitted=2, order="b", place="gone", has_left=True)
BEHIND = "is behind: it has submitted 1 of 2 buckets. State of rank"
ABSENT = "does not join the collective in which others wait. State of rank"


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ([AT_TWO, None, AT_TWO], "rank 1 does not answer: its process is dead"),
        ([None, None, AT_TWO], "ranks 0, 1 do not answer: their processes are dead"),
        ([AT_TWO, LEFT, AT_TWO], "rank 1 has closed its engine"),
        ([AT_TWO, AT_ONE, AT_TWO], f"rank 1 {BEHIND} 1: with no"),
        ([INSIDE_ONE, AT_ONE, AT_TWO], f"rank 1 {BEHIND} 1: with no"),
        ([WAITING_ONE, AT_ONE, AT_TWO], f"rank 1 {BEHIND} 1: with no"),
        ([INSIDE_ONE, AT_TWO, AT_TWO], f"rank 0 {BEHIND} 0: bucket 0"),
        ([AT_TWO, OUTSIDE, AT_TWO], f"rank 1 {ABSENT} 1: bucket 1 waitin"),
        (
            [OUTSIDE, OUTSIDE],
            "every rank answers, and none is in a collective: ranks 0, 1: bucket 1 waiting for",
        ),
        ([AT_TWO, AT_TWO, OTHER_BUCKET], "rank 2 submitted z where ranks 0, 1 submitted y"),
        ([AT_ONE, AT_TWO, OTHER_BUCKET], "rank 2 submitted z where rank 1 submitted y"),
        (
            [AT_TWO, LONG_AGO, AT_TWO],
            "rank 1 submitted a different bucket (too long ago to be named)",
        ),
        (
            [IN_HOOK, IN_LOADER],
            "every rank answers, and none is in a collective: rank 0: with no bucket in flight, in",
        ),
        ([IN_BARRIER, IN_HOOK], f"rank 1 {ABSENT} 1: with no bucket in fl"),
        (
            [IN_BARRIER, IN_GATHER],
            "ranks wait in different collectives: rank 0: with no bucket in flight, in `barrier`",
        ),
        (
            [IN_BARRIER, IN_BARRIER],
            "every rank answers, so the network between them is the cause (ranks 0, 1: with no",
        ),
        ([AT_TWO, IN_HOOK], "every rank answers, so the network"),
        (
            [AT_TWO, AT_TWO],
            "every rank answers, so the network between them is the cause (ranks 0, 1: bucket 1 in st",
        ),
    ],
)
def test_the_diagnosis_names_the_cause(statuses, words):
    diagnosis = diagnose("Rank 0 saw it", statuses)
    assert diagnosis.startswith(f"comm: {words}")
    assert diagnosis.endswith("Rank 0 saw it.")
    for status in statuses:
        if status is not None:
            assert RankStatus.from_json(status.to_json()) == status


def test_many_ranks_are_named_in_short():
    assert name_ranks(range(20)) == "ranks 0, 1, 2, 3 and 16 more"
    assert differing([{"a": 1}] * 3) == ""


def test_of_many_hosts_some_are_named():
    text = places_of([], [f"h{rank}" for rank in range(9)])
    assert text.startswith(" Rank 0 is on host h0, rank 1 is on host h1, ")
    assert text.endswith(" rank 3 is on host h3 and 5 more hosts.")


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
    cause = "comm: rank 1 gave up: OutOfMemoryError: no room. Rank 1 is on host host1."
    for rank, (text, waited_s) in enumerate(four_ranks.run(gives_up, 1)):
        assert cause in text, f"rank {rank}"
        assert waited_s < 15, f"rank {rank}; the time limit is 30 s"
