"""Selection of torch's pipeline schedules by name (GPipe, 1F1B, interleaved, zero bubble)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from lightning_hybrid.pipeline.checked_stage import CheckedStage

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def schedule_of(
    name: str,
    stages: Sequence[CheckedStage],
    *,
    num_microbatches: int,
    loss_of: Callable[[Tensor, int], Tensor],
) -> Callable[[], Tensor | None]:
    """Return a function that runs one training step of a torch pipeline schedule.

    The function returns the outputs of all micro-batches on the last stage, and None on other
    stages.

    Args:
        name: Name of the schedule.
        stages: Stages of this rank.
        num_microbatches: Number of micro-batches of a step.
        loss_of: Function of the output and the index of a micro-batch that returns its loss. The
            loss is already divided by the number of micro-batches, so that the gradients of all losses add up to those
            of the step.
    """

    def loss(output: Tensor, index: Tensor) -> Tensor:
        return loss_of(output, int(index))

    # torch's schedules with one stage per rank expect the stage, not a list.
    schedule_stages: Any = list(stages)
    if name in ("gpipe", "1f1b"):
        schedule_stages = stages[0]
    schedule = _SCHEDULES[name](
        schedule_stages,
        n_microbatches=num_microbatches,
        loss_fn=loss,
        # torch would divide gradients after the sum, while gradient accumulation divides each loss.
        scale_grads=False,
    )
    # The target of a micro-batch is its index.
    indices = torch.arange(num_microbatches)
    holds_last_stage = any(stage.is_last for stage in stages)

    def step() -> Tensor | None:
        output: Tensor | None
        if holds_last_stage:
            output = schedule.step(target=indices)
        else:
            output = schedule.step()
        return output

    return step
