"""What an ability adds to a fit: an extension, which the strategy calls at its own places, in the order of a tuple.

    made by `factories.made_for` in `setup`, after a spawn and in fits only, so that nothing here is ever pickled
    before_optimizers -> engine_options -> after_setup -> [load]
    (before_batch -> before_training_step -> step -> update)*
    before_validation -> in_validation, twice -> after_validation, before_train_end, [reading_module, save]*
    end -> put_back        in reverse; `save` and `failed` may come after them

Whether there are extensions, and which, is the same on all ranks. A hook that may be collective says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.comm import CommEngine, CommPlan, HookState, Topology
from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from lightning_hybrid.precision.window import HalfPrecisionWindow

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True, kw_only=True, eq=False)
class FitContext:
    """What an extension knows of a fit, also once that has ended."""

    module: pl.LightningModule
    precision: Any  # the plugin
    topology: Topology  # in a pipeline `ReplicaSets` of the stages
    device: torch.device
    timeout: timedelta
    ddp_options: Mapping[str, Any]  # arguments of `DistributedDataParallel`
    failures: Any  # `ending_error`: what ends this rank alone; `refuse_to_save_alone`

    @property
    def trainer(self) -> Any:
        """The trainer."""
        return self.module.trainer

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers in force: callbacks such as LearningRateFinder put others there within a fit."""
        found: Sequence[Optimizer] = self.trainer.optimizers
        return found

    @property
    def optimizer_steps(self) -> Sequence[OptimizerStepState]:
        """The state of each optimizer's steps; none unless in half precision."""
        return getattr(self.precision, "optimizer_steps", ())

    def outside_of_steps(self) -> AbstractContextManager[None]:
        """Return a context in which parameters are fp32, also in a manual loop, which steps inside of its step."""
        window: HalfPrecisionWindow | None = getattr(self.precision, "window", None)
        return nullcontext() if window is None else window.shut()


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningFit(FitContext):
    """What an extension knows of a fit that runs. It is not to be kept: it holds DDP's buckets."""

    plan: CommPlan
    engine: CommEngine
    hook_state: HookState
    wrapped: (
        DistributedDataParallel  # in a pipeline its stages, with the same flag of the last backward
    )


class FitExtension:
    """An ability of one fit; every hook does nothing. A factory `factory(fit: FitContext)` makes it, and may refuse."""

    # ---- the way in ------------------------------------------------------------------------------------------------

    def before_optimizers(self, fit: FitContext) -> None:
        """Change the module, which is on its device, before optimizers are made of it. May be collective."""

    def engine_options(self, fit: FitContext, plan: CommPlan) -> Mapping[str, Any]:
        """Return arguments of `CommEngine`, such as another `plan`."""
        return {}

    def after_setup(self, fit: RunningFit) -> None:
        """Begin: DDP, engine and optimizers are there, a checkpoint's state is not. May be collective."""

    def load(self, fit: RunningFit, checkpoint: Mapping[str, Any]) -> None:
        """Take the extension's entry. After weights, before optimizers; also within a fit. No collective."""

    def loading(
        self, fit: RunningFit, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """Return a context in which the optimizer loads what it yields: of a whole `state` this rank's part."""
        return nullcontext(state)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """Prepare a batch of training, after hooks of callbacks and module. May be collective."""

    def before_training_step(
        self, fit: RunningFit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Prepare `training_step(*args, **kwargs)`, whose parameters are fp32 until then. May be collective."""

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Step by `run()`: closure, update and `step` of extensions after this one; return its result.

        Not called where user code steps past Lightning. Where it overrides `optimizer_step`, ranks may differ in
        whether they come: then nothing collective.
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
        """Run the closure and update, in place of `run()`, inside of every `step`; `options`: of `optimizer.step`."""
        return run()

    # ---- hooks of the loop -----------------------------------------------------------------------------------------

    def before_validation(self, fit: RunningFit) -> None:
        """Prepare validation (and the sanity check), as the first of all callbacks. May be collective."""

    def in_validation(self, fit: RunningFit) -> None:
        """Follow new weights, as the last callback where its epoch starts and ends. May be collective."""

    def after_validation(self, fit: RunningFit) -> None:
        """Go back to training, after callbacks and module."""

    def before_train_end(self, fit: RunningFit) -> None:
        """Prepare the end of training, as the first of all callbacks. May be collective."""

    # ---- checkpoints, and what others see --------------------------------------------------------------------------

    def reading_module(self, fit: RunningFit) -> AbstractContextManager[None]:
        """Return a context in which the module's state is read. Collective, unless this rank is failing."""
        return nullcontext()

    def optimizer_state(
        self, fit: RunningFit, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the whole of an optimizer's state. May be collective."""
        return state

    def save(self, fit: FitContext, checkpoint: dict[str, Any]) -> None:
        """Add an entry next to "optimizer_states". Collective, unless this rank is failing; also after `end`."""

    def status(self) -> Mapping[str, Any]:
        """Return fields of `RunStatus` that are this extension's."""
        return {}

    # ---- the way out -----------------------------------------------------------------------------------------------

    def failed(self, fit: FitContext, error: BaseException) -> None:
        """Note that other ranks do not come any more, before the engine says so to them; also after `end`."""

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """End what `after_setup` has begun, if only in part. The engine runs; collective only without an error."""

    def put_back(self, fit: FitContext, error: BaseException | None) -> None:
        """Give the module back. The engine is closed, the module in its own precision. Collective only as `end`."""


class Extensions:
    """The extensions of one fit as one: calls them in order, with what they know of it, and ends them in reverse."""

    def __init__(self, fit: FitContext, made: Sequence[FitExtension]) -> None:
        self.fit, self.made = fit, tuple(made)
        self._waiting = list(made)  # for `before_optimizers`
        self._changed: list[FitExtension] = []  # by it
        self._begun: list[FitExtension] = []  # kept after the end: a checkpoint may be saved later
        self._running: RunningFit | None = None
        self._end_error: BaseException | None = None
        self._callbacks: list[Any] = []

    def before_optimizers(self) -> None:
        """Let all change the module; once."""
        while self._waiting:
            self._changed.append(one := self._waiting.pop(0))
            one.before_optimizers(self.fit)

    def engine_options(self, plan: CommPlan) -> dict[str, Any]:
        """Return what all ask of the engine, its plan too."""
        options: dict[str, Any] = {"plan": plan}
        for one in self.made:
            options |= one.engine_options(self.fit, options["plan"])
        return options

    def begin(self, comm: Any, wrapped: Any) -> None:
        """Begin all; `comm`: the strategy's `CommSetup`. Collective. Where one raises, `end` ends it too."""
        known = {
            **vars(self.fit),
            "plan": comm.plan,
            "engine": comm.engine,
            "hook_state": comm.hook_state,
        }
        self._running = fit = RunningFit(**known, wrapped=wrapped)
        for one in self.made:
            self._begun.append(one)
            one.after_setup(fit)
        # Hooks of a strategy come after those of callbacks, which swap weights, and of the module, which may export.
        hooks = ("before_validation", "before_train_end", "in_validation")
        begins, ends, again = (partial(self.call, hook) for hook in hooks)
        first = _callback(on_validation_start=begins, on_train_end=ends)
        last = _callback(on_validation_epoch_start=again, on_validation_epoch_end=again)
        self._callbacks = [first, last]
        fit.trainer.callbacks[:] = [first, *fit.trainer.callbacks, last]

    def _each(self) -> list[tuple[FitExtension, RunningFit]]:
        fit = self._running
        return [] if fit is None else [(one, fit) for one in self._begun]

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all that returns nothing, while the fit runs."""
        for one, fit in self._each():
            getattr(one, hook)(fit, *args)

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        run: Callable[[], Any],
        **options: Any,
    ) -> Any:
        """Run an optimizer's step inside of all, the first outermost."""
        for one, fit in reversed(self._each()):
            run = partial(one.update, fit, optimizer, closure, run, **options)
        for one, fit in reversed(self._each()):
            run = partial(one.step, fit, optimizer, run)
        return run()

    @contextmanager
    def reading_module(self) -> Iterator[None]:
        """Enter the contexts of all in which the module's state is read, and leave them in reverse."""
        with ExitStack() as stack:
            for one, fit in self._each():
                stack.enter_context(one.reading_module(fit))
            yield

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the whole of an optimizer's state."""
        for one, fit in self._each():
            state = one.optimizer_state(fit, optimizer, state)
        return state

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add entries next to the state of optimizers."""
        for one in self._begun if "optimizer_states" in checkpoint else ():
            one.save(self.fit, checkpoint)

    @contextmanager
    def loading(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Enter the contexts of all in which an optimizer loads this rank's part of `state`, which it yields."""
        with ExitStack() as stack:
            for one, fit in self._each():
                state = stack.enter_context(one.loading(fit, optimizer, state))
            yield state

    def status(self) -> dict[str, Any]:
        """Return all fields of `RunStatus` that are the extensions'."""
        return {name: value for one in self.made for name, value in one.status().items()}

    def failed(self, error: BaseException) -> None:
        """Tell all of an error. What one of them raises is a note of it, as Lightning calls `teardown` only then."""
        for one in self._begun:
            try:
                one.failed(self.fit, error)
            except Exception as own:
                error.add_note(f"{type(one).__name__}.failed: {type(own).__name__}: {own}")

    def end(self, error: BaseException | None) -> None:
        """End all that have begun, the last first, whatever one of them raises; once."""
        running, self._running = self._running, None
        if running is None:
            return
        callbacks = running.trainer.callbacks
        callbacks[:] = [one for one in callbacks if one not in self._callbacks]
        self._end_error = error
        try:
            _call_all([partial(one.end, running, error) for one in reversed(self._begun)], error)
        except Exception as own:
            self._end_error = own  # others may wait for this rank: nothing collective is to follow
            raise

    def put_back(self, error: BaseException | None) -> None:
        """Let all that were called before optimizers give the module back, the last first; once."""
        changed, self._changed, error = self._changed[::-1], [], error or self._end_error
        self._waiting = []
        _call_all([partial(one.put_back, self.fit, error) for one in changed], error)


def _call_all(calls: Sequence[partial[None]], error: BaseException | None) -> None:
    # After an error of the fit what they raise is a warning: the fit's is what a user has to see. Else the first is
    # raised, with the others as notes.
    raised: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as own:
            own.add_note(f"In {call.func.__qualname__}.")
            raised.append(own)
    if raised and error is None:
        for other in raised[1:]:
            raised[0].add_note(f"And then {type(other).__name__}: {other}")
        raise raised[0]
    for one in raised:
        warnings.warn(
            f"After {type(error).__name__} this could not be ended: {type(one).__name__}: {one}",
            stacklevel=2,
        )


def _callback(**hooks: Callable[[], None]) -> Any:
    # Of whichever Lightning runs.
    methods = {
        name: lambda self, trainer, module, call=call: call() for name, call in hooks.items()
    }
    return type("ExtensionHooks", lightning_types("pytorch.callbacks.Callback"), methods)()
