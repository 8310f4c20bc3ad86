"""How many micro-batches a rank keeps for backward, which is a pipeline's memory."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.pipeline.rank_layout import PipelineRanks
from lightning_hybrid.pipeline.shapes import Boundary
from recipes.planning.estimates.pipeline_cost import schedule_tasks
from tests.pipeline.schedule_step import step_over


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
        self.weight, self.count = nn.Parameter(torch.ones(())), count

    def forward(self, x):
        return Counts.apply(x * self.weight, self.count)


def most_kept(schedule, num_microbatches, parts):
    """The most micro-batches that this rank keeps, over all its stages."""
    num, kept = dist.get_world_size(), [0]
    ranks = PipelineRanks(rank=dist.get_rank(), world_size=num, num_ranks=num, stages_per_rank=parts)
    blocks = {stage: Block(lambda more: kept.append(kept[-1] + more)) for stage in ranks.stages}
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
def test_so_do_four_ranks_in_the_planners_order(four_ranks, schedule, num_microbatches, parts):
    planned = []
    for tasks in schedule_tasks(schedule, 4, num_microbatches, stages_per_rank=parts):
        steps = [1 if task.is_forward else -1 for task in tasks]
        planned.append(max(sum(steps[:end]) for end in range(1, len(steps) + 1)))
    assert four_ranks.run(most_kept, schedule, num_microbatches, parts) == planned


FORWARD_S, BACKWARD_S = 0.1, 0.2


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD_S)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD_S)
        return gradient


class Sleeping(Block):
    def forward(self, x):
        return Sleeps.apply(x * self.weight)


def waiting_part(schedule, num_microbatches):
    """The part of a step in which this rank's stage neither computes forward nor backward; the least of three steps."""
    num, rank = dist.get_world_size(), dist.get_rank()
    sizes = {"num_stages": num, "num_microbatches": num_microbatches}
    with step_over(schedule, {rank: Sleeping(None)}, Boundary((4, 16), torch.float32), **sizes) as step:
        found = []
        for _ in range(4):
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            found.append(1 - num_microbatches * (FORWARD_S + BACKWARD_S) / (time.perf_counter() - begin))
    return min(found[1:])


@pytest.mark.clock
@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    [("1f1b", 2), pytest.param("gpipe", 4, marks=pytest.mark.long), pytest.param("1f1b", 4, marks=pytest.mark.long)],
)
def test_stages_wait_at_most_a_tenth_longer_than_the_formula_says(rank_pool, schedule, num_stages):
    num_microbatches = 2 * num_stages
    formula = (num_stages - 1) / (num_microbatches + num_stages - 1)
    found = rank_pool.ranks(num_stages).run(waiting_part, schedule, num_microbatches)
    print(formula, found)
    assert all(formula <= each <= 1.1 * formula for each in found)
