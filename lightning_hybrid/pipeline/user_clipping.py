"""Clipping of gradients by the module's own hook, in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid.precision.optimizer_protocol import parameters_of, temporary_attributes


def clip_as_user(
    module: Any, hook: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
) -> None:
    """Call the module's own `configure_gradient_clipping`, `hook`.

    Raises:
        RuntimeError: it changed gradients by other means than `self.clip_gradients`.
    """
    clip = module.clip_gradients
    known = _versions(optimizer)

    def clip_by_lightning(*args: Any, **kwargs: Any) -> None:
        nonlocal known
        is_known = known == _versions(optimizer)
        clip(*args, **kwargs)
        known = _versions(optimizer) if is_known else known

    with temporary_attributes(module, clip_gradients=clip_by_lightning):
        hook(optimizer, *args, **kwargs)
    if known != _versions(optimizer):
        raise RuntimeError(
            "`configure_gradient_clipping` changed gradients by other means than `self.clip_gradients`: a rank has "
            "those of its own stages, so their norm is not the network's. Call `self.clip_gradients(optimizer, "
            "gradient_clip_val=..., gradient_clip_algorithm=...)`, which clips by the norm over all stages."
        )


def _versions(optimizer: Optimizer) -> list[Any]:
    gradients = [parameter.grad for parameter in parameters_of(optimizer)]
    return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]
