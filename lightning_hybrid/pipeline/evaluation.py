"""Forward through all stages, for validation, test and prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.pipeline.placement import PipelineRanks
from lightning_hybrid.pipeline.shapes import Boundary


def forward_through(
    bodies: Mapping[int, nn.Module],
    inputs: Sequence[Tensor],
    boundaries: Sequence[Boundary],
    *,
    ranks: PipelineRanks,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Send the parts of a batch through all stages; return the outputs of all of them on every rank.

    Collective: every rank of a pipeline, with as many parts. `bodies`: this rank's stages. `boundaries`: of one part;
    entry s is the input of stage s, and the last entry the output.
    """
    peers = ranks.pipelines[ranks.data_rank]
    sent: list[tuple[dist.Work | None, Tensor]] = []
    outputs: list[Tensor] = []
    for stage in ranks.stages:
        for part in inputs:
            if stage > 0:
                part = boundaries[stage].empty(device)
                dist.recv(part, src=peers[(stage - 1) % ranks.num_ranks], group=group)
            output = bodies[stage](part)
            if difference := boundaries[stage + 1].differs(output):
                raise RuntimeError(
                    f"The output of stage {stage} (={difference}) must be that of the fake tensors that ran before: the "
                    "next rank would take the message for something else. A block must not choose its shapes by values."
                )
            if stage + 1 == ranks.num_stages:
                outputs.append(output)
            else:
                message = output.contiguous()
                sent.append((dist.isend(message, dst=peers[(stage + 1) % ranks.num_ranks], group=group), message))
    for work, _ in sent:
        if work is not None:
            work.wait()
    return shared_output(torch.cat(outputs) if outputs else None, len(inputs), boundaries[-1], ranks, group, device)


def shared_output(
    output: Tensor | None,
    num_parts: int,
    boundary: Boundary,
    ranks: PipelineRanks,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Give every rank of a pipeline the last stage's outputs (`output` there, None elsewhere). Collective."""
    if output is None:
        shape = (num_parts * boundary.shape[0], *boundary.shape[1:])
        output = torch.empty(shape, dtype=boundary.dtype, device=device)
    output = output.detach().contiguous()
    dist.broadcast(output, src=ranks.pipelines[ranks.data_rank][-1], group=group)
    return output
