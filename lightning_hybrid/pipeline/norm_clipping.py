"""Clipping of gradients by the norm over all stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.optim import Optimizer


def clip_by_norm_over_stages(
    optimizer: Optimizer, clip_val: float, *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Scale the gradients of this rank down where the norm over all stages is above `clip_val`. In place, collective.

        g <- g * min(1, clip_val / (|g| + 1e-6))        |g|: of all gradients, in the order of the parameters

    As `torch.nn.utils.clip_grad_norm_` over the whole network, to the bit: every stage has the norm of each parameter
    in its place, and zeros elsewhere, to which adding is exact. `device`: of this rank, also where it has no gradient.
    """
    parameters = [parameter for group_ in optimizer.param_groups for parameter in group_["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = iter(torch._foreach_norm(gradients) if gradients else ())
    both = torch.zeros(2, len(parameters), dtype=torch.float32, device=device)
    norms, has = both.unbind()
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            norms[index], has[index] = next(own), 1.0
    dist.all_reduce(both, group=group)
    if not gradients:
        return
    # Only the parameters that have a gradient anywhere: torch takes no others.
    total = torch.linalg.vector_norm(norms[has > 0])
    coefficient = torch.clamp(clip_val / (total + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, coefficient)
