"""The state of each optimizer's steps: loss scale, whether the last step was skipped, how many were skipped.

All of it lives on the device. The host learns of it where it asks: at a logged step, at a checkpoint, at the end.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.optimizer_protocol import parameters_of

# From 2**16 a dynamic scale reaches its floor after 16 halvings, from its ceiling 2**24 after 24. Overflow
# that still lasts after 40 steps in a row comes from non-finite numbers that no scale can cure.
MAX_SKIPPED_STEPS_IN_A_ROW = 40


class EndlessOverflowError(RuntimeError):
    """Overflow in every step that no loss scale can cure."""


class SkipFlag:
    """The flag whether one step was skipped, on its way from the device to the host.

    On CUDA the answer is copied to pinned memory behind the step's own work, and an event tells when it is there.

    Args:
        found_inf: 0-dim tensor, more than 0 if the step was skipped; or a bool, if the host knows already.
    """

    def __init__(self, found_inf: Tensor | bool) -> None:
        self._answer: Tensor | bool = found_inf
        self._arrival: torch.cuda.Event | None = None
        if isinstance(found_inf, Tensor) and found_inf.is_cuda:
            # The device is named, as `torch.set_default_device("cuda")` would make it a tensor that cannot be pinned.
            self._answer = torch.empty((), dtype=found_inf.dtype, device="cpu", pin_memory=True)
            self._answer.copy_(found_inf, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    @property
    def is_known(self) -> bool:
        """Whether the host knows, so that `was_skipped` reads nothing."""
        return isinstance(self._answer, bool)

    def was_skipped(self) -> bool:
        """Return the flag. Wait for this step, not for what was queued after it."""
        if self._arrival is not None:
            self._arrival.synchronize()
        if isinstance(self._answer, Tensor):
            self._answer = bool(self._answer > 0)
        return self._answer


@dataclass(eq=False)
class OptimizerStepState:
    """One optimizer's loss scale and counters."""

    loss_scale: LossScale | None  # of the next backward; None with bf16
    optimizer: Optimizer | None = None
    grad_scale: Tensor | None = (
        None  # what the gradients waiting for the next step were multiplied by
    )
    skip_flag: SkipFlag | None = None  # of the last step; None: it was not skipped
    num_skipped: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    num_in_a_row: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def to(self, device: torch.device) -> None:
        """Move scale and counters to `device`."""
        self.num_skipped = self.num_skipped.to(device)
        self.num_in_a_row = self.num_in_a_row.to(device)
        if self.loss_scale is not None:
            self.loss_scale.to(device)

    def count(self, found_inf: Tensor, largest: Tensor | None = None) -> None:
        """Count one step, on the device, in few operations: each of one element is a launch there.

        `largest`: as in `LossScale.update`.

        >>> state = OptimizerStepState(loss_scale=None)
        >>> for overflow in (1.0, 0.0, 1.0, 1.0): state.count(torch.tensor(overflow))
        >>> state.num_skipped, state.num_in_a_row
        (tensor(3), tensor(2))
        """
        skipped = found_inf > 0
        if self.loss_scale is not None:
            self.loss_scale.update(skipped, largest)
        self.num_skipped.add_(skipped)
        # A clean step multiplies by 0: no branch on the host.
        self.num_in_a_row.add_(1).mul_(skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, so that a checkpoint loads with `weights_only=True`. Wait for the device."""
        return {
            "loss_scale": {} if self.loss_scale is None else self.loss_scale.state_dict(),
            "num_skipped_steps": int(self.num_skipped),
            "num_skipped_in_a_row": int(self.num_in_a_row),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.num_skipped = torch.full_like(self.num_skipped, int(state["num_skipped_steps"]))
        self.num_in_a_row = torch.full_like(self.num_in_a_row, int(state["num_skipped_in_a_row"]))


class OptimizerStepStates(list[OptimizerStepState]):
    """The states of all optimizers, in the trainer's order; further loss scales are copies of the first's."""

    def __init__(self, loss_scale: LossScale | None) -> None:
        super().__init__([OptimizerStepState(loss_scale=loss_scale)])
        self._device = torch.device("cpu")
        self._followed: list[Optimizer] = []

    def to(self, device: torch.device) -> None:
        """Move all to `device`."""
        self._device = device
        for state in self:
            state.to(device)

    def of(self, optimizer: Optimizer) -> OptimizerStepState:
        """Return the state of `optimizer`: its own, or the first without an optimizer, or a new one."""
        for state in self:
            if state.optimizer is optimizer:
                return state
        for state in self:
            if state.optimizer is None:
                state.optimizer = optimizer
                return state
        # A copy: each optimizer's scale follows its own overflows.
        new = OptimizerStepState(loss_scale=copy.deepcopy(self[0].loss_scale), optimizer=optimizer)
        new.to(self._device)
        self.append(new)
        return new

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the states be those of a trainer's optimizers. One that replaces another takes over its state."""
        current = list(optimizers)
        is_same = len(current) == len(self._followed) and all(
            map(operator.is_, current, self._followed)
        )
        if is_same:
            return
        for state in self:
            was_followed = any(state.optimizer is optimizer for optimizer in self._followed)
            if was_followed and not any(state.optimizer is optimizer for optimizer in current):
                state.optimizer = None
                state.grad_scale = None
                state.skip_flag = None
        self._followed = current
        for optimizer in current:
            self.of(optimizer)
        # The scale of an optimizer that is gone must not hold down those of the others.
        self[:] = [state for state in self if state.optimizer is not None] or self[:1]

    def skip_flags_of(self, optimizer: Optimizer | None) -> list[SkipFlag]:
        """Return the flags of the last step of `optimizer`, or of every optimizer for None, if there are any."""
        states = self if optimizer is None else [self.of(optimizer)]
        return [state.skip_flag for state in states if state.skip_flag is not None]

    def parameters_by_optimizer(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return the parameters of each optimizer, and last those of `parameters` that no optimizer has."""
        found = [list(parameters_of(state.optimizer)) for state in self]
        known = {id(parameter) for group in found for parameter in group}
        return [*found, [parameter for parameter in parameters if id(parameter) not in known]]

    @torch.no_grad()
    def scale_for_backward(self) -> Tensor:
        """Return the smallest scale of the optimizers that a backward can reach, and give it to all of them."""
        # One backward has one loss, so one scale: gradients of all that it reaches are multiplied by the same number.
        reached = list(self)
        if len(reached) > 1:
            reached = [
                one for one in self if any(p.requires_grad for p in parameters_of(one.optimizer))
            ] or reached
        scales = [state.loss_scale for state in reached if state.loss_scale is not None]
        scale = (
            scales[0].scale
            if len(scales) == 1
            else torch.stack([one.scale for one in scales]).amin()
        )
        for state, loss_scale in zip(reached, scales, strict=True):
            loss_scale.scale = state.grad_scale = scale
        return scale

    def release(self) -> None:
        """Forget the optimizers and their last step, but keep scales and counters."""
        for state in self:
            state.optimizer = None
            state.skip_flag = None
            state.grad_scale = None
        self._followed = []

    def state_dict(self) -> dict[str, Any]:
        """Return the first optimizer's state, with those of the others under one more key."""
        first, *others = (state.state_dict() for state in self)
        return {**first, "other_optimizers": others} if others else first

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore as many optimizers as there are in both."""
        for one, own in zip(self, [state, *state.get("other_optimizers", ())], strict=False):
            one.load_state_dict(own)


def raise_if_stuck(
    state: OptimizerStepState,
    model: nn.Module,
    last_loss: Tensor | None,
    *,
    gradient_of: Callable[[Tensor], Tensor | None],
    step: str,
) -> None:
    """End a run whose overflows no scale seems to cure. Wait for the device.

    Args:
        state: of the optimizer.
        model: has the names of parameters.
        last_loss: of the last backward.
        gradient_of: returns the last gradient of a parameter.
        step: the last step, in words.

    Raises:
        EndlessOverflowError: the optimizer's last 40 steps or more were all skipped; with the cause as far as one can
            see it here. The callback `NumericsMonitor` adds layer, batch and rank.
    """
    if (
        state.loss_scale is None
        or last_loss is None
        or int(state.num_in_a_row) < MAX_SKIPPED_STEPS_IN_A_ROW
    ):
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    bad = []
    for parameter in parameters_of(state.optimizer):
        gradient = gradient_of(parameter)
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            bad.append(names.get(id(parameter), "?"))
    loss = float(last_loss.float().sum())
    finite = torch.isfinite(last_loss).all()
    cause = (
        "The loss itself is finite, so the gradients overflow in backward: look for a division by zero, a log or "
        "square root at 0, or fp16 activations above 65504 in the layers named."
        if finite
        else "The loss itself is not finite: look at the learning rate, at the data of this step, and for a log or "
        "division of 0 in the loss."
    )
    raise EndlessOverflowError(
        f"Gradients were inf or nan for {int(state.num_in_a_row)} steps in a row, up to {step}; the "
        f"loss scale is {state.loss_scale.value:g} and no scale can cure this. "
        f"Last loss: {loss:g}. First parameters with non-finite gradients: {', '.join(bad[:3])} "
        f"({len(bad)} in all). {cause} The weights are those of the last good step; resume from the last "
        "checkpoint after the cure."
    )
