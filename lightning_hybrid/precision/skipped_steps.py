"""Loss scale and skipped-step counters of each optimizer.

The counters are on the device. The host reads them at a logged step, at a checkpoint and at the end of training.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.optimizer_protocol import parameters_of

# A dynamic scale reaches its minimum after 16 halvings from 2**16, and after 24 from its maximum 2**24. So an overflow
# that lasts for 40 steps in a row comes from non-finite numbers that no scale can prevent.
MAX_SKIPPED_STEPS_IN_A_ROW = 40


class EndlessOverflowError(RuntimeError):
    """Error raised when gradients overflow in so many consecutive steps that no loss scale can help."""


class SkipFlag:
    """Asynchronous flag that shows whether an optimizer step was skipped.

    On CUDA the flag is copied to pinned memory after the work of the step, and an event marks the end of the copy.

    Args:
        found_inf: 0-dim tensor that is above 0 if the step was skipped, or a bool if the host knows the flag.
    """

    def __init__(self, found_inf: Tensor | bool) -> None:
        self._answer: Tensor | bool = found_inf
        self._arrival: torch.cuda.Event | None = None
        if isinstance(found_inf, Tensor) and found_inf.is_cuda:
            # The device is explicit, because with `torch.set_default_device("cuda")` the tensor could not be pinned.
            self._answer = torch.empty((), dtype=found_inf.dtype, device="cpu", pin_memory=True)
            self._answer.copy_(found_inf, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    @property
    def is_known(self) -> bool:
        """True if the value of the flag is already on the host.

        Then `was_skipped` does not read a tensor.
        """
        return isinstance(self._answer, bool)

    def was_skipped(self) -> bool:
        """Wait for the optimizer step on the device, and return whether it was skipped.

        This does not wait for work that was queued after the step.
        """
        if self._arrival is not None:
            self._arrival.synchronize()
        if isinstance(self._answer, Tensor):
            self._answer = bool(self._answer > 0)
        return self._answer


@dataclass(eq=False)
class OptimizerStepState:
    """Loss scale and skipped-step counters of one optimizer.

    Attributes:
        loss_scale: Loss scale for the next backward. None with bf16.
        optimizer: Optimizer. None: it is not known yet.
        grad_scale: Loss scale that the gradients of the next step contain.
        skip_flag: Flag of the last step. None: that step was not skipped.
        num_skipped: Number of skipped steps.
        num_in_a_row: Number of consecutive skipped steps, up to and including the last step.
    """

    loss_scale: LossScale | None
    optimizer: Optimizer | None = None
    grad_scale: Tensor | None = None
    skip_flag: SkipFlag | None = None
    num_skipped: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    num_in_a_row: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def to(self, device: torch.device) -> None:
        """Move the loss scale and the counters to a device."""
        self.num_skipped = self.num_skipped.to(device)
        self.num_in_a_row = self.num_in_a_row.to(device)
        if self.loss_scale is not None:
            self.loss_scale.to(device)

    def count(self, found_inf: Tensor, largest: Tensor | None = None) -> None:
        """Count a step as skipped or not, and update the loss scale, without waiting for the device.

        Args:
            found_inf: 0-dim tensor that is above 0 if the step was skipped.
            largest: Largest magnitude of an unscaled gradient. None: unknown.

        >>> state = OptimizerStepState(loss_scale=None)
        >>> for overflow in (1.0, 0.0, 1.0, 1.0): state.count(torch.tensor(overflow))
        >>> state.num_skipped, state.num_in_a_row
        (tensor(3), tensor(2))
        """
        skipped = found_inf > 0
        if self.loss_scale is not None:
            self.loss_scale.update(skipped, largest)
        self.num_skipped.add_(skipped)
        # Multiplying by 0 after a clean step needs no branch on the host. Few operations are used, because each one is
        # a launch on the device.
        self.num_in_a_row.add_(1).mul_(skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, so that a checkpoint loads with `weights_only=True`.

        This waits for the device.
        """
        loss_scale: dict[str, Any] = {}
        if self.loss_scale is not None:
            loss_scale = self.loss_scale.state_dict()
        return {
            "loss_scale": loss_scale,
            "num_skipped_steps": int(self.num_skipped),
            "num_skipped_in_a_row": int(self.num_in_a_row),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.num_skipped = torch.full_like(self.num_skipped, int(state["num_skipped_steps"]))
        self.num_in_a_row = torch.full_like(self.num_in_a_row, int(state["num_skipped_in_a_row"]))


class OptimizerStepStates(list[OptimizerStepState]):
    """Loss scales and skipped-step counters of all optimizers, in the order of the trainer.

    Args:
        loss_scale: Loss scale of the first optimizer. Other optimizers get copies of it.
    """

    def __init__(self, loss_scale: LossScale | None) -> None:
        super().__init__([OptimizerStepState(loss_scale=loss_scale)])
        self._device = torch.device("cpu")
        self._followed: list[Optimizer] = []

    def to(self, device: torch.device) -> None:
        """Move the states of all optimizers to a device."""
        self._device = device
        for state in self:
            state.to(device)

    def of(self, optimizer: Optimizer) -> OptimizerStepState:
        """Return the state of an optimizer, assigning one if it has none yet.

        This is the first state without an optimizer, or a new state.
        """
        for state in self:
            if state.optimizer is optimizer:
                return state
        for state in self:
            if state.optimizer is None:
                state.optimizer = optimizer
                return state
        # The scale is a copy, because each optimizer's scale follows its own overflows.
        loss_scale = copy.deepcopy(self[0].loss_scale)
        new_state = OptimizerStepState(loss_scale=loss_scale, optimizer=optimizer)
        new_state.to(self._device)
        self.append(new_state)
        return new_state

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Assign the states to a trainer's current optimizers.

        An optimizer that replaces another one gets its state.
        """
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
        # The scale of a removed optimizer must not hold down the scales of the other ones.
        current_states = [state for state in self if state.optimizer is not None]
        self[:] = current_states or self[:1]

    def forget(self, parameters: Container[int]) -> None:
        """Remove the states of optimizers whose parameters have all been deleted.

        Their scales must not hold down the scales of other optimizers.

        Args:
            parameters: `id`s of the parameters that no longer exist.
        """
        current = []
        for state in self:
            ids = [id(parameter) for parameter in parameters_of(state.optimizer)]
            if not ids or not all(key in parameters for key in ids):
                current.append(state)
        if not current:
            # The next optimizer begins with the last scale, as a further optimizer does.
            current.append(OptimizerStepState(loss_scale=self[0].loss_scale))
            current[0].to(self._device)
        self[:] = current

    def skip_flags_of(self, optimizer: Optimizer | None) -> list[SkipFlag]:
        """Return the skip flags of the last step of one optimizer, or of all optimizers if it is None."""
        states: list[OptimizerStepState] = self
        if optimizer is not None:
            states = [self.of(optimizer)]
        return [state.skip_flag for state in states if state.skip_flag is not None]

    def parameters_by_optimizer(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return a list of each optimizer's parameters, followed by a list of all other parameters.

        A parameter of several optimizers is only in the list of the first one.
        """
        parameter_lists: list[list[Tensor]] = []
        listed: set[int] = set()
        for group in [*(parameters_of(state.optimizer) for state in self), parameters]:
            unlisted = [parameter for parameter in group if id(parameter) not in listed]
            listed.update(map(id, unlisted))
            parameter_lists.append(unlisted)
        return parameter_lists

    @torch.no_grad()
    def scale_for_backward(self) -> Tensor:
        """Set and return a common loss scale for all optimizers that a backward pass can reach.

        The common scale is the smallest scale of these optimizers.
        """
        # A backward has one loss and therefore one scale, which is a factor of all gradients that it computes.
        reached = list(self)
        if len(reached) > 1:
            reached = [state for state in self if _is_trained(state)] or list(self)
        loss_scales = [state.loss_scale for state in reached if state.loss_scale is not None]
        if len(loss_scales) == 1:
            scale = loss_scales[0].scale
        else:
            scale = torch.stack([loss_scale.scale for loss_scale in loss_scales]).amin()
        for state, loss_scale in zip(reached, loss_scales, strict=True):
            loss_scale.scale = scale
            state.grad_scale = scale
        return scale

    def release(self) -> None:
        """Drop the references to optimizers and skip flags, without changing loss scales and counters."""
        for state in self:
            state.optimizer = None
            state.skip_flag = None
            state.grad_scale = None
        self._followed = []

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers as plain numbers, for a checkpoint.

        The state of the first optimizer is at the top level, and the other states are under an additional key.
        """
        first, *further = (state.state_dict() for state in self)
        if further:
            first["other_optimizers"] = further
        return first

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of all optimizers that exist both in the checkpoint and in this run."""
        saved_states = [state, *state.get("other_optimizers", ())]
        for step_state, saved_state in zip(self, saved_states, strict=False):
            step_state.load_state_dict(saved_state)


def _is_trained(state: OptimizerStepState) -> bool:
    """Return whether any parameter of the state's optimizer requires a gradient."""
    return any(parameter.requires_grad for parameter in parameters_of(state.optimizer))


def raise_if_stuck(
    state: OptimizerStepState,
    model: nn.Module,
    last_loss: Tensor | None,
    *,
    gradient_of: Callable[[Tensor], Tensor | None],
    step: str,
) -> None:
    """Raise `EndlessOverflowError` if an optimizer has skipped too many steps in a row.

    This waits for the device.

    Args:
        state: State of the optimizer.
        model: Model, which has the names of the parameters.
        last_loss: Loss of the last backward.
        gradient_of: Function that returns the last gradient of a parameter.
        step: Description of the last step.

    Raises:
        EndlessOverflowError: The last `MAX_SKIPPED_STEPS_IN_A_ROW` steps of the optimizer were all skipped. The message
            names a probable cause. The callback `NumericsMonitor` also finds layer, batch and rank.
    """
    if (
        state.loss_scale is None
        or last_loss is None
        or int(state.num_in_a_row) < MAX_SKIPPED_STEPS_IN_A_ROW
    ):
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    non_finite = []
    for parameter in parameters_of(state.optimizer):
        gradient = gradient_of(parameter)
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            non_finite.append(names.get(id(parameter), "?"))
    loss = float(last_loss.float().sum())
    if torch.isfinite(last_loss).all():
        cause = (
            "The loss itself is finite, so the gradients overflow in backward. Look for a division by zero, a log or "
            "square root at 0, or fp16 activations above 65504 in these layers."
        )
    else:
        cause = (
            "The loss itself is not finite. Check the learning rate and the data of this step, and look for a log of 0 "
            "or a division by 0 in the loss."
        )
    raise EndlessOverflowError(
        f"Gradients were inf or nan for {int(state.num_in_a_row)} consecutive steps, up to {step}. The loss scale is "
        f"{state.loss_scale.value:g}, but no scale can prevent this. Last loss: {loss:g}. First parameters with "
        f"non-finite gradients: {', '.join(non_finite[:3])} ({len(non_finite)} in all). {cause} The weights have not "
        "changed since the last step without overflow. Fix the cause, and resume from the last checkpoint."
    )
