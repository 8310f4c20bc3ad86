"""Checks of the user's module, optimizers, precision and gradient accumulation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.lightning_names import is_overridden, misconfiguration
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.strategy.registration import STRATEGY_NAME

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision


def refuse_two_precisions(trainer: pl.Trainer, plugin: Precision) -> None:
    """Raise if `Trainer(precision=...)` disagrees with the precision plugin passed to the strategy.

    Raises:
        MisconfigurationException: The two precisions differ.
    """
    # Lightning uses the strategy's plugin and silently ignores the flag. "32-true" is the flag's default.
    flag = getattr(trainer._accelerator_connector, "_precision_flag", "32-true")
    if flag not in ("32-true", plugin.precision):
        raise misconfiguration(
            f"`precision` (={flag!r}) differs from the precision of the strategy's own plugin "
            f"({type(plugin).__name__}, {plugin.precision!r}), which would silently be used instead. Leave out either "
            "`precision=` or `precision_plugin=`."
        )


def user_moves_batches(module: pl.LightningModule | None) -> bool:
    """Return whether the module or data module overrides a hook that moves batches to the device."""
    assert module is not None
    trainer: Any = module.trainer
    datamodule = trainer.datamodule
    for hook in ("on_before_batch_transfer", "transfer_batch_to_device"):
        if is_overridden(hook, module, "pytorch.LightningModule"):
            return True
        if datamodule is not None and is_overridden(
            hook, datamodule, "pytorch.LightningDataModule"
        ):
            return True
    return False


def with_own_names(advice: str, strategy_type: str) -> str:
    """Replace DDP's strategy names by this package's names in Lightning's advice on unused parameters."""
    advice = advice.replace(
        "ddp_find_unused_parameters_true", f"{STRATEGY_NAME}_find_unused_parameters_true"
    )
    return advice.replace("strategy=DDPStrategy(", f"strategy={strategy_type}(")


def refuse_foreign_parameters(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Raise if an optimizer has a parameter that is not in `module`.

    DDP averages the gradients of the module's parameters only.

    Raises:
        ValueError: An optimizer has such a parameter. The error names the optimizer and the group.
    """
    # Parameters are compared by identity, because `in` would compare tensors element by element.
    averaged = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            if any(id(parameter) not in averaged for parameter in group["params"]):
                raise ValueError(
                    f"`configure_optimizers` returned {type(optimizer).__name__} with a parameter in group {index} "
                    "that is not part of the LightningModule, so its gradients would never be averaged over ranks. "
                    "Register the parameter (`self.name = torch.nn.Parameter(...)`) in `__init__` or "
                    "`configure_model`."
                )


def refuse_nothing_to_train(module: nn.Module) -> None:
    """Raise if `module` has no trainable parameter.

    Raises:
        ValueError: The module has no parameters, or all are frozen.
    """
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        state = "none are registered"
        if parameters:
            state = "all are frozen"
        raise ValueError(
            f"{type(module).__name__} has {len(parameters)} parameters ({state}), so there is nothing to train. Make "
            "layers attributes of the module in `__init__` or `configure_model`, or unfreeze parameters."
        )


def warn_of_trust_ratios(optimizers: Iterable[Optimizer]) -> None:
    """Warn about optimizers whose trust ratios discard the gradient magnitude that Adasum computes."""
    for optimizer in optimizers:
        # `optim.param_groups` sets `trust_ratio` in groups even if the optimizer does not support it.
        if "trust_ratio" not in optimizer.defaults:
            continue
        if any(group["trust_ratio"] for group in optimizer.param_groups):
            name = type(optimizer).__name__
            rank_zero_warn(
                f"`between_nodes` (=Adasum()) is not recommended with {name}, because its trust ratio normalizes the "
                "magnitude of each parameter's update. Adasum encodes in this magnitude whether gradients agree or "
                f"are orthogonal, so this information is lost. Use between_nodes=Mean() with {name}, or use SGD or "
                "Adam with Adasum."
            )


def warn_of_unused_loss_scale(loss_scale: LossScale | None, plugin: Any) -> None:
    """Warn if the user has set a loss scale, but the precision does not use it."""
    if loss_scale is None or plugin.precision == "16-true":
        return
    own_scaler = ""
    if plugin.precision == "16-mixed":
        own_scaler = ", and Lightning's own scaler scales the loss of '16-mixed'"
    rank_zero_warn(
        f"`loss_scale` (={type(loss_scale).__name__}) has no effect with precision={plugin.precision!r}, because it "
        f"applies only to precision='16-true'{own_scaler}. Leave `loss_scale` out, or set precision='16-true'."
    )


def refuse_other_accumulation(accumulate_grad_batches: Any) -> None:
    """Raise unless `Trainer(accumulate_grad_batches=...)` is a positive integer.

    Raises:
        ValueError: The argument is something else, such as a mapping from epochs to numbers.
    """
    value = accumulate_grad_batches
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    cure = "Set accumulate_grad_batches=2"
    if isinstance(value, Mapping):
        cure = (
            f"To change the number in later epochs, set callbacks=[GradientAccumulationScheduler({dict(value)!r})] "
            "from `lightning.pytorch.callbacks`"
        )
    raise ValueError(
        f"`accumulate_grad_batches` (={value!r}) must be a whole number of batches per step, 1 or more. {cure}."
    )


def refuse_what_is_not_averaged(
    optimizer: Optimizer, averaged: Collection[int], module: Any
) -> None:
    """Raise if an optimizer trains a parameter that DDP does not average.

    Args:
        optimizer: Optimizer that is about to step.
        averaged: The `id`s of the parameters that DDP averages.
        module: Module in which the name of the parameter is looked up.

    Raises:
        RuntimeError: A parameter is trained but not averaged. The error names it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in averaged:
                name = _name_of(parameter, module)
                raise RuntimeError(
                    f"Parameter `{name}` (shape {tuple(parameter.shape)}) is trained but not averaged, because DDP "
                    "registers the trainable parameters when training starts, but this parameter was added or "
                    "unfrozen later. Every rank would train its own copy. Keep it trainable from the start (with lr=0 "
                    "until it is needed), or call `fit` again after unfreezing it."
                )


def _name_of(parameter: nn.Parameter, module: nn.Module) -> str:
    for name, module_parameter in module.named_parameters():
        if module_parameter is parameter:
            return name
    return "(not in the module)"
