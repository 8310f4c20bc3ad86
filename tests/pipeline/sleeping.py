"""One step of a schedule over stages that sleep, on real ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.pipeline.checked_stage import CheckedStage, StageBody, StageSetting, schedule_of
from lightning_hybrid.pipeline.pipeline_watchdog import PipelineWatchdog, waits_of_schedules
from lightning_hybrid.pipeline.rank_layout import PipelineRanks
from lightning_hybrid.pipeline.shapes import Boundary
from lightning_hybrid.planning.pipeline_cost import schedule_tasks

FORWARD_SHARE = 1 / 3
GIVEN = Boundary((4, 16), torch.float32)
WARM_UP_STEPS, STEPS = 1, 5
TIMEOUT = timedelta(seconds=60)


@dataclass
class Kept:
    """How many micro-batches a rank keeps for backward, over all its stages."""

    now: int = 0
    most: int = 0

    def add(self) -> None:
        """Count one that begins."""
        self.now += 1
        self.most = max(self.most, self.now)


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Sleeping) -> Tensor:
        ctx.stage = stage
        stage.kept.add()
        time.sleep(FORWARD_SHARE * stage.stage_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep((1 - FORWARD_SHARE) * ctx.stage.stage_s)
        ctx.stage.kept.now -= 1
        return gradients[0], None


class Sleeping(nn.Module):
    """A block that takes `stage_s` for forward and backward of a micro-batch, and no core."""

    def __init__(self, stage_s: float, kept: Kept) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.stage_s, self.kept = stage_s, kept

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, later."""
        return _Sleeps.apply(x * self.weight, self)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def step_over(
    schedule: str, blocks: Mapping[int, nn.Module], given: Boundary, *, num_stages: int, num_microbatches: int
) -> Iterator[Callable[[], Any]]:
    """Yield a function that runs one step over WORLD, as a fit does it, watchdog included. Collective.

    `blocks`: those of this rank, by number of stage; each returns what it is given.
    """
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    watchdog = PipelineWatchdog(timeout=TIMEOUT, device=torch.device("cpu"))
    x = given.empty("cpu").fill_(1.0)
    stages = []
    for index, block in blocks.items():
        setting = StageSetting(
            index=index,
            num_stages=num_stages,
            device=torch.device("cpu"),
            group=group,
            pairs=(),
            note=watchdog.note,
        )
        stages.append(CheckedStage(StageBody([block]), setting, given=given, returned=given, input_of=lambda _: x))
    run = schedule_of(schedule, stages, num_microbatches=num_microbatches, loss_of=lambda output, _: output.sum())

    def step() -> None:
        with watchdog.in_schedule(), waits_of_schedules(watchdog):
            run()

    yield step
    dist.barrier()
    watchdog.leave()
    dist.destroy_process_group(group)


def measured(schedule: str, num_microbatches: int, parts: int, stage_s: float = 0.030) -> tuple[float, int]:
    """Return the median of a step's time over the formula, and the most micro-batches kept on this rank.

    `stage_s`: forward and backward of a micro-batch on a rank, in `parts` stages.
    """
    num = dist.get_world_size()
    ranks = PipelineRanks(rank=dist.get_rank(), world_size=num, num_ranks=num, stages_per_rank=parts)
    kept = Kept()
    blocks = {stage: Sleeping(stage_s / parts, kept) for stage in ranks.stages}
    times_s = []
    with step_over(schedule, blocks, GIVEN, num_stages=ranks.num_stages, num_microbatches=num_microbatches) as step:
        for _ in range(WARM_UP_STEPS + STEPS):
            dist.barrier()
            began_s = time.perf_counter()
            step()
            times_s.append(time.perf_counter() - began_s)
    formula_s = (num_microbatches + (num - 1) / parts) * stage_s
    return statistics.median(times_s[WARM_UP_STEPS:]) / formula_s, kept.most


def kept_by_plan(schedule: str, num_ranks: int, num_microbatches: int, parts: int) -> list[int]:
    """Return the most micro-batches that each rank keeps in the order of the planner's schedule.

    >>> kept_by_plan("gpipe", 2, 4, 1), kept_by_plan("1f1b", 4, 8, 1), kept_by_plan("interleaved", 4, 16, 2)
    ([4, 4], [4, 3, 2, 1], [11, 9, 7, 5])
    """
    found = []
    for tasks in schedule_tasks(schedule, num_ranks, num_microbatches, stages_per_rank=parts):
        kept = Kept()
        for task in tasks:
            if task.is_forward:
                kept.add()
            else:
                kept.now -= 1
        found.append(kept.most)
    return found
