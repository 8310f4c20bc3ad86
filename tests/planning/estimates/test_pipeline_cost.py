"""Simulated pipelines compared with the formulas of the papers and with torch's order of work."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.planning.estimates.pipeline_cost import (
    SCHEDULES,
    StageLoad,
    most_kept_bytes,
    pipeline_step_s,
    schedule_tasks,
    simulate_pipeline,
    waiting_share,
)

PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
RANKS = st.integers(1, 5)
ROUNDS = st.integers(1, 4)


def even(num_stages, **options):
    return [StageLoad(forward_s=1.0, backward_s=2.0, kept_bytes=1.0, **options)] * num_stages


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(num_ranks=RANKS, rounds=ROUNDS)
def test_an_even_pipeline_takes_what_the_formula_says(schedule, num_ranks, rounds):
    per_rank = PER_RANK[schedule]
    num_micro = num_ranks * rounds
    loads = even(num_ranks * per_rank)
    order = schedule_tasks(schedule, num_ranks, num_micro, stages_per_rank=per_rank)
    tasks = simulate_pipeline(order, loads)
    num_slots = num_micro * per_rank + num_ranks - 1
    assert pipeline_step_s(tasks, loads) == pytest.approx(3 * num_slots)
    assert waiting_share(tasks) == pytest.approx((num_ranks - 1) / num_slots)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), num_ranks=RANKS, rounds=ROUNDS)
def test_every_stage_does_every_micro_batch_once_after_what_it_needs(
    schedule, data, num_ranks, rounds
):
    """For any durations, nothing overlaps on a rank, and nothing begins before its input has arrived."""
    per_rank = PER_RANK[schedule]
    num_micro = num_ranks * rounds
    times = st.floats(0.1, 10)
    send_times = st.floats(0, 1)
    loads = []
    for _ in range(num_ranks * per_rank):
        load = StageLoad(
            forward_s=data.draw(times),
            backward_s=data.draw(times),
            send_s=data.draw(send_times),
        )
        loads.append(load)
    order = schedule_tasks(schedule, num_ranks, num_micro, stages_per_rank=per_rank)
    tasks = simulate_pipeline(order, loads)
    spans = {}
    for tasks_of_rank in tasks:
        for task in tasks_of_rank:
            spans[task.stage, task.microbatch, task.is_forward] = task
        for task, next_task in pairwise(tasks_of_rank):
            assert task.end_s <= next_task.begin_s
    assert len(spans) == 2 * num_micro * len(loads)
    assert sum(map(len, tasks)) == len(spans)

    last = len(loads) - 1
    for (stage, micro, is_forward), task in spans.items():
        if is_forward and stage == 0:
            continue
        if is_forward:
            arrives_s = spans[stage - 1, micro, True].end_s + loads[stage - 1].send_s
        elif stage == last:
            arrives_s = spans[stage, micro, True].end_s
        else:
            arrives_s = spans[stage + 1, micro, False].end_s + loads[stage].send_s
        assert task.begin_s >= arrives_s


def test_micro_batches_alive_are_those_that_torch_keeps():
    """The counts on four ranks were measured with torch's schedules. Interleaved ones have half stages."""
    for schedule, num_micro, alive in (
        ("gpipe", 8, [8, 8, 8, 8]),
        ("1f1b", 8, [4, 3, 2, 1]),
        ("1f1b", 2, [2, 2, 2, 1]),
        ("interleaved", 8, [11, 9, 7, 5]),
    ):
        per_rank = PER_RANK[schedule]
        order = schedule_tasks(schedule, 4, num_micro, stages_per_rank=per_rank)
        kept = [most_kept_bytes(tasks, even(4 * per_rank)) for tasks in order]
        assert kept == alive, f"{schedule} of {num_micro}"


def test_gradients_are_hidden_by_the_last_backward_and_by_earlier_stages():
    """The last stage is done first, so its gradients travel while the other stages still work."""
    tasks = simulate_pipeline(schedule_tasks("1f1b", 2, 4), even(2))
    plain_s = pipeline_step_s(tasks, even(2))
    in_front = [even(1, gradient_s=2.5)[0], even(1)[0]]
    behind = [even(1)[0], even(1, gradient_s=2.5)[0]]
    assert pipeline_step_s(tasks, in_front) == pytest.approx(plain_s + 0.5)
    assert pipeline_step_s(tasks, behind) == plain_s


def test_an_order_that_cannot_go_on_is_refused():
    backward_first = [list(reversed(tasks)) for tasks in schedule_tasks("gpipe", 2, 1)]
    with pytest.raises(
        ValueError, match="`order` cannot be executed, because all ranks would wait"
    ):
        simulate_pipeline(backward_first, even(2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            ("pipedream", 2, 4, 1),
            r"`schedule` \(='pipedream'\) must be one of 'gpipe', '1f1b', 'interleaved'",
        ),
        (
            ("interleaved", 4, 6, 2),
            r"`num_microbatches` \(=6\) must be a multiple .* Set num_microbatches=8",
        ),
        (("1f1b", 4, 6, 2), r"`stages_per_rank` \(=2\) must be 1 with schedule='1f1b'"),
        (("gpipe", 2, 0, 1), r"`num_microbatches` \(=0\) must be an integer"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(call, words):
    *numbers, per_rank = call
    with pytest.raises(ValueError, match=words):
        schedule_tasks(*numbers, stages_per_rank=per_rank)
