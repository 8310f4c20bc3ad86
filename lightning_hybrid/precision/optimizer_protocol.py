"""What the precision plugin asks of an optimizer: what it can do itself, what it wraps, and steps that users make.

An optimizer may skip a step by itself, or do all of unscale, check, update and half copy. Attributes decide, never the
type, so that any optimizer may join:

    _step_supports_amp_scaling    torch's protocol: the step reads `grad_scale` and `found_inf` on the device
    copies, last_found_inf        the step takes half gradients and their scale, finds inf and nan by itself, and writes
                                  the half-precision copies of the parameters
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from lightning_hybrid.lightning_names import is_overridden, misconfiguration

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def supports_fused_master_step(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether `step` takes scaled half gradients, skips by itself and writes the half-precision copies."""
    takes_both = hasattr(optimizer, "copies") and hasattr(optimizer, "last_found_inf")
    return takes_both and supports_device_skip(optimizer, device)


def supports_device_skip(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether `step` can leave everything as it is where `optimizer.found_inf` is 1, without asking the host."""
    # Only the first step of torch's fused SGD leaves dampening out, and where that is skipped no later one does.
    if isinstance(optimizer, SGD) and any(group["momentum"] and group["dampening"] for group in optimizer.param_groups):
        return False
    # An eager step without the answer needs a second place for every new value until it is known to be wanted: on a CPU
    # 39 ms instead of 24 for LARS on 8 million parameters. There the answer is free, so the host asks.
    is_declared = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return is_declared or (hasattr(optimizer, "last_found_inf") and device.type != "cpu")


def prepare_to_skip_(optimizer: Optimizer) -> None:
    """Make momentum zero before the first step of torch's fused SGD."""
    # If skipped, that step leaves it uninitialised (torch 2.11 to 2.13). SGD starts with `momentum * 0 + gradient`.
    if isinstance(optimizer, SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def grads_are_observed(optimizer: Optimizer, model: LightningModule) -> bool:
    """Return whether clipping, a hook of the module or a callback, or one of the optimizer may read `p.grad`."""
    # They are promised unscaled fp32 gradients. Hooks that run after the step, such as `on_train_batch_end`, are not.
    trainer: Any = model.trainer
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    of_steps = (hook for name in names for hook in getattr(optimizer, name, {}).values())
    if trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", model, "pytorch.LightningModule"):
        return True
    if any(not isinstance(getattr(hook, "__self__", None), DirectSteps) for hook in of_steps):
        return True
    observers = [
        (model, "pytorch.LightningModule"),
        *((one, "pytorch.callbacks.Callback") for one in trainer.callbacks),
    ]
    hooks = ("on_before_optimizer_step", "on_before_zero_grad")
    return any(is_overridden(hook, observer, kind) for observer, kind in observers for hook in hooks)


def optimizers_within(optimizer: Optimizer) -> list[Optimizer]:
    """Return `optimizer` and those that it wraps, such as Lookahead's or SAM's base optimizer."""
    found = [optimizer]
    for one in found:
        found += [value for value in vars(one).values() if isinstance(value, Optimizer) and value not in found]
    return found


def parameters_of(optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Yield the parameters in the groups of `optimizer`, in order; none for None."""
    return (parameter for group in (optimizer.param_groups if optimizer else ()) for parameter in group["params"])


class DirectSteps:
    """Hooks that put the masters in where user code steps a torch optimizer itself, or one that a wrapper holds.

    `step_context`, called with the optimizer that steps, puts the masters in while it is entered; `is_in_step` returns
    whether the step is Lightning's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step_context: Callable[[Optimizer], AbstractContextManager[Any]],
        is_in_step: Callable[[], bool],
    ) -> None:
        self._step_context = step_context
        self._is_in_step = is_in_step
        self._entered: AbstractContextManager[Any] | None = None
        self._handles = []
        for one in optimizers_within(optimizer):
            if hasattr(one, "_optimizer_step_pre_hooks"):  # else its constructor left torch's out
                self._handles += [one.register_step_pre_hook(self._enter), one.register_step_post_hook(self._leave)]

    def _enter(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_in_step():
            return
        if callable(kwargs.get("closure")) or any(callable(one) for one in args[1:]):
            raise misconfiguration(
                f"`closure` of {type(optimizer).__name__}.step must go through Lightning's optimizer with half "
                "precision: gradients have to be unscaled between the closure and the step. Take the optimizer from "
                "`self.optimizers()`, without `use_pl_optimizer=False`."
            )
        self._entered = self._step_context(optimizer)
        self._entered.__enter__()

    def _leave(self, *_: Any) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


@contextmanager
def temporary_attributes(owner: object, **attributes: Any) -> Iterator[None]:
    """Lend an optimizer or a module attributes for a while, as `torch.amp.GradScaler` does for a step."""
    before = {name: value for name, value in vars(owner).items() if name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            delattr(owner, name)
        vars(owner).update(before)


def check_optimizer(optimizer: Optimizer, precision: str) -> None:
    """Check that a step can be skipped, and that the masters can stand in the optimizer.

    Raises:
        MisconfigurationException: the optimizer runs the closure by itself, or shards its parameters.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    owns_closure = closure is not None and closure.default is inspect.Parameter.empty
    if isinstance(optimizer, LBFGS) or owns_closure:
        raise misconfiguration(
            f"`optimizer` (={type(optimizer).__name__}) must not run the closure by itself with "
            f"precision={precision!r}: gradients have to be unscaled and checked between backward and "
            "step, and LBFGS-like optimizers evaluate the loss inside `step`. Use another optimizer, or "
            "precision='32-true'."
        )
    if hasattr(optimizer, "consolidate_state_dict"):
        raise misconfiguration(
            f"`optimizer` (={type(optimizer).__name__}) shards its parameters over ranks and keeps references of its "
            f"own to them, which master weights cannot replace. Use precision='32-true' or an unsharded optimizer."
        )
