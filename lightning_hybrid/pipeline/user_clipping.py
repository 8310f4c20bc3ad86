"""Gradient clipping by the module's own `configure_gradient_clipping` in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid.precision.optimizer_protocol import parameters_of, temporary_attributes


def clip_as_user(
    module: Any, hook: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
) -> None:
    """Call the module's own `configure_gradient_clipping`, and check that it clips only with `self.clip_gradients`.

    Args:
        module: The LightningModule.
        hook: Its `configure_gradient_clipping`.
        optimizer: The optimizer whose gradients are clipped.
        *args: Further positional arguments of the hook.
        **kwargs: Keyword arguments of the hook.

    Raises:
        RuntimeError: The hook changed gradients by other means than `self.clip_gradients`.
    """
    clip_gradients = module.clip_gradients
    versions = _gradient_versions(optimizer)

    def clip_and_note_versions(*args: Any, **kwargs: Any) -> None:
        nonlocal versions
        is_unchanged = versions == _gradient_versions(optimizer)
        clip_gradients(*args, **kwargs)
        if is_unchanged:
            versions = _gradient_versions(optimizer)

    with temporary_attributes(module, clip_gradients=clip_and_note_versions):
        hook(optimizer, *args, **kwargs)
    if versions != _gradient_versions(optimizer):
        raise RuntimeError(
            "`configure_gradient_clipping` must clip with `self.clip_gradients`, because each rank has only the "
            "gradients of its own stages, whose norm is not the norm of the whole network. Call "
            "`self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm=...)`, which clips by the "
            "norm over all stages."
        )


def _gradient_versions(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Return the identity and version counter of each gradient, without reading its values."""
    gradients = [parameter.grad for parameter in parameters_of(optimizer)]
    return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]
