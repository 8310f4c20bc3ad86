"""Warning that `on_train_epoch_start` hooks do not run when training resumes in the middle of an epoch."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.lightning_names import is_overridden, lightning_types

_HOOK = "on_train_epoch_start"
# A resumed epoch does not need the hooks of callbacks in these packages, or the strategy does their work.
_PACKAGES = ("lightning", "pytorch_lightning", "lightning_hybrid", "recipes")


def warn_of_skipped_epoch_start(trainer: Any) -> None:
    """Warn if training resumes within an epoch and user code defines `on_train_epoch_start`.

    The hook ran before the checkpoint and does not run again. A data set, sampler or loss that it configures therefore
    starts with its initial values. Lightning warns about this only for loaders without a state.
    """
    if not trainer.fit_loop.restarted_mid_epoch:
        return
    names: list[str] = []
    for callback in trainer.callbacks:
        if _is_users(callback):
            names.append(type(callback).__name__)
    module = trainer.lightning_module
    if is_overridden(_HOOK, module, "pytorch.LightningModule"):
        names.append(type(module).__name__)
    if names:
        listed = ", ".join(f"`{name}.{_HOOK}`" for name in names)
        rank_zero_warn(
            f"Training resumes in the middle of epoch {trainer.current_epoch}. In this epoch, {listed} ran before the "
            "checkpoint and will not run again. If the hook sets values that depend on `trainer.current_epoch`, such "
            "as the strength of an augmentation or the weight of a loss, set them in `on_train_start` too."
        )


def _is_users(callback: Any) -> bool:
    """Return whether a callback is user code and defines `on_train_epoch_start`."""
    is_lambda = isinstance(callback, lightning_types("pytorch.callbacks.LambdaCallback"))
    if is_lambda:
        return _HOOK in vars(callback)
    is_of_package = type(callback).__module__.partition(".")[0] in _PACKAGES
    return not is_of_package and is_overridden(_HOOK, callback, "pytorch.Callback")
