"""Detection of user code that may read gradients between two backward passes.

Without such code, LARS and LAMB use the scaled half-precision gradients, and no fp32 gradients are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_hybrid.lightning_names import is_overridden

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_MODULE_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_hybrid")


def grads_are_observed(optimizers: Iterable[Optimizer], module: LightningModule) -> bool:
    """Return whether gradient clipping, a hook or a callback may read the gradients."""
    trainer: Any = module.trainer
    if trainer.gradient_clip_val:
        return True
    if any(is_overridden(hook, module, "pytorch.LightningModule") for hook in _MODULE_HOOKS):
        return True
    if any(_observes(callback, trainer) for callback in trainer.callbacks):
        return True
    return any(_has_step_hooks(optimizer) for optimizer in optimizers)


def runs_code_before_backward(module: LightningModule) -> bool:
    """Return whether a user's hook or callback runs between `training_step` and its backward pass."""
    hooks = ("on_before_zero_grad", "on_before_backward")
    module_hooks = (*hooks, "optimizer_zero_grad")
    if any(is_overridden(hook, module, "pytorch.LightningModule") for hook in module_hooks):
        return True
    trainer: Any = module.trainer
    callbacks = trainer.callbacks
    return any(
        is_overridden(hook, callback, "pytorch.callbacks.Callback")
        for callback in callbacks
        for hook in hooks
    )


def _observes(callback: object, trainer: Any) -> bool:
    if any(is_overridden(hook, callback, "pytorch.callbacks.Callback") for hook in _CALLBACK_HOOKS):
        return True
    # Callbacks of this package declare whether they read gradients now, for example at logged steps. Callbacks of
    # Lightning, such as progress bars, use `on_train_batch_end` and do not read gradients there, except
    # `LambdaCallback`, which calls a function of the user.
    reads_gradients: Callable[[Any], bool] | None = getattr(callback, "reads_gradients", None)
    library = type(callback).__module__.partition(".")[0]
    if library == "lightning_hybrid" and reads_gradients is not None:
        return reads_gradients(trainer)
    runs_user_code = library not in _LIBRARIES or type(callback).__name__ == "LambdaCallback"
    return runs_user_code and is_overridden(
        "on_train_batch_end", callback, "pytorch.callbacks.Callback"
    )


def _has_step_hooks(optimizer: Optimizer) -> bool:
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, name, None) for name in names)
