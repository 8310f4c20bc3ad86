import contextlib
import dataclasses
import threading
import time
import warnings
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.engine import stages
from tests.comm.layouts import engine_over
from tests.toy import error_of

TWO_BY_TWO = ((0, 1), (2, 3))
MIXED = CommPlan(hierarchical_below_bytes=1000)  # auto: both algorithms in one run


def ranks_and_stages():
    """Yield (failing rank, algorithm, stage) for every stage, on one rank after the other."""
    index = 0
    for algorithm, stages_of_algorithm in stages.STAGES.items():
        for stage in stages_of_algorithm:
            rank = index % 4
            if stage.name == "ring":
                rank = 2  # a leader, because other ranks have no ring
            yield rank, algorithm, stage.name
            index += 1


EVERY_STAGE = list(ranks_and_stages())


@contextlib.contextmanager
def replaced_stage(algorithm, name, run):
    """Run ``run(job, group, original)`` instead of a stage, in engines built inside this context."""
    before = stages.STAGES[algorithm]
    after = []
    for stage in before:
        if stage.name == name:
            stage = dataclasses.replace(stage, run=partial(run, original=stage.run))
        after.append(stage)
    stages.STAGES[algorithm] = tuple(after)
    try:
        yield
    finally:
        stages.STAGES[algorithm] = before


def broadcast_waits_for_the_next_reduce():
    """All-reduce two tensors, where the broadcast of tensor 0 waits for the end of the reduce of tensor 1."""
    num_reduced = [0]
    second_is_reduced = threading.Event()

    def reduce(job, group, original):
        original(job, group)
        num_reduced[0] += 1
        if num_reduced[0] == 2:
            second_is_reduced.set()

    def broadcast(job, group, original):
        if not second_is_reduced.wait(timeout=5):
            raise TimeoutError("no overlap")
        original(job, group)

    with (
        replaced_stage("hierarchical", "reduce", reduce),
        replaced_stage("hierarchical", "broadcast", broadcast),
    ):
        engine = engine_over(((0, 1),), CommPlan(algorithm="hierarchical"))
    try:
        first = engine.submit(torch.full((3,), 0.0), bucket_index=0)
        second = engine.submit(torch.full((3,), 1.0), bucket_index=1)
        return first.wait(), second.wait()
    finally:
        engine.close()


def test_stages_of_successive_tensors_overlap(two_ranks):
    results = two_ranks.run(broadcast_waits_for_the_next_reduce)
    for rank, (first, second) in enumerate(results):
        assert first.tolist() == [0.0, 0.0, 0.0], f"rank {rank}"
        assert second.tolist() == [2.0, 2.0, 2.0], f"rank {rank}"


def outcomes_with_a_failure(algorithm, stage, failing_rank):
    """Let tensor 1 fail in a stage on one rank. Submit until an error is raised, submit again, then close."""
    num_runs = [0]

    def fail_at_second(job, group, original):
        num_runs[0] += 1
        if num_runs[0] == 2:
            raise OSError("boom")
        original(job, group)

    plan = CommPlan(algorithm=algorithm, num_parallel_groups=1)
    replaced = contextlib.nullcontext()
    if dist.get_rank() == failing_rank:
        replaced = replaced_stage(algorithm, stage, fail_at_second)
    with replaced:
        engine = engine_over(TWO_BY_TWO, plan, timeout_s=30.0)
    start = time.monotonic()
    futures = []
    errors = [error_of(submit_and_wait, engine, futures)]
    # All-reduces that finished before the failure was known here have no error.
    errors += [error for error in map(error_of_waiting, futures) if error]
    waited_s = time.monotonic() - start
    errors.append(error_of(engine.submit, torch.ones(5), bucket_index=99))
    num_in_flight = engine.trace._num_in_flight
    engine.close()
    closed_s = time.monotonic() - start - waited_s
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("comm-")]
    return errors, waited_s, closed_s, threads, num_in_flight


def error_of_waiting(future):
    return error_of(future.wait)


def submit_and_wait(engine, futures):
    """Submit up to 20 buckets, so that ranks that tensor 1's failure does not affect see it in a later bucket."""
    for index in range(20):
        if index >= 3:
            futures.pop(0).wait()
        futures.append(engine.submit(torch.ones(5), bucket_index=index))


@pytest.mark.parametrize(
    ("failing_rank", "algorithm", "stage"), EVERY_STAGE, ids=[stage for *_, stage in EVERY_STAGE]
)
def test_a_failure_in_any_stage_on_any_rank_is_one_error_on_every_rank(
    four_ranks, algorithm, stage, failing_rank
):
    results = four_ranks.run(outcomes_with_a_failure, algorithm, stage, failing_rank)
    expected = f"comm: rank {failing_rank} failed on bucket 1 in stage `{stage}` of the {algorithm} all-reduce: OSError"
    for rank, result in enumerate(results):
        errors, waited_s, closed_s, threads, num_in_flight = result
        last = errors[-1].removeprefix("RuntimeError: ")
        assert last.startswith(expected), f"rank {rank}"
        for error in errors:  # the error of a future starts with torch's text about the callback
            assert last in error, f"rank {rank}"
        # The groups' timeout is 30 s, and the watchdog checks within 0.75 s.
        assert waited_s < 12, f"rank {rank}"
        assert closed_s < 12, f"rank {rank}"
        assert threads == [], f"rank {rank}"
        assert num_in_flight == 0, f"rank {rank}"


def close_with_work_in_flight():
    engine = engine_over(TWO_BY_TWO, MIXED)
    futures = [engine.submit(torch.ones(400), bucket_index=index) for index in range(8)]
    engine.close()
    return all(future.done() for future in futures), [future.wait()[0].item() for future in futures]


def test_closing_waits_for_what_is_in_flight(four_ranks):
    assert four_ranks.run(close_with_work_in_flight) == [(True, [4.0] * 8)] * 4


def failures_while_finishing():
    """Submit a bucket whose `finish` fails, and one whose `finish` aborts the engine."""
    texts = []
    counted = []

    def fail(flat):
        raise KeyError("no place")

    def give_up(flat):
        engine.abort("no place")
        return flat

    def submit_and_wait(finish):
        engine.submit(torch.ones(1), bucket_index=4, finish=finish).wait()

    for finish in (fail, give_up):
        engine = engine_over(((0,),), MIXED)
        texts.append(error_of(submit_and_wait, finish))
        counted.append((engine.trace._num_in_flight, engine.trace.drain().buckets))
        engine.close()
    return texts, counted


def test_a_failure_after_the_sum_is_the_same_error_and_the_bucket_is_not_counted_as_averaged(
    one_rank,
):
    ((texts, counted),) = one_rank.run(failures_while_finishing)
    failed, gave_up = texts
    assert "rank 0 failed on bucket 4 in stage `finish` of the flat all-reduce: KeyError" in failed
    assert "rank 0 gave up: no place" in gave_up
    assert counted == [(0, ())] * 2


def chunks_by_column():
    engine = engine_over(((0, 1),), CommPlan(algorithm="parallel_flat", num_parallel_groups=2))
    for index in range(6):
        engine.submit(torch.ones(10), bucket_index=index).wait()
    columns = engine._carrier._columns["parallel_flat"]
    engine.close()
    return [column[0].num_put for column in columns]


def test_chunks_go_round_the_columns(two_ranks):
    """Each parallel group has its own connections, because several flows are faster if the network limits each flow."""
    assert two_ranks.run(chunks_by_column) == [[3, 3]] * 2


def is_freed_after_its_sum():
    engine = engine_over(((0, 1),), CommPlan(algorithm="hierarchical"))
    flat = torch.ones(10)
    freed = weakref.ref(flat)
    future = engine.submit(flat, bucket_index=0)
    future.wait()
    del flat, future
    # The threads return to their queues a moment after the result is available.
    deadline_s = time.monotonic() + 5
    while freed() is not None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    is_freed = freed() is None
    engine.close()
    return is_freed


def test_a_thread_that_waits_for_work_keeps_no_gradients_alive(two_ranks):
    assert two_ranks.run(is_freed_after_its_sum) == [True] * 2


def bytes_inside_nodes():
    engine = engine_over(TWO_BY_TWO, CommPlan(algorithm="two_level"))
    results = []
    for keeps_shard in (False, True):
        engine.submit(torch.ones(400), bucket_index=0, keeps_shard=keeps_shard).wait()
        summary = engine.trace.drain()
        results.append((summary.bytes_inside, summary.bytes_across))
    engine.close()
    return results


def test_a_sum_that_stops_before_the_gather_counts_half_of_the_bytes_inside_a_node(four_ranks):
    """Without the gather, a two-level all-reduce counts half of the bytes inside a node.

    With k = 2 ranks per node, scatter and gather send (k - 1) S bytes each. Between N = 2 nodes, 2 (N - 1) / N S bytes
    are sent. S is 1,600.
    """
    assert four_ranks.run(bytes_inside_nodes) == [[(3200, 1600), (1600, 1600)]] * 4


def warnings_of_uneven_two_level():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_over(((0, 1), (2,)), CommPlan(algorithm="two_level"))
        total = engine.submit(torch.ones(2), bucket_index=0).wait()
        engine.close()
    return [str(warning.message) for warning in caught], total.tolist(), engine.buckets[0].algorithm


def test_two_level_on_uneven_nodes_runs_flat_with_one_warning(three_ranks):
    results = three_ranks.run(warnings_of_uneven_two_level)
    (message,), *_ = results[0]
    assert message.startswith(
        "`algorithm` (='two_level') requires the same number of ranks on every node"
    )
    assert [len(messages) for messages, *_ in results] == [1, 0, 0]
    assert [result for _, *result in results] == [[[3.0, 3.0], "flat"]] * 3
