"""Forward through all stages, for validation, test and prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.pipeline.pipeline_watchdog import PipelineWatchdog
from lightning_hybrid.pipeline.rank_layout import PipelineRanks
from lightning_hybrid.pipeline.shapes import Boundary


def forward_through(
    bodies: Mapping[int, nn.Module],
    inputs: Sequence[Tensor],
    boundaries: Sequence[Boundary],
    *,
    ranks: PipelineRanks,
    group: dist.ProcessGroup,
    device: torch.device,
    watchdog: PipelineWatchdog,
) -> Tensor:
    """Send the parts of a batch through all stages; return the outputs of all of them on every rank.

    Collective: every rank of a pipeline, with as many parts. `bodies`: this rank's stages. `boundaries`: of one part;
    entry s is the input of stage s, and the last entry the output.
    """
    peers = ranks.pipelines[ranks.data_rank]
    sent: list[tuple[dist.Work | None, Tensor]] = []
    outputs: list[Tensor] = []
    for stage in ranks.stages:
        for number, part in enumerate(inputs):
            if stage > 0:
                watchdog.note(f"waiting for part {number} of the batch on stage {stage}", is_waiting=True)
                part = boundaries[stage].empty(device)
                message = boundaries[stage].message(part)
                receive = partial(dist.recv, message, src=peers[(stage - 1) % ranks.num_ranks], group=group)
                watchdog.wait_for(receive)
            watchdog.note(f"in forward of part {number} of the batch on stage {stage}")
            output = bodies[stage](part)
            if difference := boundaries[stage + 1].differs(output):
                raise RuntimeError(
                    f"The output of stage {stage} (={difference}) must be that of the fake tensors that ran before: "
                    "the next rank would take the message for something else. A block must not choose shapes by values."
                )
            if stage + 1 == ranks.num_stages:
                outputs.append(output)
            else:
                message = boundaries[stage + 1].message(output)
                sent.append((dist.isend(message, dst=peers[(stage + 1) % ranks.num_ranks], group=group), message))
    watchdog.note("waiting for the outputs of the last stage", is_waiting=True)
    for work, _ in sent:
        if work is not None:
            watchdog.wait_for(work.wait)
    output = torch.cat(outputs) if outputs else None
    return shared_output(
        output, len(inputs), boundaries[-1], ranks=ranks, group=group, device=device, watchdog=watchdog
    )


def shared_output(
    output: Tensor | None,
    num_parts: int,
    boundary: Boundary,
    *,
    ranks: PipelineRanks,
    group: dist.ProcessGroup,
    device: torch.device,
    watchdog: PipelineWatchdog,
) -> Tensor:
    """Give every rank of a pipeline the last stage's outputs (`output` there, None elsewhere). Collective."""
    if output is None:
        shape = (num_parts * boundary.shape[0], *boundary.shape[1:])
        output = torch.empty(shape, dtype=boundary.dtype, device=device)
    shared = output.detach().contiguous()
    watchdog.wait_for(lambda: dist.broadcast(shared, src=ranks.pipelines[ranks.data_rank][-1], group=group))
    return shared
