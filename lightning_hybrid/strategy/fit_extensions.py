"""Creation of extensions from a strategy's options, and dispatch of hook calls to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.lightning_names import lightning_function, lightning_types
from lightning_hybrid.strategy.extension import FitContext, FitExtension, RunningFit


class FitExtensions:
    """Container of all extensions of one training run, which calls their hooks in order.

    The container ends extensions in reverse order. Without extensions, its methods do nothing.

    Args:
        fit: The description of the run that extensions may read.
        members: The extensions, in the order of their calls.
    """

    def __init__(self, fit: FitContext | None = None, members: Sequence[FitExtension] = ()) -> None:
        self.members = tuple(members)
        self._fit = fit
        # Extensions that have yet to change the module in `before_optimizers`, and those that did.
        self._waiting = list(members)
        self._changed: list[FitExtension] = []
        # Kept after the end, because a checkpoint may be saved later.
        self._begun: list[FitExtension] = []
        self._running: RunningFit | None = None
        self._end_error: BaseException | None = None
        self._callbacks: list[Any] = []

    @property
    def fit(self) -> FitContext:
        """Description of the training run for extensions."""
        assert self._fit is not None, "`FitExtensions` without extensions has no `FitContext`"
        return self._fit

    # ---- setup -------------------------------------------------------------------------------

    def before_optimizers(self) -> None:
        """Call each extension's `before_optimizers` hook once, so that extensions can modify the module."""
        while self._waiting:
            extension = self._waiting.pop(0)
            self._changed.append(extension)
            extension.before_optimizers(self.fit)

    def engine_options(self, plan: CommPlan) -> dict[str, Any]:
        """Return the communication plan and the other engine arguments that extensions request."""
        options: dict[str, Any] = {"plan": plan}
        for extension in self.members:
            options |= extension.engine_options(self.fit, options["plan"])
        return options

    def begin(self, comm: Any, wrapped: Any) -> None:
        """Start all extensions, and insert trainer callbacks that run their validation hooks.

        Collective: every rank must call it. If an extension raises an error, `end` ends this extension too.

        Args:
            comm: The `CommSetup` of the strategy.
            wrapped: The module in DDP.
        """
        if not self.members:
            return
        fit = RunningFit(
            **vars(self.fit),
            plan=comm.plan,
            engine=comm.engine,
            hook_state=comm.hook_state,
            wrapped=wrapped,
        )
        self._running = fit
        for extension in self.members:
            self._begun.append(extension)
            extension.after_setup(fit)
        self._insert_callbacks(fit.trainer)

    def _insert_callbacks(self, trainer: Any) -> None:
        # These hooks must run before or after all callbacks, which may swap weights, and before the module, which may
        # export weights. A strategy's own hooks would run after both.
        before_validation = partial(self.call, "before_validation")
        before_train_end = partial(self.call, "before_train_end")
        in_validation = partial(self.call, "in_validation")
        first = _callback(on_validation_start=before_validation, on_train_end=before_train_end)
        last = _callback(
            on_validation_epoch_start=in_validation, on_validation_epoch_end=in_validation
        )
        self._callbacks = [first, last]
        trainer.callbacks[:] = [first, *trainer.callbacks, last]

    def training_loader(self, loader: Any) -> Any:
        """Return the training loader, after giving each extension the chance to replace it."""
        for extension in self.members:
            loader = extension.training_loader(self.fit, loader)
        return loader

    # ---- during the run ----------------------------------------------------------------------

    def _running_members(self) -> list[tuple[FitExtension, RunningFit]]:
        """Return each started extension with the description of the current run (empty if none is running)."""
        if self._running is None:
            return []
        return [(extension, self._running) for extension in self._begun]

    def call(self, hook: str, *args: Any) -> None:
        """Call the named hook of all started extensions if training is running, ignoring the results."""
        for extension, fit in self._running_members():
            getattr(extension, hook)(fit, *args)

    def backward(self, loss: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """Run the backward pass inside the nested hooks of all extensions, where the first extension is outermost."""
        for extension, fit in reversed(self._running_members()):
            run = partial(extension.backward, fit, run=run)
        return run(loss)

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        run: Callable[[], Any],
        **options: Any,
    ) -> Any:
        """Run an optimizer step inside the nested hooks of all extensions, where the first extension is outermost."""
        for extension, fit in reversed(self._running_members()):
            run = partial(extension.update, fit, optimizer, closure, run, **options)
        for extension, fit in reversed(self._running_members()):
            run = partial(extension.step, fit, optimizer, run)
        return run()

    def status(self) -> dict[str, Any]:
        """Return all fields of `RunStatus` that the extensions provide."""
        fields: dict[str, Any] = {}
        for extension in self.members:
            fields.update(extension.status())
        return fields

    # ---- checkpoints -------------------------------------------------------------------------

    @contextmanager
    def reading_module(self) -> Iterator[None]:
        """Return a context in which all extensions allow the module's state dict to be read."""
        with ExitStack() as stack:
            for extension, fit in self._running_members():
                stack.enter_context(extension.reading_module(fit))
            yield

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the full state dict of an optimizer, letting extensions gather shards from other ranks."""
        for extension, fit in self._running_members():
            state = extension.optimizer_state(fit, optimizer, state)
        return state

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the extensions' state to a checkpoint, unless the checkpoint contains weights only."""
        if "optimizer_states" not in checkpoint:
            return
        for extension in self._begun:
            extension.save(self.fit, checkpoint)

    def load_optimizers(
        self, optimizers: Iterable[Optimizer], checkpoint: Mapping[str, Any], device: torch.device
    ) -> None:
        """Load the state of the extensions and of this rank's optimizers from a checkpoint.

        Args:
            optimizers: The optimizers, in the order of the checkpoint.
            checkpoint: The checkpoint.
            device: The device to which the optimizer state is moved.
        """
        self.call("load", checkpoint)
        move_to_device = lightning_function("fabric.utilities.optimizer._optimizer_to_device")
        for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
            with self._loading(optimizer, state) as state_to_load:
                optimizer.load_state_dict(dict(state_to_load))
                move_to_device(optimizer, device)

    @contextmanager
    def _loading(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Return a context that yields the optimizer state to load on this rank, given the full `state`."""
        with ExitStack() as stack:
            for extension, fit in self._running_members():
                state = stack.enter_context(extension.loading(fit, optimizer, state))
            yield state

    # ---- end ---------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Report an error to each started extension.

        If an extension raises another error, its text becomes a note of the first error. Lightning calls `teardown`
        only after this method has returned.
        """
        for extension in self._begun:
            try:
                extension.failed(self.fit, error)
            except Exception as hook_error:
                name = type(extension).__name__
                error.add_note(f"{name}.failed: {type(hook_error).__name__}: {hook_error}")

    def end(self, error: BaseException | None) -> None:
        """End all started extensions in reverse order, even if one of them raises an error.

        A second call does nothing.
        """
        running = self._running
        self._running = None
        if running is None:
            return
        callbacks = running.trainer.callbacks
        callbacks[:] = [callback for callback in callbacks if callback not in self._callbacks]
        self._end_error = error
        calls = [partial(extension.end, running, error) for extension in reversed(self._begun)]
        try:
            _call_all(calls, error)
        except Exception as end_error:
            # Other ranks may wait for this one, so no collective may follow.
            self._end_error = end_error
            raise

    def put_back(self, error: BaseException | None) -> None:
        """Let the extensions undo their changes to the module, in reverse order.

        A second call does nothing.
        """
        changed = self._changed
        self._changed = []
        self._waiting = []
        error = error or self._end_error
        calls = [partial(extension.put_back, self.fit, error) for extension in reversed(changed)]
        _call_all(calls, error)


def _call_all(calls: Sequence[partial[None]], error: BaseException | None) -> None:
    """Call all given functions, even if one of them raises an error.

    If the run has failed with `error`, errors of the calls become warnings, because the user has to see the error of
    the run. Otherwise the first error is raised, with the others as notes.
    """
    raised: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as call_error:
            call_error.add_note(f"In {call.func.__qualname__}.")
            raised.append(call_error)
    if raised and error is None:
        for later_error in raised[1:]:
            raised[0].add_note(f"And then {type(later_error).__name__}: {later_error}")
        raise raised[0]
    for raised_error in raised:
        warnings.warn(
            f"After {type(error).__name__}, the cleanup failed with {type(raised_error).__name__}: {raised_error}",
            stacklevel=2,
        )


def _callback(**hooks: Callable[[], None]) -> Any:
    """Return a Lightning callback whose hooks call the given functions without arguments."""
    methods: dict[str, Any] = {}
    for name, function in hooks.items():
        methods[name] = _hook_method(function)
    # The class derives from `Callback` of each Lightning package that is imported.
    return type("ExtensionHooks", lightning_types("pytorch.callbacks.Callback"), methods)()


def _hook_method(function: Callable[[], None]) -> Callable[..., None]:
    def hook(self: Any, trainer: Any, module: Any) -> None:
        function()

    return hook


# ---- construction ----------------------------------------------------------------------------


def build_extensions(strategy: Any) -> FitExtensions:
    """Create all built-in and user-defined extensions that a strategy's options select.

    The built-in extensions come first.

    Raises:
        ValueError: A constructor rejects the run, or a factory returns an object that is not a `FitExtension`.
    """
    fit = FitContext(
        module=strategy.lightning_module,
        precision=strategy.precision_plugin,
        # In a pipeline, this is the `ReplicaSets` of the stages.
        topology=getattr(strategy, "replicas", strategy._comm.topology),
        device=strategy.root_device,
        timeout=strategy._timeout,
        ddp_options=strategy._ddp_kwargs,
        failures=strategy._failures,
    )
    extensions = _build_built_in(fit, strategy._options, saves_residuals=strategy.saves_residuals)
    for factory in strategy._options.extensions:
        extension = factory(fit)
        if not isinstance(extension, FitExtension):
            raise ValueError(
                f"`extensions` (={factory!r}) must return a `FitExtension` when called with a `FitContext`, but "
                f"returned {type(extension).__name__}. Derive the class of the returned object from `FitExtension`."
            )
        extensions.append(extension)
    if not extensions:
        return FitExtensions()
    return FitExtensions(fit, extensions)


def _build_built_in(fit: FitContext, options: Any, *, saves_residuals: bool) -> list[FitExtension]:
    """Create the built-in extensions that the strategy's options and the module require."""
    # Modules are imported here, because a run needs only the modules of its own options.
    extensions: list[FitExtension | None] = []
    if any(getattr(layer, "node_slices", ()) for layer in fit.module.modules()):
        from lightning_hybrid.strategy.node_slices.extension import node_slices_for

        extensions.append(node_slices_for(fit, options.features()))
    if options.has_error_feedback:
        from lightning_hybrid.strategy.feedback_state import ErrorFeedbackExtension

        extensions.append(ErrorFeedbackExtension(fit, saves=saves_residuals))
    if options.joins_uneven_batches:
        from lightning_hybrid.strategy.uneven_batches.extension import UnevenBatchesExtension

        extensions.append(UnevenBatchesExtension(fit))
    if options.local_steps is not None:
        from lightning_hybrid.strategy.local_steps.extension import local_steps_for

        extensions.append(local_steps_for(fit, options.local_steps))
    if options.shard_update != "off":
        from lightning_hybrid.strategy.shard_update.extension import shard_update_for

        extensions.append(shard_update_for(fit, options.shard_update))
    # A function returns None if its option has no effect, for example on one node.
    return [extension for extension in extensions if extension is not None]
