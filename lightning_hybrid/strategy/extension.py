"""Interface of extensions: abilities that are added to one fit, and the facts of the fit that they may read.

    created by `fit_extensions.build_extensions` in `setup`, after a spawn and in fits only, so none is ever pickled
    before_optimizers -> engine_options -> after_setup -> [load] -> training_loader
    (before_batch -> step -> update -> before_training_step -> after_training_step -> backward)*
    before_validation -> in_validation, twice -> after_validation, before_train_end, [reading_module, save]*
    end -> put_back        in reverse; `save` and `failed` may come after them

The strategy calls each hook of all extensions in the order of a tuple. All ranks have the same extensions. A hook that
may be collective says so.
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
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from lightning_hybrid.precision.window import HalfPrecisionWindow

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True, kw_only=True, eq=False)
class FitContext:
    """Facts of a fit that an extension may read, also after the fit has ended.

    Attributes:
        module: The user's module.
        precision: The precision plugin.
        topology: The ranks and their nodes. In a pipeline, the `ReplicaSets` of the stages.
        device: The device of this rank.
        timeout: The time that ranks wait for one another in a collective.
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
        """The trainer."""
        return self.module.trainer

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The current optimizers. Callbacks such as LearningRateFinder replace them within a fit."""
        optimizers: Sequence[Optimizer] = self.trainer.optimizers
        return optimizers

    @property
    def optimizer_steps(self) -> Sequence[OptimizerStepState]:
        """The state of each optimizer's steps, or nothing unless in half precision."""
        return getattr(self.precision, "optimizer_steps", ())

    def outside_of_steps(self) -> AbstractContextManager[None]:
        """Return a context in which parameters are fp32, even inside the step of a manual loop."""
        window: HalfPrecisionWindow | None = getattr(self.precision, "window", None)
        if window is None:
            return nullcontext()
        return window.shut()


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningFit(FitContext):
    """Facts of a fit while it runs. Extensions must not keep the object: it holds DDP's buckets.

    Attributes:
        plan: The communication plan of the fit.
        engine: The engine that averages gradients.
        hook_state: The state of DDP's communication hook.
        wrapped: The module in DDP. In a pipeline, its stages, which have DDP's flag of the last
            backward too.
    """

    plan: CommPlan
    engine: CommEngine
    hook_state: HookState
    wrapped: DistributedDataParallel


class FitExtension:
    """Base of an ability of one fit. Every hook does nothing by default.

    A factory `factory(fit: FitContext)` creates the extension, and may raise an error to refuse the fit.
    """

    # ---- setup -------------------------------------------------------------------------------

    def before_optimizers(self, fit: FitContext) -> None:
        """Change the module, which is on its device, before the optimizers are created. May be collective."""

    def engine_options(self, fit: FitContext, plan: CommPlan) -> Mapping[str, Any]:
        """Return arguments of `CommEngine`, such as another `plan`."""
        return {}

    def after_setup(self, fit: RunningFit) -> None:
        """Begin, when DDP, engine and optimizers exist, before a checkpoint is restored. May be collective."""

    def load(self, fit: RunningFit, checkpoint: Mapping[str, Any]) -> None:
        """Restore the extension's entry of a checkpoint. Not collective.

        Called after the weights and before the optimizers are restored, also within a fit.
        """

    def loading(
        self, fit: RunningFit, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """Return a context that yields the state which the optimizer loads: this rank's part of a full `state`."""
        return nullcontext(state)

    def training_loader(self, fit: FitContext, loader: Any) -> Any:
        """Return the loader that the training loop iterates over in place of `loader`. May be collective.

        Called before `after_setup` if `configure_optimizers` reads `trainer.estimated_stepping_batches`.
        """
        return loader

    # ---- a step ------------------------------------------------------------------------------

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """Prepare a training batch, after the hooks of callbacks and module. May be collective."""

    def before_training_step(
        self, fit: RunningFit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Prepare `training_step(*args, **kwargs)`. Parameters are fp32 until then. May be collective."""

    def after_training_step(self, fit: RunningFit, output: Any) -> None:
        """Follow `training_step`, which returned `output`. Not called after an error. May be collective."""

    def backward(self, fit: RunningFit, loss: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """Run a backward by `run(loss)`, with this or another loss, and return its result."""
        return run(loss)

    def before_all_gather(self, fit: RunningFit) -> None:
        """Precede `all_gather` of the module or the strategy. May raise an error to refuse it."""

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Step by `run()`, which is closure, update and `step` of later extensions, and return its result.

        Not called where user code steps past Lightning. If the user's module overrides `optimizer_step`, some
        ranks may not call this hook: then nothing in it may be collective.
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
        """Run the closure and update, in place of `run()`, inside every `step`.

        `options` are those of `optimizer.step`.
        """
        return run()

    # ---- hooks of the loop -------------------------------------------------------------------

    def before_validation(self, fit: RunningFit) -> None:
        """Prepare validation (and the sanity check), before all other callbacks. May be collective."""

    def in_validation(self, fit: RunningFit) -> None:
        """Follow new weights at the start and end of a validation epoch, after all callbacks. May be collective."""

    def after_validation(self, fit: RunningFit) -> None:
        """Return to training, after callbacks and module."""

    def before_train_end(self, fit: RunningFit) -> None:
        """Prepare the end of training, before all other callbacks. May be collective."""

    # ---- checkpoints and status --------------------------------------------------------------

    def reading_module(self, fit: RunningFit) -> AbstractContextManager[None]:
        """Return a context in which the module's state is read. Collective, unless this rank is failing."""
        return nullcontext()

    def optimizer_state(
        self, fit: RunningFit, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the full state of an optimizer. May be collective."""
        return state

    def save(self, fit: FitContext, checkpoint: dict[str, Any]) -> None:
        """Add an entry next to "optimizer_states", also after `end`. Collective, unless this rank is failing."""

    def status(self) -> Mapping[str, Any]:
        """Return the fields of `RunStatus` that this extension knows."""
        return {}

    # ---- end ---------------------------------------------------------------------------------

    def failed(self, fit: FitContext, error: BaseException) -> None:
        """Note that this rank fails, before the engine tells the other ranks. Also called after `end`.

        Other ranks no longer join collectives.
        """

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """End what `after_setup` has begun, even if only in part.

        The engine still runs. Collective only without an error.
        """

    def put_back(self, fit: FitContext, error: BaseException | None) -> None:
        """Restore the module as it was before `before_optimizers`.

        The engine is closed, and the module is in its own precision. Collective only without an error.
        """
