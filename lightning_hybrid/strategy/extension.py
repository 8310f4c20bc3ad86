"""Interface of strategy extensions, which add features to a training run.

    created by `fit_extensions.build_extensions` in `setup`, after a spawn and in `Trainer.fit` only, so never pickled
    before_optimizers -> engine_options -> after_setup -> [load] -> training_loader
    (before_batch -> step -> update -> before_training_step -> after_training_step -> backward)*
    before_validation -> in_validation, twice -> after_validation, before_train_end, [reading_module, save]*
    end -> put_back        in reverse; `save` and `failed` may come after them

The strategy calls each hook of all extensions in the order of their tuple. All ranks have the same extensions. The
docstring of a hook says whether the hook may be collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.comm import CommEngine, CommPlan, HookState, Topology
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.skipped_steps import OptimizerStepState

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True, kw_only=True, eq=False)
class FitContext:
    """Description of a training run that extensions can read, both during the run and after it.

    Attributes:
        module: The user's module.
        precision: The precision plugin.
        topology: The ranks and their nodes. In a pipeline, the `ReplicaSets` of the stages.
        device: The device of this rank.
        timeout: The maximum time that ranks wait for one another in a collective.
        ddp_options: The arguments of `DistributedDataParallel`.
        failures: The failure reports. `ending_error` is the error that ends this rank alone, and
            `refuse_to_save_alone` raises an error if there is one.
    """

    module: pl.LightningModule
    precision: Any
    topology: Topology
    device: torch.device
    timeout: timedelta
    ddp_options: Mapping[str, Any]
    failures: Any

    @property
    def trainer(self) -> Any:
        """Trainer of the run."""
        return self.module.trainer

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Current optimizers of the trainer.

        Callbacks such as LearningRateFinder replace optimizers during training.
        """
        optimizers: Sequence[Optimizer] = self.trainer.optimizers
        return optimizers

    @property
    def optimizer_steps(self) -> Sequence[OptimizerStepState]:
        """Loss scale and step counters of each optimizer, or an empty sequence without master weights."""
        return getattr(self.precision, "optimizer_steps", ())

    def outside_of_steps(self) -> AbstractContextManager[None]:
        """Return a context in which parameters are in fp32, even in the middle of a training step."""
        window: HalfPrecisionWindow | None = getattr(self.precision, "window", None)
        if window is None:
            return nullcontext()
        return window.shut()


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningFit(FitContext):
    """Description of a training run in progress, including its communication engine and DDP module.

    Extensions must not keep the object, because it holds DDP's buckets.

    Attributes:
        plan: The communication plan of the run.
        engine: The engine that averages gradients.
        hook_state: The state of DDP's communication hook.
        wrapped: The module in DDP. In a pipeline, the stages, which also have DDP's flag for the last backward.
    """

    plan: CommPlan
    engine: CommEngine
    hook_state: HookState
    wrapped: DistributedDataParallel


class FitExtension:
    """Base class of strategy extensions. By default, all hooks do nothing.

    A factory `factory(fit: FitContext)` creates the extension, and may raise an error to reject the run.
    """

    # ---- setup -------------------------------------------------------------------------------

    def before_optimizers(self, fit: FitContext) -> None:
        """Modify the module after its move to the device and before the optimizers are created.

        May be collective.
        """

    def engine_options(self, fit: FitContext, plan: CommPlan) -> Mapping[str, Any]:
        """Return keyword arguments for `CommEngine`, such as another `plan`."""
        return {}

    def after_setup(self, fit: RunningFit) -> None:
        """Start the extension, after DDP, the communication engine and the optimizers have been created.

        Called before a checkpoint is restored. May be collective.
        """

    def load(self, fit: RunningFit, checkpoint: Mapping[str, Any]) -> None:
        """Restore the extension's own state from a checkpoint.

        Called after the weights and before the optimizers are restored, also during training. Not collective.
        """

    def loading(
        self, fit: RunningFit, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """Return a context that yields the part of a full optimizer state that this rank has to load."""
        return nullcontext(state)

    def training_loader(self, fit: FitContext, loader: Any) -> Any:
        """Return the data loader that the training loop iterates over in place of `loader`.

        May be collective. Called before `after_setup` if `configure_optimizers` reads
        `trainer.estimated_stepping_batches`.
        """
        return loader

    # ---- a step ------------------------------------------------------------------------------

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """Run before a training batch, after the hooks of callbacks and module.

        May be collective.
        """

    def before_training_step(
        self, fit: RunningFit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Run immediately before `training_step`, while the parameters are still fp32.

        May be collective.
        """

    def after_training_step(self, fit: RunningFit, output: Any) -> None:
        """Run after `training_step` has returned without an error.

        May be collective.
        """

    def backward(self, fit: RunningFit, loss: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """Run the backward pass by calling `run` with the loss or a modified loss, and return its result."""
        return run(loss)

    def before_all_gather(self, fit: RunningFit) -> None:
        """Run before every `all_gather` of the module or strategy. Raise an error to prevent the call."""

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Run an optimizer step by calling `run()`, and return its result.

        `run()` executes the closure, the update and the hook `step` of later extensions.

        Not called when user code steps an optimizer without Lightning. If the user's module overrides `optimizer_step`,
        some ranks may not call this hook. Nothing in it may then be collective.
        """
        return run()

    def update(
        self,
        fit: RunningFit,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        run: Callable[[], Any],
        **options: Any,
    ) -> Any:
        """Run the closure and the optimizer update by calling `run()`, and return the result.

        Called inside every `step`. `options` are the keyword arguments of `optimizer.step`.
        """
        return run()

    # ---- hooks of the loop -------------------------------------------------------------------

    def before_validation(self, fit: RunningFit) -> None:
        """Run before validation or the sanity check, before the hooks of all callbacks.

        May be collective.
        """

    def in_validation(self, fit: RunningFit) -> None:
        """Run at the start and at the end of a validation epoch, after the hooks of all callbacks.

        Those hooks may set new weights. May be collective.
        """

    def after_validation(self, fit: RunningFit) -> None:
        """Run at the end of validation, after the hooks of callbacks and module."""

    def before_train_end(self, fit: RunningFit) -> None:
        """Run at the end of training, before the hooks of all callbacks.

        May be collective.
        """

    # ---- checkpoints and status --------------------------------------------------------------

    def reading_module(self, fit: RunningFit) -> AbstractContextManager[None]:
        """Return a context in which the strategy reads the module's state dict.

        Collective, unless this rank is failing.
        """
        return nullcontext()

    def optimizer_state(
        self, fit: RunningFit, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the full state dict of an optimizer, for a checkpoint.

        May be collective.
        """
        return state

    def save(self, fit: FitContext, checkpoint: dict[str, Any]) -> None:
        """Add the extension's own state to a checkpoint.

        The state goes into a top-level entry, next to `optimizer_states`. Also called after `end`. Collective, unless
        this rank is failing.
        """

    def status(self) -> Mapping[str, Any]:
        """Return the fields of `RunStatus` that this extension provides."""
        return {}

    # ---- end ---------------------------------------------------------------------------------

    def failed(self, fit: FitContext, error: BaseException) -> None:
        """Respond to an error on this rank, before the engine reports it to the other ranks.

        Also called after `end`. Other ranks no longer join collectives.
        """

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Stop the extension and release the resources of `after_setup`, even if the setup has failed.

        The engine still runs. Collective only without an error.
        """

    def put_back(self, fit: FitContext, error: BaseException | None) -> None:
        """Undo the changes that `before_optimizers` made to the module.

        The engine is closed, and the module is in its own precision. Collective only without an error.
        """
