"""Detection of optimizer features that the precision plugin relies on.

An optimizer declares features through attributes, so that they do not depend on its type:

    _step_supports_amp_scaling    torch's protocol: the step reads `grad_scale` and `found_inf` on the device
    last_found_inf                the step accepts scaled half-precision gradients, and checks them for inf and nan
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer


def takes_scaled_gradients(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether an optimizer unscales half-precision gradients and skips overflowed steps by itself."""
    return hasattr(optimizer, "last_found_inf") and supports_device_skip(optimizer, device)


def supports_device_skip(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether an optimizer can skip a step on the device, depending on `optimizer.found_inf`.

    In this case, the host need not wait for the device.
    """
    # torch's fused SGD omits dampening in its first step only. If that step is skipped, no later step omits it.
    if isinstance(optimizer, SGD) and any(
        group["momentum"] and group["dampening"] for group in optimizer.param_groups
    ):
        return False
    # If the host does not know whether to skip, an eager step needs additional memory for every new value. On a CPU
    # this takes 39 ms instead of 24 ms for LARS with 8 million parameters. There the host can read the flag without
    # a wait, so it does.
    is_declared = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return is_declared or (hasattr(optimizer, "last_found_inf") and device.type != "cpu")


def evaluates_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may call the closure in the middle of its step to evaluate the loss.

    torch's optimizers other than LBFGS do not, and neither do optimizers that declare a feature of this module. They
    call the closure once at the beginning of a step.
    """
    if isinstance(optimizer, LBFGS):
        return True
    is_of_torch = type(optimizer).__module__.startswith("torch.")
    is_declared = hasattr(optimizer, "last_found_inf") or getattr(
        optimizer, "_step_supports_amp_scaling", False
    )
    return not is_of_torch and not is_declared


def prepare_to_skip_(optimizer: Optimizer) -> None:
    """Initialize the momentum buffers of torch's SGD with zeros, in case its first step is skipped."""
    # If its first step is skipped, fused SGD leaves the buffers uninitialized (torch 2.11 to 2.13). With zeros, the
    # first step computes `momentum * 0 + gradient`.
    if isinstance(optimizer, SGD):
        for group in optimizer.param_groups:
            if not group["momentum"]:
                continue
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)


def optimizers_within(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and all optimizers that it wraps, such as the base optimizer of Lookahead."""
    optimizers = [optimizer]
    for outer in optimizers:
        for value in vars(outer).values():
            if isinstance(value, Optimizer) and value not in optimizers:
                optimizers.append(value)
    return optimizers


def parameters_of(optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Yield all parameters of an optimizer in the order of its parameter groups.

    Nothing is yielded for None.
    """
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def temporary_attributes(owner: object, **attributes: Any) -> Iterator[None]:
    """Temporarily set attributes of an object.

    `torch.amp.GradScaler` sets attributes of an optimizer in the same way for a step.
    """
    before = {name: value for name, value in vars(owner).items() if name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            delattr(owner, name)
        vars(owner).update(before)


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of `Optimizer.step`, or None if there is no closure.

    The first positional argument is the optimizer.
    """
    closure = kwargs.get("closure")
    if closure is None and len(args) > 1:
        closure = args[1]
    if callable(closure):
        return closure
    return None
