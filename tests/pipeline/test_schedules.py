"""Micro-batches that a rank keeps for backward, which determine the memory of a pipeline, and its waiting time."""

import gc
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.pipeline.checked_stage import CheckedStage
from lightning_hybrid.pipeline.rank_layout import PipelineRanks
from lightning_hybrid.pipeline.shapes import Boundary
from lightning_hybrid.planning.estimates.pipeline_cost import schedule_tasks
from tests import toy
from tests.pipeline.cases import in_stages
from tests.pipeline.schedule_step import step_over
from tests.scenes import at, fit


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        count(1)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.count(-1)
        return gradient, None


class Block(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.count = count

    def forward(self, x):
        return Counts.apply(x * self.weight, self.count)


def most_kept(schedule, num_microbatches, parts):
    """Return the maximum number of micro-batches that this rank keeps, over all its stages."""
    num = dist.get_world_size()
    kept = [0]

    def count(change):
        kept.append(kept[-1] + change)

    ranks = PipelineRanks(
        rank=dist.get_rank(), world_size=num, num_ranks=num, stages_per_rank=parts
    )
    blocks = {stage: Block(count) for stage in ranks.stages}
    sizes = {"num_stages": ranks.num_stages, "num_microbatches": num_microbatches}
    with step_over(schedule, blocks, Boundary((4, 16), torch.float32), **sizes) as step:
        step()
    return max(kept)


@pytest.mark.parametrize(("schedule", "kept"), [("gpipe", [4, 4]), ("1f1b", [2, 1])])
def test_a_rank_keeps_as_many_micro_batches_as_the_formula_says(two_ranks, schedule, kept):
    assert two_ranks.run(most_kept, schedule, 4, 1) == kept


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "parts"),
    [("gpipe", 8, 1), ("1f1b", 8, 1), ("interleaved", 4, 2), ("interleaved", 8, 2)],
)
def test_four_ranks_keep_as_many_micro_batches_as_the_planners_order(
    four_ranks, schedule, num_microbatches, parts
):
    planned = []
    for tasks in schedule_tasks(schedule, 4, num_microbatches, stages_per_rank=parts):
        steps = [1 if task.is_forward else -1 for task in tasks]
        planned.append(max(sum(steps[:end]) for end in range(1, len(steps) + 1)))
    assert four_ranks.run(most_kept, schedule, num_microbatches, parts) == planned


def num_stages_in_memory(*_):
    gc.collect()
    return sum(isinstance(item, CheckedStage) for item in gc.get_objects())


def test_batches_of_other_shapes_leave_no_memory_behind(two_ranks):
    callbacks = [at(on_train_batch_end=num_stages_in_memory)]
    scene = in_stages(data=toy.Blobs(20), num_microbatches=2, callbacks=callbacks)
    for seen in fit(two_ranks, **scene):
        counts = seen.looks["on_train_batch_end"]
        assert len(counts) == 6, f"rank {seen.rank}"
        assert max(counts) == counts[0], f"rank {seen.rank}"


FORWARD_S = BACKWARD_S = 0.1  # of each backward: for the input and for the weight
BEGIN_MS = 1.0  # `step_over` fills the input of a step with ones

# ---- waiting time of schedules that compute both gradients at once ---------------------------------------------------


class TaskClock:
    """Simulated time of one rank, without the time that messages take.

    A task begins when the previous task has ended and its input is available. The first element of a tensor carries the
    time at which the tensor was computed, in milliseconds.
    """

    def __init__(self, *, sleeps: bool) -> None:
        self.now_ms = BEGIN_MS
        self.busy_ms = 0.0
        self._sleeps = sleeps

    def run(self, task_ms, tensor):
        """Run a task on a tensor, and return the tensor marked with the end time of the task."""
        elapsed_ms = task_ms
        if self._sleeps:
            begin_s = time.perf_counter()
            time.sleep(task_ms / 1000)
            elapsed_ms = 1000 * (time.perf_counter() - begin_s)
        self.busy_ms += elapsed_ms
        self.now_ms = max(self.now_ms, float(tensor.flatten()[0])) + elapsed_ms
        marked = tensor.clone()
        marked.flatten()[0] = self.now_ms
        return marked


class ClockedTask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, clock):
        ctx.clock = clock
        return clock.run(1000 * FORWARD_S, x)

    @staticmethod
    def backward(ctx, gradient):
        marked = ctx.clock.run(2000 * BACKWARD_S, gradient)
        return marked, gradient.sum(), None


class ClockedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.clock = TaskClock(sleeps=False)

    def forward(self, x):
        return ClockedTask.apply(x, self.weight, self.clock)


class Waiting(NamedTuple):
    """Fractions of a step in which a rank runs no task."""

    planned: float  # if messages took no time
    measured: float


def waiting_by_task_clock(schedule, num_microbatches, sleeps):
    """Return how long this rank waits, by its tasks alone and by the wall clock, in the shortest of three steps."""
    num_stages = dist.get_world_size()
    block = ClockedBlock()
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    blocks = {dist.get_rank(): block}
    steps = []
    with step_over(schedule, blocks, Boundary((4, 16), torch.float32), **sizes) as step:
        for _ in range(4):
            block.clock = TaskClock(sleeps=sleeps)
            dist.barrier()
            begin_s = time.perf_counter()
            step()
            dist.barrier()
            step_ms = 1000 * (time.perf_counter() - begin_s)
            last_ms = torch.tensor(block.clock.now_ms - BEGIN_MS, dtype=torch.float64)
            dist.all_reduce(last_ms, dist.ReduceOp.MAX)
            busy_ms = block.clock.busy_ms
            steps.append(Waiting(1 - busy_ms / float(last_ms), 1 - busy_ms / step_ms))
    return min(steps[1:], key=lambda waiting: waiting.measured - waiting.planned)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_order_of_tasks_makes_stages_wait_exactly_as_long_as_the_formula_says(
    rank_pool, schedule, num_stages
):
    num_microbatches = 2 * num_stages
    formula = (num_stages - 1) / (num_microbatches + num_stages - 1)
    results = rank_pool.ranks(num_stages).run(
        waiting_by_task_clock, schedule, num_microbatches, False
    )
    for waiting in results:
        assert waiting.planned == pytest.approx(formula, rel=1e-6)


@pytest.mark.long  # marked clock, so no other test runs at the same time
@pytest.mark.clock
@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    [
        ("1f1b", 2),
        pytest.param("gpipe", 4, marks=pytest.mark.long),
        pytest.param("1f1b", 4, marks=pytest.mark.long),
    ],
)
def test_stages_wait_at_most_a_tenth_longer_than_their_tasks_make_them(
    rank_pool, schedule, num_stages
):
    """The tasks are timed in the same steps, because a sleep takes longer if other work shares the processors."""
    results = rank_pool.ranks(num_stages).run(waiting_by_task_clock, schedule, 2 * num_stages, True)
    print(results)
    for waiting in results:
        assert waiting.planned <= waiting.measured <= 1.1 * waiting.planned


# ---- gradients of weights computed while stages wait -----------------------------------------------------------------


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s):
        time.sleep(forward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD_S)
        return gradient, None


class Sleeping(Block):
    def forward(self, x):
        weight = Sleeps.apply(self.weight, 0)
        # Images have no gradient, so the first stage's whole backward is for weights, and takes the same time.
        return Sleeps.apply(x, FORWARD_S) * (weight if x.requires_grad else Sleeps.apply(weight, 0))


def waiting_part(schedule, num_microbatches, parts):
    """Return the shortest fraction of three steps in which this rank computes neither forward nor backward."""
    num = dist.get_world_size()
    ranks = PipelineRanks(
        rank=dist.get_rank(), world_size=num, num_ranks=num, stages_per_rank=parts
    )
    sizes = {"num_stages": ranks.num_stages, "num_microbatches": num_microbatches}
    blocks = {stage: Sleeping(None) for stage in ranks.stages}
    with step_over(schedule, blocks, Boundary((4, 16), torch.float32), **sizes) as step:
        results = []
        for _ in range(4):
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            busy_s = num_microbatches * parts * (FORWARD_S + 2 * BACKWARD_S)
            results.append(1 - busy_s / (time.perf_counter() - begin))
    return min(results[1:])


@pytest.mark.long  # marked clock, so no other test runs at the same time
@pytest.mark.clock
@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_of_weights_fill_what_interleaved_stages_wait(rank_pool, num_stages):
    """The stages wait for less than (S - 1) / (2 M + S - 1) of a step, the fraction without zero bubble."""
    num_microbatches = 2 * num_stages
    formula = (num_stages - 1) / (2 * num_microbatches + num_stages - 1)
    results = rank_pool.ranks(num_stages).run(waiting_part, "zero_bubble", num_microbatches, 2)
    print(formula, results)
    assert all(0 < result < 0.9 * formula for result in results)
