"""Stages with replicas of their own: the planner against every plan, and the order of work of its ranks."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.planning.estimates.pipeline_cost import StageLoad, schedule_tasks, simulate_pipeline
from recipes.planning.estimates.replicas import best_replicas, replicated_tasks


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_blocks=st.integers(1, 4), num_ranks=st.integers(1, 4))
def test_no_plan_has_a_faster_slowest_stage(data, num_blocks, num_ranks):
    lists = st.lists(st.integers(0, 9), min_size=num_blocks, max_size=num_blocks)
    seconds, weights, outputs = data.draw(lists), data.draw(lists), data.draw(lists)
    found = best_replicas(seconds, weights, outputs, num_ranks=num_ranks, bytes_per_s=4)

    def slowest_s(first_blocks, replicas):
        ends = [*first_blocks[1:], num_blocks]
        stages = [
            (sum(seconds[a:b]) + (r - 1) / r * sum(weights[a:b])) / r
            for a, b, r in zip(first_blocks, ends, replicas, strict=True)
        ]
        sends = [outputs[b - 1] / (2 * r) for b, r in zip(first_blocks[1:], replicas[1:], strict=True)]
        return max(stages + sends)

    plans = [
        ((0, *cuts), replicas)
        for number in range(1, min(num_blocks, num_ranks) + 1)
        for cuts in itertools.combinations(range(1, num_blocks), number - 1)
        for replicas in itertools.product(range(1, num_ranks + 1), repeat=number)
        if sum(replicas) == num_ranks
    ]
    assert (found.first_blocks, found.replicas) in plans
    assert found.seconds == pytest.approx(slowest_s(found.first_blocks, found.replicas))
    assert found.seconds == pytest.approx(min(itertools.starmap(slowest_s, plans)))


@settings(max_examples=60, deadline=None)
@given(replicas=st.lists(st.integers(1, 4), min_size=1, max_size=4), num_micro=st.integers(1, 12))
def test_any_replicas_do_every_micro_batch_once_and_none_waits_for_ever(replicas, num_micro):
    """`simulate_pipeline` raises where all ranks wait for one another. Micro-batch m is of replica m mod R."""
    order = replicated_tasks(replicas, num_micro)
    for rank, (stage, replica) in enumerate((s, r) for s, number in enumerate(replicas) for r in range(number)):
        own = {micro for micro in range(num_micro) if micro % replicas[stage] == replica}
        assert {(task.stage, task.microbatch) for task in order[rank]} == {(stage, micro) for micro in own}
    loads = [StageLoad(forward_s=0.02, backward_s=0.04)] * len(replicas)
    done = [task for tasks in simulate_pipeline(order, loads) for task in tasks]
    assert len({(task.stage, task.microbatch, task.is_forward) for task in done}) == len(done)
    assert len(done) == 2 * num_micro * len(replicas)
    assert replicated_tasks([1] * len(replicas), num_micro) == schedule_tasks("1f1b", len(replicas), num_micro)
