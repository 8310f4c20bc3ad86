"""Gradient clipping by the norm over all pipeline stages and tensor-parallel slices."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


def clip_by_norm_over_ranks(
    optimizer: Optimizer,
    clip_val: float,
    *,
    device: torch.device,
    slices: Container[int] = (),
    slice_group: dist.ProcessGroup | None = None,
    stage_group: dist.ProcessGroup | None = None,
    counted_elsewhere: Container[int] = (),
) -> None:
    """Clip this rank's gradients by the global norm over all pipeline stages and tensor-parallel slices.

        g <- g * min(1, clip_val / (|g| + 1e-6))        |g|: norm of all gradients, in the order of the parameters

    The result is that of `torch.nn.utils.clip_grad_norm_` over the whole network. With pipeline stages, the results are
    bitwise equal, because each stage adds the norms of its own parameters to zeros, which is exact. With slices, they
    may differ slightly, because of the order of additions.

    Collective: every rank of `slice_group` and `stage_group` must call it, in the same order.

    Args:
        optimizer: Optimizer that holds all parameters on every rank, or the parameters of this rank and placeholders.
        clip_val: Maximum norm.
        device: Device of this rank, which may have no gradient.
        slices: `id` of each parameter that is a slice. The other ranks of `slice_group` hold the other slices.
        slice_group: Ranks that hold the slices of a layer, or None if no layer is sliced.
        stage_group: Ranks of all pipeline stages, or None if there is only one stage.
        counted_elsewhere: `id` of each tied parameter whose norm another stage contributes.
    """
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]

    dtype = torch.float32
    if any(parameter.dtype is torch.float64 for parameter in parameters):
        dtype = torch.float64  # the same dtype on all ranks
    norms_and_counts = torch.zeros(2, len(parameters), dtype=dtype, device=device)
    norms, counts = norms_and_counts.unbind()
    is_slice = torch.zeros(len(parameters), dtype=torch.bool, device=device)
    local_norms: Iterator[Tensor] = iter(())
    if gradients:
        local_norms = iter(torch._foreach_norm(gradients))
    # Elements are written one by one, because copying a tensor from the host would wait for the device.
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            norms[index].copy_(next(local_norms))
            counts[index].fill_(1.0)
        if id(parameter) in slices:
            is_slice[index].fill_(True)

    if slice_group is not None:
        squares = norms.double().square().where(is_slice, 0)
        dist.all_reduce(squares, group=slice_group)
        norms.copy_(squares.sqrt().where(is_slice, norms.double()))
    if stage_group is not None:
        for index, parameter in enumerate(parameters):
            if id(parameter) in counted_elsewhere:
                norms_and_counts[:, index].fill_(0)
        dist.all_reduce(norms_and_counts, group=stage_group)
    if not gradients:
        return

    # torch computes the norm over the parameters that have a gradient. On a GPU, selecting them would require reading
    # their number from the device. Therefore the norms of all other parameters are set to zero there.
    has_gradient = counts > 0
    if device.type == "cpu":
        norms = norms[has_gradient]
    else:
        norms = norms.where(has_gradient, 0)
    norm = torch.linalg.vector_norm(norms)
    torch._foreach_mul_(gradients, torch.clamp(clip_val / (norm + 1e-6), max=1.0))
