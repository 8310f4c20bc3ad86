"""One step of an optimizer on the fp32 masters, and their rounded copies after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.lightning_names import misconfiguration
from lightning_hybrid.precision.master_weights import MasterPair, MasterWeights, copy_to_low_
from lightning_hybrid.precision.optimizer_protocol import (
    parameters_of,
    prepare_to_skip_,
    supports_device_skip,
    temporary_attributes,
)
from lightning_hybrid.precision.skipped_steps import OptimizerStepState, SkipFlag


class MasterStep:
    """Steps of optimizers on the fp32 masters; `is_running` while one is under way."""

    def __init__(self, masters: MasterWeights, device: torch.device) -> None:
        self._masters = masters
        self._device = device
        self.is_running = False

    def in_one_pass(self, optimizer: Optimizer, state: OptimizerStepState, **kwargs: Any) -> Tensor | None:
        """Step on scaled half gradients: the optimizer unscales, checks, updates and writes the half copies itself.

        Return 1.0 if a gradient was inf or nan, else 0.0; None without a loss scale.
        """
        with self.on_masters(optimizer) as pairs:
            copies = {pair.master: pair.part_of(pair.low) for pair in pairs}
            with temporary_attributes(optimizer, grad_scale=state.grad_scale, found_inf=None, copies=copies):
                optimizer.step(**kwargs)
        if state.loss_scale is None:
            return None
        # No gradient at all leaves it None; the step then counts as a clean one.
        found_inf = getattr(optimizer, "last_found_inf", None)
        return torch.zeros((), device=self._device) if found_inf is None else found_inf

    def from_unscaled(
        self, optimizer: Optimizer, state: OptimizerStepState, found_inf: Tensor | None, **kwargs: Any
    ) -> None:
        """Step with unscaled gradients; skip where `found_inf` is 1.

        Raises:
            MisconfigurationException: the optimizer wrote the half-precision parameters.
        """
        by_itself = found_inf is not None and supports_device_skip(optimizer, self._device)
        # An optimizer that cannot skip by itself makes the host wait for the device here, once per step.
        if found_inf is not None and not by_itself:
            state.skip_flag = SkipFlag(bool(found_inf))
            if state.skip_flag.was_skipped():
                return
        with self.on_masters(optimizer) as pairs:
            versions = [pair.low._version for pair in pairs]
            if by_itself:
                prepare_to_skip_(optimizer)
                with temporary_attributes(optimizer, grad_scale=None, found_inf=found_inf):
                    optimizer.step(**kwargs)
            else:
                optimizer.step(**kwargs)
            # The masters stood in: an optimizer that wrote the half tensors has references of its own to them.
            if versions != [pair.low._version for pair in pairs]:
                raise misconfiguration(
                    f"`optimizer` (={type(optimizer).__name__}) must take its parameters from `param_groups` in "
                    "`step`: it keeps references of its own to them, wrote the half-precision ones, and left the fp32 "
                    "masters where they were. Use precision='32-true' or '16-mixed' with it."
                )
            copy_to_low_(pairs)

    @contextmanager
    def on_masters(self, optimizer: Optimizer) -> Iterator[list[MasterPair]]:
        """Put the masters, up to date, into the optimizer with the gradients of their low tensors, for one step."""
        pairs = self._masters.of(optimizer)
        for pair in pairs:
            # First: an EMA, a clamp or a pruning may have written the low tensor since the last step.
            pair.absorb_outside_writes_()
            pair.master.grad = None if pair.low.grad is None else pair.part_of(pair.low.grad)
            pair.master.requires_grad_(pair.low.requires_grad)
        self.is_running = True
        try:
            # A manual loop steps inside of `training_step`, and so of its autocast.
            with self._masters.swapped_in(optimizer), torch.autocast(self._device.type, enabled=False):
                yield pairs
            for pair in pairs:
                pair.mark_clean()
            if self._masters.gather_ is not None:  # last: to look at a weight would wait for it
                self._masters.gather_(pairs, [pair.low for pair in pairs])
        finally:
            self.is_running = False
            # The low tensor has the gradient: a second reference would keep its memory beyond `zero_grad`.
            for pair in pairs:
                pair.master.grad = None

    @contextmanager
    def called_by_user(self, optimizer: Optimizer, *, is_skipped: bool) -> Iterator[None]:
        """Let a `step` that user code calls run on the masters; on no gradient, where it is to be skipped."""
        with self.on_masters(optimizer) as pairs:
            for parameter in parameters_of(optimizer) if is_skipped else ():
                parameter.grad = None
            yield
            copy_to_low_(pairs)
