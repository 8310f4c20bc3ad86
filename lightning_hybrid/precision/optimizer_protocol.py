"""Abilities of an optimizer that the precision plugin uses.

Attributes decide, never the type, so that any optimizer may join:

    _step_supports_amp_scaling    torch's protocol: the step reads `grad_scale` and `found_inf` on the device
    last_found_inf                the step takes half-precision gradients and their scale, and finds inf and nan itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer


def takes_scaled_gradients(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether `step` takes scaled half-precision gradients and skips by itself."""
    return hasattr(optimizer, "last_found_inf") and supports_device_skip(optimizer, device)


def supports_device_skip(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether `step` changes nothing if `optimizer.found_inf` is 1, without a read by the host."""
    # Only the first step of torch's fused SGD leaves dampening out, and where that is skipped no later one does.
    if isinstance(optimizer, SGD) and any(
        group["momentum"] and group["dampening"] for group in optimizer.param_groups
    ):
        return False
    # An eager step without the answer needs a second place for every new value until it is known to be wanted: on a CPU
    # 39 ms instead of 24 for LARS on 8 million parameters. There the answer is free, so the host asks.
    is_declared = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return is_declared or (hasattr(optimizer, "last_found_inf") and device.type != "cpu")


def evaluates_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` needs the closure, because the optimizer may evaluate the loss at other weights.

    torch's own optimizers, except LBFGS, and those that declare an ability above call it once, before anything else.
    """
    if isinstance(optimizer, LBFGS):
        return True
    is_of_torch = type(optimizer).__module__.startswith("torch.")
    is_declared = hasattr(optimizer, "last_found_inf") or getattr(
        optimizer, "_step_supports_amp_scaling", False
    )
    return not is_of_torch and not is_declared


def prepare_to_skip_(optimizer: Optimizer) -> None:
    """Make momentum zero before the first step of torch's fused SGD."""
    # If skipped, that step leaves it uninitialised (torch 2.11 to 2.13). SGD starts with `momentum * 0 + gradient`.
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
    """Return `optimizer` and those that it wraps, such as Lookahead's or SAM's base optimizer."""
    optimizers = [optimizer]
    for outer in optimizers:
        for value in vars(outer).values():
            if isinstance(value, Optimizer) and value not in optimizers:
                optimizers.append(value)
    return optimizers


def parameters_of(optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Yield the parameters in the groups of `optimizer`, in order, or none for None."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def temporary_attributes(owner: object, **attributes: Any) -> Iterator[None]:
    """Set attributes of an optimizer or a module for a while, as `torch.amp.GradScaler` does for a step."""
    before = {name: value for name, value in vars(owner).items() if name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            delattr(owner, name)
        vars(owner).update(before)


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of `Optimizer.step`, of which the first is the optimizer."""
    closure = kwargs.get("closure")
    if closure is None and len(args) > 1:
        closure = args[1]
    if callable(closure):
        return closure
    return None
