"""One step of a schedule over any blocks, on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.pipeline.checked_stage import (
    CheckedStage,
    StageBody,
    StageSetting,
    schedule_of,
)
from lightning_hybrid.pipeline.pipeline_watchdog import PipelineWatchdog, waits_of_schedules
from lightning_hybrid.pipeline.shapes import Boundary

TIMEOUT = timedelta(seconds=60)


@contextmanager
def step_over(
    schedule: str,
    blocks: Mapping[int, nn.Module],
    given: Boundary,
    *,
    num_stages: int,
    num_microbatches: int,
) -> Iterator[Callable[[], Any]]:
    """Yield a function that runs one step over WORLD, as a fit does it, watchdog included. Collective.

    `blocks`: those of this rank, by number of stage; each returns what it is given.
    """
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    watchdog = PipelineWatchdog(timeout=TIMEOUT, device=torch.device("cpu"))
    given = replace(given, has_gradient=True)
    x = given.empty("cpu").fill_(1.0)
    place: dict[str, Any] = {
        "num_stages": num_stages,
        "device": torch.device("cpu"),
        "group": group,
    }
    settings = [StageSetting(index=index, note=watchdog.note, **place) for index in blocks]
    ends: dict[str, Any] = {"inputs": [given], "outputs": [given], "input_of": lambda _: (x,)}
    bodies = [StageBody([block]) for block in blocks.values()]
    stages = [
        CheckedStage(body, setting, **ends) for body, setting in zip(bodies, settings, strict=True)
    ]
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
