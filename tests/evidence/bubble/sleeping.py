"""One step of a schedule over stages that sleep, on real ranks."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.pipeline.placement import PipelineRanks
from lightning_hybrid.pipeline.shapes import Boundary
from lightning_hybrid.pipeline.stage import CheckedStage, StageBody, StageSetting, schedule_of

FORWARD_S, BACKWARD_S = 0.010, 0.020
GIVEN = Boundary((4, 16), torch.float32)
WARM_UP_STEPS, STEPS = 1, 5


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Sleeping) -> Tensor:
        ctx.stage = stage
        stage.num_alive += 1
        stage.most_alive = max(stage.most_alive, stage.num_alive)
        time.sleep(stage.forward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.stage.backward_s)
        ctx.stage.num_alive -= 1
        return gradients[0], None


class Sleeping(nn.Module):
    """A block that takes time and no core."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.forward_s, self.backward_s = FORWARD_S / parts, BACKWARD_S / parts
        self.num_alive = self.most_alive = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, later."""
        return _Sleeps.apply(x * self.weight, self)  # type: ignore[no-any-return, no-untyped-call]


def measured(schedule: str, num_microbatches: int, parts: int) -> tuple[float, int]:
    """Return the median of a step's time over the formula, and the most micro-batches alive on this rank."""
    num = dist.get_world_size()
    ranks = PipelineRanks(rank=dist.get_rank(), world_size=num, num_ranks=num, stages_per_rank=parts)
    blocks = {stage: Sleeping(parts) for stage in ranks.stages}
    group: Any = dist.new_group(list(range(num)))
    stages = []
    for index, block in blocks.items():
        setting = StageSetting(
            index=index,
            num_stages=ranks.num_stages,
            device=torch.device("cpu"),
            group=group,
            pairs=(),
            note=lambda *_, **__: None,
        )
        x = torch.ones(GIVEN.shape)
        body = StageBody([block])
        stages.append(CheckedStage(body, setting, given=GIVEN, returned=GIVEN, input_of=lambda _, x=x: x))
    run = schedule_of(schedule, stages, num_microbatches=num_microbatches, loss_of=lambda output, _: output.sum())
    times_s = []
    for _ in range(WARM_UP_STEPS + STEPS):
        dist.barrier()
        began_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - began_s)
    dist.destroy_process_group(group)
    formula_s = (num_microbatches + (num - 1) / parts) * (FORWARD_S + BACKWARD_S)
    return statistics.median(times_s[WARM_UP_STEPS:]) / formula_s, sum(block.most_alive for block in blocks.values())
