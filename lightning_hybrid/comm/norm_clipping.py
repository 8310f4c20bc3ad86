"""Clipping of gradients by a norm that is spread over ranks: by stages of a pipeline, or by slices of layers."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


def clip_by_norm_over_stages(
    optimizer: Optimizer,
    clip_val: float,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    counted_elsewhere: Container[int] = (),
    slices: Container[int] = (),
    slice_group: dist.ProcessGroup | None = None,
) -> None:
    """Scale the gradients of this rank down where the norm over all stages is above `clip_val`. In place, collective.

        g <- g * min(1, clip_val / (|g| + 1e-6))        |g|: of all gradients, in the order of the parameters

    As `torch.nn.utils.clip_grad_norm_` over the whole network, to the bit: every stage has the norm of each parameter
    in its place, and zeros elsewhere, to which adding is exact.

    `device`: of this rank, also where it has no gradient. `counted_elsewhere`: tied parameters by `id`, of which
    another stage gives the norm. `slices`: those of which other ranks of `slice_group`, with as many gradients, hold
    the rest.
    """
    parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    of_each = torch._foreach_norm(gradients) if gradients else []
    if slice_group is not None and gradients:
        held = [parameter for parameter in parameters if parameter.grad is not None]
        of_each = list(_norms_over_slices(of_each, held, slices, slice_group))
    own = iter(of_each)
    both = torch.zeros(2, len(parameters), dtype=torch.float32, device=device)
    norms, has = both.unbind()
    for index, parameter in enumerate(parameters):
        norm = None if parameter.grad is None else next(own)
        if norm is not None and id(parameter) not in counted_elsewhere:
            norms[index], has[index] = norm, 1.0
    dist.all_reduce(both, group=group)
    if not gradients:
        return
    # Only the parameters that have a gradient anywhere: torch takes no others.
    _scale_(gradients, torch.linalg.vector_norm(norms[has > 0]), clip_val)


def clip_by_norm_over_slices(
    optimizer: Optimizer, clip_val: float, *, slices: Container[int], group: dist.ProcessGroup
) -> None:
    """Scale gradients down where the norm of those of the whole layers is above `clip_val`. In place, collective.

        g <- g * min(1, clip_val / (|g| + 1e-6))        |g|: of whole gradients and of the slices of all ranks

    As `torch.nn.utils.clip_grad_norm_` of whole layers, but for the order of additions. Every rank of `group`, which
    shares the layers, must call it. `slices`: parameters by `id`.
    """
    parameters = [one for each in optimizer.param_groups for one in each["params"] if one.grad is not None]
    if not parameters:
        return
    gradients = [one.grad for one in parameters]
    norms = _norms_over_slices(torch._foreach_norm(gradients), parameters, slices, group)
    _scale_(gradients, norms.square().sum().sqrt().float(), clip_val)


def _norms_over_slices(
    norms: Sequence[Tensor], parameters: Sequence[Tensor], slices: Container[int], group: dist.ProcessGroup
) -> Tensor:
    squares = torch.stack(list(norms)).double().square()
    is_slice = torch.tensor([id(one) in slices for one in parameters], device=squares.device)
    of_slices = squares.where(is_slice, 0)
    dist.all_reduce(of_slices, group=group)
    return of_slices.where(is_slice, squares).sqrt()


def _scale_(gradients: list[Tensor], norm: Tensor, clip_val: float) -> None:
    torch._foreach_mul_(gradients, torch.clamp(clip_val / (norm + 1e-6), max=1.0))
