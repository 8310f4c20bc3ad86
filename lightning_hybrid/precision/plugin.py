"""Half-precision training on fp32 weights, as a Lightning precision plugin.

Methods stand in the order in which a run calls them: module conversion, then per step forward, backward, optimizer
step, then checkpoint, then teardown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.lightning_names import lightning_types, misconfiguration
from lightning_hybrid.precision.closure_steps import ClosureStep
from lightning_hybrid.precision.dtype_errors import add_cure
from lightning_hybrid.precision.full_accumulation import FullAccumulation
from lightning_hybrid.precision.gradient_observers import (
    grads_are_observed,
    runs_code_before_backward,
)
from lightning_hybrid.precision.gradients import BackwardGradients, record_of
from lightning_hybrid.precision.loss_scale import LossScale, loss_scale_from
from lightning_hybrid.precision.microbatches import MicrobatchMixin
from lightning_hybrid.precision.optimizer_protocol import (
    evaluates_closure,
    parameters_of,
    prepare_to_skip_,
    supports_device_skip,
    takes_scaled_gradients,
    temporary_attributes,
)
from lightning_hybrid.precision.schedule_guard import ScheduleGuard
from lightning_hybrid.precision.skipped_steps import (
    OptimizerStepState,
    OptimizerStepStates,
    SkipFlag,
    raise_if_stuck,
)
from lightning_hybrid.precision.user_steps import UserSteps
from lightning_hybrid.precision.window import HalfPrecisionWindow

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import Steppable
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision as _Base
else:
    _Base = object


class MasterWeightMixin(MicrobatchMixin, _Base):
    """A plugin for training in fp16 (or bf16) on fp32 weights, with fp32 gradients and optimizer state.

    One step, with scale `s`, weights `w` and the loss `L`:

        open                w16 = half(w)                               the module shows w16
        forward, backward   g16 = grad of s * L at w16                  matrix products accumulate in fp32
        all-reduce          g16 <- mean over ranks of g16
        close, unscale      g   = fp32(g16) / s                         the module shows w, and `p.grad` is g
        skip or step        any(g is inf or nan): w unchanged, s backs off;  else w <- optimizer(w, g)

    Outside of forward and backward, parameters, gradients and optimizer state are the user's own fp32 objects: in
    every hook from `on_after_backward` on, in optimizers, callbacks and checkpoints. In manual optimization parameters
    are in half precision inside of `training_step`, except in the steps of optimizers; `p.grad` is fp32 and unscaled
    after each `manual_backward`, and each optimizer has a loss scale of its own. A backward takes the smallest of those
    that it can reach, and they go on from it.

    The gradients of a step of several batches (`accumulate_grad_batches`) are summed in fp32, in `p.grad`, and rounded
    once, into the last backward.

    LARS and LAMB (on a CPU: if `fused=True`) unscale, check and update in passes of their own if nothing looks at
    gradients; `p.grad` is None then after the step. More in this folder's `README.md`.

    Args:
        precision: `"16-true"`, or `"bf16-true"`, which has fp32's range and therefore no loss scale.
        loss_scale: `"dynamic"`, a power of two for a fixed scale, or a `LossScale`.
        keep_fp32: module types that stay fp32 like the normalisation layers (their own tensors, not submodules').

    Attributes:
        window: the module's parameters in both precisions, while a run lasts.
        gradients: their gradients, likewise.

    Raises:
        ValueError: unknown `precision`; a `loss_scale` that is no power of two; a `loss_scale` with bf16.
        RuntimeError: in training, after 40 skipped steps in a row; asked at logged steps and at the end.

    Source: Micikevicius et al. 2017 (arXiv:1710.03740); LARS on fp32 weights: Jia et al. 2018 (arXiv:1807.11205).
    """

    precision: Literal["16-true", "bf16-true"]

    def __init__(
        self,
        precision: Literal["16-true", "bf16-true"] = "16-true",
        loss_scale: str | float | LossScale | None = None,
        keep_fp32: tuple[type[nn.Module], ...] = (),
    ) -> None:
        if precision not in ("16-true", "bf16-true"):
            raise ValueError(
                f'`precision` (={precision!r}) must be "16-true" or "bf16-true" for master weights.'
            )
        if precision == "bf16-true" and loss_scale is not None:
            raise ValueError(
                f'`loss_scale` (={loss_scale!r}) has no meaning with precision="bf16-true": bf16 has the range of fp32 '
                "and gradients do not underflow. Leave it out."
            )
        self.precision = precision
        self.dtype = torch.bfloat16
        scale: LossScale | None = None
        if precision == "16-true":
            self.dtype = torch.float16
            setting = loss_scale if loss_scale is not None else "dynamic"
            scale = loss_scale_from(setting)
        self.keep_fp32 = tuple(keep_fp32)
        self.optimizer_steps = OptimizerStepStates(scale)
        self.window: HalfPrecisionWindow | None = None
        self.gradients: BackwardGradients | None = None
        self._user_steps: UserSteps | None = None
        self._module: Any = None
        self._device = torch.device("cpu")
        self._compute_device = torch.device("cpu")
        self._schedules = ScheduleGuard(
            self.optimizer_steps.skip_flags_of, self._may_put_off_schedules
        )
        self._num_schedules = 0
        self._has_strategy = False  # one that knows the window, see `connect_strategy`
        # `partial(bool, True)` can be pickled, for `hybrid_allreduce_spawn`.
        self._is_last_backward: Callable[[], bool] = partial(bool, True)
        self._flush_backward: Callable[[Tensor], object] = torch.is_tensor  # nothing to do
        self._last_loss: Tensor | None = None
        self._scale: Tensor | None = None  # of the loss in the last backward
        self._is_arithmetic_on = False
        self._full_accumulation = FullAccumulation()
        # Of the ranks' parts, where they share the update: the largest gradient. Collective.
        self.largest_of_parts: Callable[[Iterator[Tensor]], Tensor] | None = None
        # Entered around every step of an optimizer that trains parameters of the module.
        self.update_context: Callable[[Optimizer], AbstractContextManager[Any]] = nullcontext

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of the first optimizer, or None with bf16."""
        return self.optimizer_steps[0].loss_scale

    @property
    def num_skipped_steps(self) -> int:
        """Number of skipped steps of all optimizers. Reading it waits for the device."""
        return sum(int(state.num_skipped) for state in self.optimizer_steps)

    # ---- before training -------------------------------------------------------------------------------------------

    def connect_strategy(
        self,
        *,
        is_last_backward_of_step: Callable[[], bool],
        flush_backward: Callable[[Tensor], object] = torch.is_tensor,
    ) -> None:
        """Connect the functions that a strategy provides.

        Args:
            is_last_backward_of_step: returns whether the backward in progress averages over ranks, for a step after it.
            flush_backward: ends DDP's own work for a backward, given the loss, before gradients are unscaled.
        """
        self._has_strategy = True
        self._is_last_backward = is_last_backward_of_step
        self._flush_backward = flush_backward

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Remember the module. `follow_device` makes its half-precision copies, where the module is by then."""
        self._end_window()
        self._module = module
        return module

    @property
    def _is_fit(self) -> bool:
        return (
            self._lightning_module is not None and self._lightning_module.trainer.state.fn == "fit"
        )

    @property
    def _lightning_module(self) -> LightningModule | None:
        if isinstance(self._module, lightning_types("pytorch.LightningModule")):
            return self._module
        return None

    def _new_window(self) -> HalfPrecisionWindow:
        is_evaluated = self._lightning_module is not None and not self._is_fit
        return HalfPrecisionWindow(self._module, self.dtype, self.keep_fp32, frozen=is_evaluated)

    def follow_device(self, device: torch.device, *, host: torch.device | None = None) -> None:
        """Make the half-precision copies on `device`, and move the scales there or to the weights' `host`."""
        self._compute_device = device
        self._device = host or device
        self._full_accumulation.begin()
        self._begin_window(self._new_window())
        self.optimizer_steps.to(self._device)

    def _begin_window(self, window: HalfPrecisionWindow) -> None:
        self.window = window
        self.gradients = BackwardGradients(window)
        self._user_steps = UserSteps(
            window,
            owns=self._owns,
            has_overflowed=self._has_overflowed_for_user,
            evaluate=self._evaluate_for_user,
            update_context=lambda optimizer: self.update_context(optimizer),
        )

    def _end_window(self) -> None:
        if self._user_steps is not None:
            self._user_steps.remove()
            self._user_steps = None
        if self.gradients is not None:
            self.gradients.clear()
            self.gradients = None
        if self.window is not None:
            self.window.end()
            self.window = None

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Raise an error for a strategy that cannot work, and guard per-step schedules against skipped steps."""
        trainer: Any = None
        if self._lightning_module is not None:
            trainer = self._lightning_module.trainer
        if trainer is not None and not self._has_strategy:
            raise misconfiguration(
                f"`strategy` (={type(trainer.strategy).__name__}) does not know when to show half-precision "
                "parameters: DDP would be built on fp32 ones. Use strategy='hybrid_allreduce', which works with one "
                "device as well."
            )
        if trainer is not None:
            self.optimizer_steps.follow(optimizers)
        else:
            for optimizer in optimizers:
                self.optimizer_steps.of(optimizer)
        self._num_schedules = len(lr_schedulers)
        if self.loss_scale is not None:
            for config in lr_schedulers:
                self._schedules.guard(config)
        return model, optimizers, lr_schedulers

    # ---- forward ---------------------------------------------------------------------------------------------------

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Run on half-precision parameters under autocast.

        Matrix products take half operands, losses and other delicate functions are fp32.
        """
        assert self.window is not None
        with self.window.opened(), self._half_arithmetic():
            yield

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Run `training_step`, and leave the window open for its backward unless user code runs in between."""
        assert self.window is not None
        assert self._user_steps is not None
        self._user_steps.begin_step()
        self._follow_optimizers()
        self.window.open()
        stays_open = False
        try:
            with self._half_arithmetic():
                yield
            module = self._lightning_module
            stays_open = (
                self._is_automatic and module is not None and not runs_code_before_backward(module)
            )
        finally:
            if not stays_open:
                self.window.close()

    def _follow_optimizers(self) -> None:
        # A callback may have replaced some since the last step.
        if self._lightning_module is not None:
            self.optimizer_steps.follow(self._lightning_module.trainer.strategy.optimizers)

    @contextmanager
    def _half_arithmetic(self) -> Iterator[None]:
        # The default dtype stays fp32: what is logged or accumulated in a step is not rounded to fp16. Batches keep
        # their dtypes too: operands are cast where they are used, targets are not.
        with (
            torch.autocast(self._compute_device.type, dtype=self.dtype),
            self._emulation(),
            self._with_cure(),
        ):
            yield

    @contextmanager
    def _with_cure(self) -> Iterator[None]:
        # While the module still shows its half-precision parameters, of which the note speaks.
        try:
            yield
        except Exception as error:
            add_cure(error, self.precision)
            raise

    @contextmanager
    def _emulation(self) -> Iterator[None]:
        with ExitStack() as stack:
            if not self._is_arithmetic_on and self._compute_device.type == "cpu":
                from lightning_hybrid.precision.fp16_emulation import (
                    Fp16MatmulEmulation,
                )  # here: not on CUDA

                stack.enter_context(Fp16MatmulEmulation(with_products=self.dtype is torch.float16))
                self._is_arithmetic_on = True
                stack.callback(setattr, self, "_is_arithmetic_on", False)
            yield

    # ---- backward --------------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Multiply the loss by its scale in fp32, and call the hooks `on_before_backward`."""
        tensor = super().pre_backward(tensor, module)
        assert self.window is not None
        self.window.open()
        self.window.check_dtypes()
        return self._begin_backward(tensor, list(module.parameters()))

    def _begin_backward(self, loss: Tensor, parameters: list[nn.Parameter]) -> Tensor:
        assert self.gradients is not None
        self._scale = None
        if self.loss_scale is not None:
            self._scale = self.optimizer_steps.scale_for_backward()
            self._last_loss = loss.detach()
            # In fp32: a half-precision loss times a scale of 65,536 would overflow.
            loss = loss.float() * self._scale
        self.gradients.begin(parameters, self._scale, self._averages)
        return loss

    def _averages(self, parameter: Tensor) -> bool:
        return self._is_last_backward()

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward, with the arithmetic of forward for activations that `torch.utils.checkpoint` recomputes."""
        parameters = list(model.parameters())
        with self._in_backward(parameters):
            self.gradients.add_outside_terms(tensor)  # type: ignore[union-attr]
            super().backward(tensor, model, *args, **kwargs)

    @contextmanager
    def _in_backward(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        assert self.window is not None
        assert self.gradients is not None
        assert self._user_steps is not None
        self._user_steps.is_in_backward = True
        self.window.hooks.is_in_backward = True
        try:
            with self._emulation(), self._with_cure():
                yield
        except BaseException:
            self.gradients.abort(parameters)
            if self._is_automatic:
                self.window.close()
            raise
        finally:
            self._user_steps.is_in_backward = False
            self.window.hooks.is_in_backward = False

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Unscale the gradients, close the window, and then call the hooks `on_after_backward`."""
        assert self.window is not None
        assert self.gradients is not None
        try:
            self._flush_backward(tensor)
            parameters = list(module.parameters())
            if self._may_keep_scaled(module):
                self.gradients.keep_scaled(parameters)
            else:
                groups: Any = self.optimizer_steps.parameters_by_optimizer(parameters)
                self.gradients.finish(groups, self._scale, self._averages)
        finally:
            if module.automatic_optimization:
                self.window.close()
        return super().post_backward(tensor, module)

    def _may_keep_scaled(self, module: LightningModule) -> bool:
        """Return whether the optimizers unscale the gradients of this backward in their steps, unseen by others."""
        return self._is_last_backward() and self.steps_on_scaled(module)

    def steps_on_scaled(self, module: LightningModule) -> bool:
        """Return whether nothing but the steps of optimizers looks at gradients, and these take them scaled."""
        if not module.automatic_optimization:
            return False
        optimizers = module.trainer.strategy.optimizers
        for optimizer in optimizers:
            if not takes_scaled_gradients(optimizer, self._device):
                return False
            if not self._decides_alone(optimizer):
                return False
        return not grads_are_observed(optimizers, module)

    # ---- optimizer step --------------------------------------------------------------------------------------------

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Steppable,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, call hooks and clip, then step or skip the step whole."""
        # Gradients are the same on every rank after the all-reduce, and inf and nan survive a sum: all ranks take the
        # same decision with no further collective.
        assert isinstance(optimizer, Optimizer)
        assert self.window is not None
        state = self.optimizer_steps.of(optimizer)
        if evaluates_closure(optimizer) and not _does_nothing(closure):
            return self._step_with_closure(optimizer, state, model, closure, **kwargs)

        closure_result = closure()
        # The learning rate of this step may depend on how the last step ended. It is not needed before.
        self.run_deferred_schedules()
        state.skip_flag = None
        with self.window.shut():
            if closure_result is None and model.automatic_optimization:
                # `training_step` returned None, so there was no backward. The gradients of earlier batches go.
                for parameter in parameters_of(optimizer):
                    parameter.grad = None
                self._after_closure(model, optimizer)
                return closure_result
            self._update(optimizer, state, model, **kwargs)
        return closure_result

    def _update(
        self, optimizer: Optimizer, state: OptimizerStepState, model: Any, **kwargs: Any
    ) -> None:
        assert self.gradients is not None
        largest = self._largest_gradient(optimizer, state)
        if any(id(parameter) in self.gradients.scaled for parameter in parameters_of(optimizer)):
            # This calls the hooks, none of which reads gradients.
            self._after_closure(model, optimizer)
            found_inf = self._step_on_scaled(optimizer, state, **kwargs)
        else:
            found_inf = self._verdict(optimizer, state)
            self._after_closure(model, optimizer)
            self._step_or_skip(optimizer, state, found_inf, **kwargs)
        if found_inf is not None:
            state.count(found_inf, largest)
            if state.skip_flag is None and len(self._schedules) > 0:
                state.skip_flag = SkipFlag(found_inf)
            self._stop_if_stuck(state, model)

    def _largest_gradient(self, optimizer: Optimizer, state: OptimizerStepState) -> Tensor | None:
        # Where all ranks have the same gradients; for the first steps of a dynamic scale.
        assert self.gradients is not None
        is_alone = self._is_automatic and not self._agree_on_overflow
        if (
            state.loss_scale is None
            or not state.loss_scale.wants_largest
            or state.grad_scale is None
            or not is_alone
        ):
            return None
        scaled = self.gradients.scaled
        divisor = torch.ones_like(state.grad_scale)
        if scaled:
            divisor = state.grad_scale
        if self.largest_of_parts is not None:  # each rank has parts
            return self.largest_of_parts(parameters_of(optimizer)) / divisor
        gradients = []
        for parameter in parameters_of(optimizer):
            gradient = scaled.get(id(parameter), parameter.grad)
            if gradient is not None and gradient.numel() > 0:
                gradients.append(gradient)
        if not gradients:
            return None
        norms = torch._foreach_norm(gradients, float("inf"))
        return torch.stack([norm.float() for norm in norms]).amax() / divisor

    def _verdict(self, optimizer: Optimizer, state: OptimizerStepState) -> Tensor | None:
        """Return 1.0 if a gradient is inf or nan, else 0.0, or None without a loss scale."""
        assert self.gradients is not None
        if state.loss_scale is None:
            return None
        return self._agreed(self.gradients.found_inf(parameters_of(optimizer), device=self._device))

    @contextmanager
    def _running_step(self, optimizer: Optimizer) -> Iterator[None]:
        # A manual loop steps inside of `training_step`, and so of its autocast.
        assert self._user_steps is not None
        self._user_steps.are_ignored = True
        try:
            with (
                torch.autocast(self._compute_device.type, enabled=False),
                self.update_context(optimizer),
            ):
                yield
        finally:
            self._user_steps.are_ignored = False

    def _step_on_scaled(
        self, optimizer: Optimizer, state: OptimizerStepState, **kwargs: Any
    ) -> Tensor | None:
        assert self.gradients is not None
        scaled_gradients = self.gradients.given_scaled(list(parameters_of(optimizer)))
        scaling = temporary_attributes(optimizer, grad_scale=state.grad_scale, found_inf=None)
        with scaled_gradients, scaling, self._running_step(optimizer):
            optimizer.step(**kwargs)
        if state.loss_scale is None:
            return None
        found_inf: Tensor | None = getattr(optimizer, "last_found_inf", None)
        if found_inf is None:
            # There was no gradient at all. The step counts as a clean one.
            return torch.zeros((), device=self._device)
        return found_inf

    def _step_or_skip(
        self,
        optimizer: Optimizer,
        state: OptimizerStepState,
        found_inf: Tensor | None,
        **kwargs: Any,
    ) -> None:
        if found_inf is None:
            with self._running_step(optimizer):
                optimizer.step(**kwargs)
            return
        if supports_device_skip(optimizer, self._device):
            scaling = temporary_attributes(optimizer, grad_scale=None, found_inf=found_inf)
            with scaling, self._running_step(optimizer):
                prepare_to_skip_(optimizer)
                optimizer.step(**kwargs)
            return
        # An optimizer that cannot skip by itself makes the host wait for the device here, once per step.
        state.skip_flag = SkipFlag(bool(found_inf))
        if not state.skip_flag.was_skipped():
            with self._running_step(optimizer):
                optimizer.step(**kwargs)

    def _step_with_closure(
        self,
        optimizer: Optimizer,
        state: OptimizerStepState,
        model: Any,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Let the optimizer evaluate the loss itself, as under `ddp`: it may do so at several weights."""
        assert self.window is not None
        self.run_deferred_schedules()
        state.skip_flag = None

        def evaluate() -> Any:
            result = self._evaluate(closure)
            self._after_closure(model, optimizer)
            return result

        def has_overflowed() -> bool:
            found_inf = self._verdict(optimizer, state)
            if found_inf is None:
                return False
            state.count(found_inf)
            self._stop_if_stuck(state, model)
            return bool(found_inf)

        step = ClosureStep(self.window, evaluate=evaluate, has_overflowed=has_overflowed)
        with self.window.shut(), self._running_step(optimizer):
            result = step.run(optimizer, **kwargs)
        if step.was_skipped:
            state.skip_flag = SkipFlag(True)
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure inside of an optimizer's step, and close the window after it."""
        assert self.window is not None
        if self._is_automatic:
            return closure()  # opens and closes the window by itself
        with self.window.opened(), self._half_arithmetic():
            return closure()

    @property
    def _is_automatic(self) -> bool:
        return getattr(self._module, "automatic_optimization", True)

    # ---- steps that user code makes past Lightning -----------------------------------------------------------------

    def _owns(self, optimizer: Optimizer) -> bool:
        if self._module is None:
            return False
        module_parameters = set(map(id, self._module.parameters()))
        return any(id(parameter) in module_parameters for parameter in parameters_of(optimizer))

    def _state_for_user(self, optimizer: Optimizer) -> OptimizerStepState:
        """Return the state of an optimizer, or of the one that trains its parameters and may wrap it."""
        parameters = {id(parameter) for parameter in parameters_of(optimizer)}
        for state in self.optimizer_steps:
            if any(id(parameter) in parameters for parameter in parameters_of(state.optimizer)):
                return state
        return self.optimizer_steps.of(optimizer)

    def _has_overflowed_for_user(self, optimizer: Optimizer) -> bool:
        gradients = [
            parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None
        ]
        if all(record_of(gradient) is None for gradient in gradients):
            return False  # user code has made them: no loss scale was in them, and none of ours counts this step
        state = self._state_for_user(optimizer)
        found_inf = self._verdict(optimizer, state)
        if found_inf is None:
            return False
        state.count(found_inf)
        return bool(found_inf)

    def _evaluate_for_user(self, closure: Callable[[], Any]) -> Any:
        assert self.window is not None
        with torch.enable_grad(), self.window.opened(), self._half_arithmetic():
            return closure()

    def _stop_if_stuck(
        self, state: OptimizerStepState, model: Any, *, is_end: bool = False
    ) -> None:
        # Only where the host knows of a skip, and at logged steps: else it would wait for the device in each step.
        flag = state.skip_flag
        every = model.trainer.log_every_n_steps
        is_logged = every > 0 and (model.trainer.global_step + 1) % every == 0
        if is_end or is_logged or (flag is not None and flag.is_known and flag.was_skipped()):
            self._raise_if_stuck(state, model, step=f"global step {model.trainer.global_step}")

    def _raise_if_stuck(self, state: OptimizerStepState, model: nn.Module, *, step: str) -> None:
        assert self.gradients is not None
        raise_if_stuck(state, model, self._last_loss, gradient_of=self.gradients.of, step=step)

    # ---- schedules -------------------------------------------------------------------------------------------------

    def _may_put_off_schedules(self) -> bool:
        # On CUDA, unless the rate is read before the next step: logged, or scheduled by epochs as well.
        trainer = self._module.trainer
        every = trainer.log_every_n_steps
        next_is_logged = every > 0 and (trainer.global_step + 1) % every == 0
        all_by_steps = len(self._schedules) == self._num_schedules
        return (
            self._device.type == "cuda"
            and all_by_steps
            and not next_is_logged
            and not trainer.is_last_batch
        )

    def run_deferred_schedules(self) -> None:
        """Make the schedules' steps that wait for an optimizer step's flag: before a checkpoint, and at the end."""
        self._schedules.run_deferred()

    def on_train_end(self) -> None:
        """Run deferred schedules, and raise `EndlessOverflowError` if no logged step has seen the overflow yet."""
        self.run_deferred_schedules()
        for state in self.optimizer_steps:
            self._stop_if_stuck(state, self._lightning_module, is_end=True)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return loss scales and skip counters of all optimizers: plain numbers."""
        if self.loss_scale is None:
            return {}
        return self.optimizer_steps.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the checkpoint's loss scales and counters."""
        if state_dict:
            self.optimizer_steps.load_state_dict(state_dict)

    # ---- after training --------------------------------------------------------------------------------------------

    def close_window(self) -> None:
        """Show fp32 parameters, wherever a step has ended: after an error, or without a backward."""
        if self.window is not None:
            self.window.close()

    def end_run(self) -> None:
        """Leave the module with its fp32 parameters, before Lightning moves it away."""
        self._end_window()

    def teardown(self) -> None:
        """Leave the module with its fp32 parameters, and give schedulers their own class back."""
        self._end_window()
        self._module = None
        self._full_accumulation.end()
        self._schedules.release()
        self.optimizer_steps.release()
        self._last_loss = None
        self._scale = None
        self.largest_of_parts = None
        self.update_context = nullcontext
        self._has_strategy = False
        self._is_last_backward = partial(bool, True)
        self._flush_backward = torch.is_tensor


def _does_nothing(closure: Callable[[], Any]) -> bool:
    # Lightning's stand-in for the closure of `optimizer.step()` in manual optimization.
    return getattr(closure, "__name__", "") == "do_nothing_closure"
