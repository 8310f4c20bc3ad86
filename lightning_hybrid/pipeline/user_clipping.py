"""Gradient clipping by the module's own `configure_gradient_clipping` in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.comm.health.tensor_hash import Fingerprint
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
    gradients = _GradientContents(optimizer)

    def clip_and_note_contents(*args: Any, **kwargs: Any) -> None:
        is_unchanged = not gradients.have_changed()
        clip_gradients(*args, **kwargs)
        if is_unchanged:
            gradients.note()

    with temporary_attributes(module, clip_gradients=clip_and_note_contents):
        hook(optimizer, *args, **kwargs)
    if gradients.have_changed():
        raise RuntimeError(
            "`configure_gradient_clipping` must clip with `self.clip_gradients`, because each rank has only the "
            "gradients of its own stages, whose norm is not the norm of the whole network. Call "
            "`self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm=...)`, which clips by the "
            "norm over all stages."
        )


class _GradientContents:
    """Record of the contents of an optimizer's gradients, which detects later changes.

    Contents are compared by fingerprints, because torch's version counters miss writes through `gradient.data`. The
    host waits for the device.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._parameters = list(parameters_of(optimizer))
        self._recorded = self._fingerprints()

    def note(self) -> None:
        """Record the current contents."""
        self._recorded = self._fingerprints()

    def have_changed(self) -> bool:
        """Return whether the contents differ from the recorded ones."""
        return self._fingerprints() != self._recorded

    def _fingerprints(self) -> list[int | None]:
        gradients = [parameter.grad for parameter in self._parameters]
        present: list[Tensor] = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return [None] * len(gradients)
        device = present[0].device
        fingerprint_of = Fingerprint(device).of
        on_device = [fingerprint_of(gradient).to(device) for gradient in present]
        values = iter(torch.stack(on_device).tolist())  # a single wait for the device
        return [None if gradient is None else next(values) for gradient in gradients]
