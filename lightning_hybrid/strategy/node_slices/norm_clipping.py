"""Clipping of gradients by the norm of all, slices of other ranks too."""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.distributed as dist
from torch.optim import Optimizer


def clip_by_norm_over_slices(
    optimizer: Optimizer, clip_val: float, *, slices: Container[int], group: dist.ProcessGroup
) -> None:
    """Scale gradients down where the norm of those of the whole layers is above `clip_val`. In place, collective.

        g <- g * min(1, clip_val / (|g| + 1e-6))        |g|: of whole gradients and of the slices of all ranks

    As `torch.nn.utils.clip_grad_norm_` of whole layers, but for the order of additions. Every rank of `group`, which
    shares the layers, must call it. `slices`: parameters by `id`.
    """
    params = [param for each in optimizer.param_groups for param in each["params"] if param.grad is not None]
    if not params:
        return
    gradients = [param.grad for param in params]
    norms = list(zip(params, torch._foreach_norm(gradients), strict=True))
    of_slices, of_wholes = (
        torch.stack([torch.zeros_like(norms[0][1]), *some]).double().square().sum()
        for some in (
            [norm for param, norm in norms if id(param) in slices],
            [norm for param, norm in norms if id(param) not in slices],
        )
    )
    dist.all_reduce(of_slices, group=group)
    norm = (of_wholes + of_slices).sqrt().float()
    torch._foreach_mul_(gradients, torch.clamp(clip_val / (norm + 1e-6), max=1.0))
