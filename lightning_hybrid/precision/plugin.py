"""Lightning precision plugin for half-precision training with fp32 master weights.

Methods are in the order in which a run calls them: module conversion, then forward, backward and optimizer step of each
training step, then checkpoint and teardown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
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
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
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

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import Steppable
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision as _Base
else:
    _Base = object


class MasterWeightMixin(MicrobatchMixin, _Base):
    """Precision plugin for fp16 or bf16 training with fp32 master weights and optimizer state.

    One step with loss scale `s`, weights `w` and loss `L`:

        open                w16 = half(w)                               the module shows w16
        forward, backward   g16 = grad of s * L at w16                  matrix products accumulate in fp32
        all-reduce          g16 <- mean over ranks of g16
        close, unscale      g   = fp32(g16) / s                         the module shows w, and `p.grad` is g
        skip or step        any(g is inf or nan): w unchanged, s backs off;  else w <- optimizer(w, g)

    Outside of forward and backward, parameters, gradients and optimizer state are the user's own fp32 objects. This
    includes every hook after a backward (`on_after_backward` and later), optimizers, callbacks and checkpoints.

    In manual optimization, parameters are in half precision inside of `training_step`, except while an optimizer steps.
    After each `manual_backward`, `p.grad` is fp32 and unscaled. Each optimizer has a loss scale of its own. A backward
    uses the smallest scale of the optimizers that it can reach, and sets it for all of these.

    If a step has several batches (`accumulate_grad_batches`), their gradients are summed in fp32 in `p.grad`. The sum
    is rounded once, for the last backward.

    If no other code reads gradients, LARS and LAMB (on a CPU with `fused=True`) unscale, check and update in their own
    passes. After such a step `p.grad` is None. See `README.md` in this folder.

    Args:
        precision: `"16-true"` or `"bf16-true"`. bf16 needs no loss scale, because it has the range of fp32.
        loss_scale: `"dynamic"` (default), a power of two for a fixed scale, or a `LossScale`.
        keep_fp32: Module types whose own parameters stay in fp32, as those of normalization layers do. Their submodules
            are converted.

    Attributes:
        window: Parameters of the module in both precisions. None outside of a run.
        gradients: Gradients of these parameters. None outside of a run.

    Raises:
        ValueError: `precision` is unknown, `loss_scale` is not a power of two, or `loss_scale` is set with bf16.
        RuntimeError: 40 steps in a row were skipped. Raised in training, at a logged step or at the end.

    Sources: Micikevicius et al. 2017 (arXiv:1710.03740). LARS with fp32 weights: Jia et al. 2018 (arXiv:1807.11205).
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
                f'`precision` (={precision!r}) must be "16-true" or "bf16-true" for training with fp32 master '
                "weights. Set one of these, or leave the plugin out."
            )
        if precision == "bf16-true" and loss_scale is not None:
            raise ValueError(
                f'`loss_scale` (={loss_scale!r}) must not be set with precision="bf16-true", because gradients in '
                "bf16, which has the range of fp32, need no scaling. Leave it out."
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
        self._has_strategy = False  # whether the strategy has called `connect_strategy`
        # `hybrid_allreduce_spawn` pickles the plugin, and `partial(bool, True)` can be pickled.
        self._is_last_backward: Callable[[], bool] = partial(bool, True)
        # These two do nothing by default.
        self._flush_backward: Callable[[Tensor], object] = torch.is_tensor
        self._note_used_parameters: Callable[[Tensor], object] = torch.is_tensor
        self._has_warned_of_lost_sums = False
        self._last_loss: Tensor | None = None
        self._scale: Tensor | None = None  # scale of the loss in the last backward
        self._is_arithmetic_on = False
        self._full_accumulation = FullAccumulation()
        # Collective function that returns the largest gradient of all ranks, if ranks share the update.
        self.largest_of_parts: Callable[[Iterator[Tensor]], Tensor] | None = None
        # Context for every step of an optimizer that trains parameters of the module.
        self.update_context: Callable[[Optimizer], AbstractContextManager[Any]] = nullcontext

    @property
    def loss_scale(self) -> LossScale | None:
        """Loss scale of the first optimizer, or None in bf16 training."""
        return self.optimizer_steps[0].loss_scale

    @property
    def num_skipped_steps(self) -> int:
        """Total number of optimizer steps that were skipped after an overflow.

        Reading it waits for the device.
        """
        return sum(int(state.num_skipped) for state in self.optimizer_steps)

    # ---- before training -------------------------------------------------------------------------------------------

    def connect_strategy(
        self,
        *,
        is_last_backward_of_step: Callable[[], bool],
        flush_backward: Callable[[Tensor], object] = torch.is_tensor,
        note_used_parameters: Callable[[Tensor], object] = torch.is_tensor,
    ) -> None:
        """Register the functions of a strategy that the plugin calls around each backward pass.

        Args:
            is_last_backward_of_step: Function that returns whether the current backward averages gradients over ranks,
                because an optimizer step follows.
            flush_backward: Function that ends DDP's work for a backward, given the loss, before gradients are unscaled.
            note_used_parameters: Function that lets DDP search the graph of a loss for used parameters again. It is
                called before a backward whose loss has terms that were computed outside of the step.
        """
        self._has_strategy = True
        self._is_last_backward = is_last_backward_of_step
        self._flush_backward = flush_backward
        self._note_used_parameters = note_used_parameters

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the module, which `follow_device` will convert later, and return it unchanged.

        `follow_device` creates the half-precision copies when the module is on its device.
        """
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
        """Create half-precision copies of the parameters, and move the loss scales to their device.

        Args:
            device: Device that computes.
            host: Device of the weights, if it differs from `device`.
        """
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
        """Check the strategy, and guard per-step learning-rate schedules against skipped optimizer steps.

        Raises:
            MisconfigurationException: The strategy does not support this plugin.
        """
        trainer: Any = None
        if self._lightning_module is not None:
            trainer = self._lightning_module.trainer
        if trainer is not None and not self._has_strategy:
            raise misconfiguration(
                f"`strategy` (={type(trainer.strategy).__name__}) does not support MasterWeightPrecision, because "
                "the strategy would wrap the fp32 parameters in DDP instead of their half-precision copies. Use "
                "strategy='hybrid_allreduce', which also works with one device."
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
        """Enter a context in which parameters are in half precision and autocast is enabled.

        Matrix products use half-precision operands. Losses and other sensitive functions use fp32.
        """
        assert self.window is not None
        with self.window.opened(), self._half_arithmetic():
            yield

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Enter the context of `training_step`, in which parameters are in half precision.

        They stay in half precision for the backward, unless user code runs before it.
        """
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
        # A callback may have replaced optimizers since the last step.
        if self._lightning_module is not None:
            self.optimizer_steps.follow(self._lightning_module.trainer.strategy.optimizers)

    @contextmanager
    def _half_arithmetic(self) -> Iterator[None]:
        # The default dtype stays fp32, so that values which are logged or accumulated in a step are not rounded to
        # fp16. Batches keep their dtypes as well, because operands are cast where they are used, and targets are not.
        with (
            torch.autocast(self._compute_device.type, dtype=self.dtype),
            self._emulation(),
            self._with_cure(),
        ):
            yield

    @contextmanager
    def _with_cure(self) -> Iterator[None]:
        # The note is added here, where the module still shows its half-precision parameters, which the note mentions.
        try:
            yield
        except Exception as error:
            add_cure(error, self.precision)
            raise

    @contextmanager
    def _emulation(self) -> Iterator[None]:
        with ExitStack() as stack:
            if not self._is_arithmetic_on and self._compute_device.type == "cpu":
                # Imported here, because it is not needed on CUDA.
                from lightning_hybrid.precision.fp16_emulation import Fp16MatmulEmulation

                stack.enter_context(Fp16MatmulEmulation(with_products=self.dtype is torch.float16))
                self._is_arithmetic_on = True
                stack.callback(setattr, self, "_is_arithmetic_on", False)
            yield

    # ---- backward --------------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the `on_before_backward` hooks, and return the loss multiplied by the loss scale.

        The product is computed in fp32.
        """
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
            # The product is computed in fp32, because a half-precision loss times a scale of 65,536 would overflow.
            loss = loss.float() * self._scale
        self.gradients.begin(parameters, self._scale, self._averages)
        with self._in_backward(parameters):
            loss_with_terms = self.gradients.with_outside_terms(loss)
        if loss_with_terms is not loss:
            self._note_used_parameters(loss_with_terms)
        return loss_with_terms

    def _averages(self, parameter: Tensor) -> bool:
        return self._is_last_backward()

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass with the same half-precision arithmetic as the forward pass.

        Activations that `torch.utils.checkpoint` recomputes are then the same as in the forward pass.
        """
        parameters = list(model.parameters())
        with self._in_backward(parameters):
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
        """Unscale the gradients, switch the parameters to fp32, and call the `on_after_backward` hooks.

        In manual optimization, the parameters stay in half precision until `training_step` ends. Gradients stay scaled
        if the optimizers unscale them in their steps.
        """
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
        """Return whether the gradients of this backward pass may stay scaled until the optimizer step."""
        return self._is_last_backward() and self.steps_on_scaled(module)

    def steps_on_scaled(self, module: LightningModule) -> bool:
        """Return whether all optimizers accept scaled gradients and no other code reads gradients."""
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
        """Run the closure, hooks and gradient clipping, and then run or skip the optimizer step on all ranks."""
        # All ranks make the same decision without a further collective, because gradients are equal on all ranks after
        # the all-reduce, and inf and nan survive a sum.
        assert isinstance(optimizer, Optimizer)
        assert self.window is not None
        state = self.optimizer_steps.of(optimizer)
        if evaluates_closure(optimizer) and not _does_nothing(closure):
            return self._step_with_closure(optimizer, state, model, closure, **kwargs)

        closure_result = closure()
        # The learning rate of this step may depend on whether the last step was skipped. It is not needed earlier.
        self.run_deferred_schedules()
        state.skip_flag = None
        with self.window.shut():
            had_backward = closure_result is not None or not model.automatic_optimization
            if had_backward or self._has_complete_sums(optimizer, model):
                self._update(optimizer, state, model, **kwargs)
            else:
                # `training_step` returned None for the last batch of the step.
                self._drop_gradients(optimizer)
                self._after_closure(model, optimizer)
        return closure_result

    def _has_complete_sums(self, optimizer: Optimizer, model: Any) -> bool:
        """Return whether earlier batches of the step have left gradients that need no average over ranks."""
        if model.trainer.world_size > 1 or model.trainer.accumulate_grad_batches == 1:
            return False
        return any(parameter.grad is not None for parameter in parameters_of(optimizer))

    def _drop_gradients(self, optimizer: Optimizer) -> None:
        """Drop the gradients of earlier batches of a step whose last batch had no loss, and warn if there are any."""
        has_gradients = False
        for parameter in parameters_of(optimizer):
            has_gradients = has_gradients or parameter.grad is not None
            parameter.grad = None
        if has_gradients and not self._has_warned_of_lost_sums:
            self._has_warned_of_lost_sums = True
            rank_zero_warn(
                "`training_step` returned None for the last batch of an optimizer step, so the gradients of the "
                "earlier batches of this step were dropped. Ranks average gradients in the backward of the last batch. "
                "Return a loss of zero instead, such as `0 * loss`."
            )

    def _update(
        self, optimizer: Optimizer, state: OptimizerStepState, model: Any, **kwargs: Any
    ) -> None:
        assert self.gradients is not None
        largest = self._largest_gradient(optimizer, state)
        if any(id(parameter) in self.gradients.scaled for parameter in parameters_of(optimizer)):
            # This calls hooks, none of which reads gradients.
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
        """Return the magnitude of the largest unscaled gradient, or None if it is unknown or not needed.

        Only the first steps of a dynamic loss scale need it. It is unknown if the optimizer's gradients may differ
        between ranks.
        """
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
        if self.largest_of_parts is not None:  # Each rank has only a shard of the gradients.
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
        """Return 1.0 if a gradient contains inf or nan, else 0.0, or None without a loss scale."""
        assert self.gradients is not None
        if state.loss_scale is None:
            return None
        return self._agreed(self.gradients.found_inf(parameters_of(optimizer), device=self._device))

    @contextmanager
    def _running_step(self, optimizer: Optimizer) -> Iterator[None]:
        # In manual optimization the step runs inside of `training_step`, and therefore under its autocast.
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
            # There was no gradient, so the step counts as clean.
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
        # If an optimizer cannot skip by itself, the host waits for the device here, once per step.
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
        """Run a step of an optimizer that calls the closure itself, possibly several times."""
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
        """Evaluate a closure in half precision in the middle of an optimizer's step.

        Afterwards the parameters are in fp32.
        """
        assert self.window is not None
        if self._is_automatic:
            return closure()  # `closure` opens and closes the window itself.
        with self.window.opened(), self._half_arithmetic():
            return closure()

    @property
    def _is_automatic(self) -> bool:
        return getattr(self._module, "automatic_optimization", True)

    # ---- optimizer steps that user code makes without Lightning ----------------------------------------------------

    def _owns(self, optimizer: Optimizer) -> bool:
        if self._module is None:
            return False
        module_parameters = set(map(id, self._module.parameters()))
        return any(id(parameter) in module_parameters for parameter in parameters_of(optimizer))

    def _state_for_user(self, optimizer: Optimizer) -> OptimizerStepState:
        """Return the step state of an optimizer, or of another optimizer that shares parameters with it."""
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
            # User code computed the gradients without a loss scale, so no loss scale counts this step.
            return False
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
        # The check runs if the host knows that the step was skipped, and at logged steps. If it ran in each step, the
        # host would have to wait for the device each time.
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
        # Schedules are deferred only on CUDA, and only if nothing reads the learning rate before the next step, such as
        # a logger or a schedule that steps once per epoch.
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
        """Run the deferred learning-rate schedule steps, except those of skipped optimizer steps.

        It must be called before a checkpoint and at the end of training.
        """
        self._schedules.run_deferred()

    def on_train_end(self) -> None:
        """Run the deferred learning-rate schedule steps, and raise if too many steps overflowed in a row."""
        self.run_deferred_schedules()
        for state in self.optimizer_steps:
            self._stop_if_stuck(state, self._lightning_module, is_end=True)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scales and skip counters of all optimizers as plain numbers."""
        if self.loss_scale is None:
            return {}
        return self.optimizer_steps.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scales and skip counters of all optimizers from a checkpoint."""
        if state_dict:
            self.optimizer_steps.load_state_dict(state_dict)

    # ---- after training --------------------------------------------------------------------------------------------

    def close_window(self) -> None:
        """Switch the parameters back to fp32 if a step has left them in half precision.

        This happens after an error, or if no backward follows `training_step`.
        """
        if self.window is not None:
            self.window.close()

    def end_run(self) -> None:
        """Restore the module's fp32 parameters before Lightning moves the module to the CPU."""
        self._end_window()

    def teardown(self) -> None:
        """Restore the module's fp32 parameters and LR schedulers, and drop all references to the run."""
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
        self._note_used_parameters = torch.is_tensor


def _does_nothing(closure: Callable[[], Any]) -> bool:
    # Lightning passes this closure for `optimizer.step()` in manual optimization.
    return getattr(closure, "__name__", "") == "do_nothing_closure"
