"""Stages with replicas of their own: the planner against every plan, its order of work on real ranks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.planning.estimates.pipeline_cost import (
    StageLoad,
    pipeline_step_s,
    schedule_tasks,
    simulate_pipeline,
)
from recipes.planning.estimates.replicas import best_replicas, replicated_tasks
from tests.pipeline.replicated_step import batch_of, layer_of, step_on_rank

NUM_MICRO = 12
SLOW_MIDDLE = [StageLoad(forward_s=each, backward_s=2 * each) for each in (0.02, 0.04, 0.02)]


def predicted_s(replicas, loads):
    return pipeline_step_s(simulate_pipeline(replicated_tasks(replicas, NUM_MICRO), loads), loads)


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
    """`simulate_pipeline` raises where all ranks wait for one another."""
    order = replicated_tasks(replicas, num_micro)
    done = [task for tasks in simulate_pipeline(order, [SLOW_MIDDLE[0]] * len(replicas)) for task in tasks]
    assert len({(task.stage, task.microbatch, task.is_forward) for task in done}) == len(done)
    assert len(done) == 2 * num_micro * len(replicas)
    assert replicated_tasks([1] * len(replicas), num_micro) == schedule_tasks("1f1b", len(replicas), num_micro)


def test_unequal_replicas_train_what_one_rank_trains(four_ranks):
    none = [StageLoad(forward_s=0.0, backward_s=0.0)] * 3
    layers = [layer_of(stage) for stage in range(3)]
    for micro in range(NUM_MICRO):
        layers[2](layers[1](layers[0](batch_of(micro)))).sum().backward()
    gradients = [gradient for _, gradient in four_ranks.run(step_on_rank, (1, 2, 1), NUM_MICRO, none)]
    for gradient, layer in zip(gradients, (layers[0], layers[1], layers[1], layers[2]), strict=True):
        torch.testing.assert_close(gradient, layer.weight.grad, rtol=1e-12, atol=0)


@pytest.mark.clock
def test_a_slow_stage_with_two_replicas_takes_the_predicted_time_within_a_tenth(four_ranks):
    """Stages that sleep: whatever else runs on the machine only adds, so that the least of five steps counts."""
    steps_s, _ = zip(*four_ranks.run(step_on_rank, (1, 2, 1), NUM_MICRO, SLOW_MIDDLE, 5), strict=True)
    measured_s = min(map(max, zip(*steps_s, strict=True)))
    assert measured_s == pytest.approx(predicted_s((1, 2, 1), SLOW_MIDDLE), rel=0.1)
