"""Clipping of gradients by a norm that is spread over ranks: by stages of a pipeline, and by slices of layers."""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.distributed as dist
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
    """Scale the gradients of this rank down where the norm over all ranks is above `clip_val`. In place, collective.

        g <- g * min(1, clip_val / (|g| + 1e-6))        |g|: of all gradients, in the order of the parameters

    As `torch.nn.utils.clip_grad_norm_` over the whole network: of stages to the bit, as each has the norms of its
    parameters in their places and zeros elsewhere, to which adding is exact; of slices but for the order of additions.

    Args:
        optimizer: has all parameters on every rank, or those of this rank and placeholders.
        clip_val: the largest norm.
        device: of this rank, also where it has no gradient.
        slices: parameters by `id` of which the other ranks of `slice_group` have the rest; None: there are none.
        slice_group: see there.
        stage_group: the ranks of all stages; None: there is one.
        counted_elsewhere: tied parameters by `id`, of which another stage gives the norm.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = iter(torch._foreach_norm(gradients) if gradients else ())
    is_double = any(
        parameter.dtype is torch.float64 for parameter in parameters
    )  # on all ranks then
    both = torch.zeros(
        2, len(parameters), dtype=torch.float64 if is_double else torch.float32, device=device
    )
    norms, has = both.unbind()
    # Numbers are written one by one: to copy a table from the host would wait for the device.
    is_slice = torch.zeros(len(parameters), dtype=torch.bool, device=device)
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            norms[index].copy_(next(own))
            has[index].fill_(1.0)
        if id(parameter) in slices:
            is_slice[index].fill_(True)
    if slice_group is not None:
        squares = norms.double().square().where(is_slice, 0)
        dist.all_reduce(squares, group=slice_group)
        norms.copy_(squares.sqrt().where(is_slice, norms.double()))
    if stage_group is not None:
        for index, parameter in enumerate(parameters):
            if id(parameter) in counted_elsewhere:
                both[:, index].fill_(0)
        dist.all_reduce(both, group=stage_group)
    if not gradients:
        return
    # Only the parameters that have a gradient anywhere, as torch takes no others. A GPU would have to be asked how many
    # these are: there the others are zeros.
    has_gradient = has > 0
    norms = norms[has_gradient] if device.type == "cpu" else norms.where(has_gradient, 0)
    norm = torch.linalg.vector_norm(norms)
    torch._foreach_mul_(gradients, torch.clamp(clip_val / (norm + 1e-6), max=1.0))
