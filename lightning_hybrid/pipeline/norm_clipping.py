"""Clipping of gradients by the norm over all stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def clip_as_user(module: Any, hook: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Call the module's own `configure_gradient_clipping`, `hook`.

    Raises:
        RuntimeError: it changed gradients by other means than `self.clip_gradients`.
    """
    clip, known = module.clip_gradients, _versions(optimizer)

    def clip_by_lightning(*args: Any, **kwargs: Any) -> None:
        nonlocal known
        is_known = known == _versions(optimizer)
        clip(*args, **kwargs)
        known = _versions(optimizer) if is_known else known

    module.__dict__["clip_gradients"] = clip_by_lightning
    try:
        hook(optimizer, *args, **kwargs)
    finally:
        del module.__dict__["clip_gradients"]
    if known != _versions(optimizer):
        raise RuntimeError(
            "`configure_gradient_clipping` changed gradients by other means than `self.clip_gradients`: a rank has "
            "those of its own stages, so their norm is not the network's. Call `self.clip_gradients(optimizer, "
            "gradient_clip_val=..., gradient_clip_algorithm=...)`, which clips by the norm over all stages."
        )


def _versions(optimizer: Optimizer) -> list[Any]:
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]
