"""Single step of a pipeline schedule over any blocks, on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.pipeline.checked_stage import CheckedStage, StageBody, StageSetting
from lightning_hybrid.pipeline.pipeline_watchdog import PipelineWatchdog, waits_of_schedules
from lightning_hybrid.pipeline.schedules import schedule_of
from lightning_hybrid.pipeline.shapes import Boundary

TIMEOUT = timedelta(seconds=60)


@contextmanager
def step_over(
    schedule: str,
    blocks: Mapping[int, nn.Module],
    boundary: Boundary,
    *,
    num_stages: int,
    num_microbatches: int,
) -> Iterator[Callable[[], Any]]:
    """Yield a function that runs one step over WORLD as in a fit, including the watchdog.

    Collective: every rank of WORLD must call it.

    Args:
        schedule: Name of the schedule.
        blocks: Blocks of this rank by stage index. A block returns a tensor like its input.
        boundary: Shape and dtype of the tensor between stages.
        num_stages: Number of stages of the pipeline.
        num_microbatches: Number of micro-batches of the step.
    """
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    watchdog = PipelineWatchdog(timeout=TIMEOUT, device=torch.device("cpu"))
    boundary = replace(boundary, has_gradient=True)
    x = boundary.empty("cpu").fill_(1.0)
    stages = []
    for index, block in blocks.items():
        setting = StageSetting(
            index=index,
            note=watchdog.note,
            num_stages=num_stages,
            device=torch.device("cpu"),
            group=group,
        )
        stage = CheckedStage(
            StageBody([block]),
            setting,
            inputs=[boundary],
            outputs=[boundary],
            input_of=lambda _: (x,),
        )
        stages.append(stage)
    run = schedule_of(
        schedule, stages, num_microbatches=num_microbatches, loss_of=lambda output, _: output.sum()
    )

    def step() -> None:
        with watchdog.in_schedule(), waits_of_schedules(watchdog):
            run()

    yield step
    dist.barrier()
    watchdog.leave()
    dist.destroy_process_group(group)
