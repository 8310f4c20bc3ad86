"""Half-precision training with fp32 master weights, as a Lightning precision plugin.

Methods stand in the order in which a run calls them: module conversion, then per step forward, backward, optimizer
step, then checkpoint, then teardown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.lightning_names import lightning_types, misconfiguration
from lightning_hybrid.precision.full_accumulation import FullAccumulation
from lightning_hybrid.precision.loss_scale import LossScale, loss_scale_from
from lightning_hybrid.precision.master_step import MasterStep
from lightning_hybrid.precision.master_weights import MasterWeights, sum_gradients_
from lightning_hybrid.precision.optimizer_protocol import (
    DirectSteps,
    check_optimizer,
    grads_are_observed,
    parameters_of,
    supports_fused_master_step,
)
from lightning_hybrid.precision.schedule_guard import ScheduleGuard
from lightning_hybrid.precision.skipped_steps import OptimizerStepState, OptimizerStepStates, SkipFlag, raise_if_stuck
from lightning_hybrid.precision.unscaled_grads import MicrobatchMixin, UnscaledGradients

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import Steppable
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision as _Base
else:
    _Base = object


class MasterWeightMixin(MicrobatchMixin, _Base):
    """A plugin for an fp16 (or bf16) model and gradients with fp32 masters, optimizer state and normalisation layers.

    One step, with scale `s`, masters `w` and the loss `L`:

        forward, backward   g16 = grad of s * L at half(w)              fp16; matrix products accumulate in fp32
        all-reduce          g16 <- mean over ranks of g16
        unscale             g   = fp32(g16) / s                         what hooks and clipping see in `p.grad`
        skip or step        any(g is inf or nan): w unchanged, s backs off;  else w <- optimizer(w, g)
        copy                model <- half(w)

    The gradients of a step of several batches (`accumulate_grad_batches`) are added up in fp32 and rounded once: after
    each batch but the last they are taken out of `p.grad`, and into the last backward they go back as a sum.

    LARS and LAMB (on a CPU: if `fused=True`) do all from *unscale* to *copy* themselves, unless clipping or a hook is
    promised fp32 gradients; `p.grad` then stays scaled fp16.

    In manual optimization `p.grad` is fp32 and unscaled after each `manual_backward`, and each optimizer has a loss
    scale of its own. A backward takes the smallest of those that it can reach, and they go on from it.

    Parameters keep their identity and their place in `param_groups`; checkpoints hold the fp32 masters and load
    anywhere. Outside of fit, validate, test and predict the module is fp32. More in this folder's `README.md`.

    Args:
        precision: `"16-true"`, or `"bf16-true"`, which has fp32's range and therefore no loss scale.
        loss_scale: `"dynamic"`, a power of two for a fixed scale, or a `LossScale`.
        keep_fp32: module types that stay fp32 like the normalisation layers (their own tensors, not submodules').

    Raises:
        ValueError: unknown `precision`; a `loss_scale` that is no power of two; a `loss_scale` with bf16.
        RuntimeError: in training, after 40 skipped steps in a row; asked at logged steps and at the end.

    Source: Micikevicius et al. 2017 (arXiv:1710.03740); LARS on masters: Jia et al. 2018 (arXiv:1807.11205).
    """

    precision: Literal["16-true", "bf16-true"]

    def __init__(
        self,
        precision: Literal["16-true", "bf16-true"] = "16-true",
        loss_scale: str | float | LossScale | None = None,
        keep_fp32: tuple[type[nn.Module], ...] = (),
    ) -> None:
        if precision not in ("16-true", "bf16-true"):
            raise ValueError(f'`precision` (={precision!r}) must be "16-true" or "bf16-true" for master weights.')
        if precision == "bf16-true" and loss_scale is not None:
            raise ValueError(
                f'`loss_scale` (={loss_scale!r}) has no meaning with precision="bf16-true": bf16 has the range of fp32 '
                "and gradients do not underflow. Leave it out."
            )
        self.precision = precision
        self.dtype = torch.float16 if precision == "16-true" else torch.bfloat16
        self.keep_fp32 = tuple(keep_fp32)
        scale = loss_scale_from("dynamic" if loss_scale is None else loss_scale)
        self.optimizer_steps = OptimizerStepStates(scale if precision == "16-true" else None)
        self.masters: MasterWeights | None = None
        self._module: Any = None
        self._device = self._compute_device = torch.device("cpu")
        self._schedules = ScheduleGuard(self.optimizer_steps.skip_flags_of, self._may_put_off_schedules)
        self._num_schedules = 0
        self._has_strategy = False  # one that knows fp32 masters, see `connect_strategy`
        self._is_last_backward: Callable[[], bool] = partial(bool, True)  # can be pickled, for `hybrid_allreduce_spawn`
        self._unscaled = UnscaledGradients()
        self._last_loss: Tensor | None = None
        self._scale: Tensor | None = None  # of the loss in the last backward
        self._step: MasterStep | None = None
        self._full_accumulation = FullAccumulation()
        self._direct_steps: list[DirectSteps] = []

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of the first optimizer; None with bf16."""
        return self.optimizer_steps[0].loss_scale

    @property
    def num_skipped_steps(self) -> int:
        """Number of skipped steps of all optimizers. Reading it waits for the device."""
        return sum(int(state.num_skipped) for state in self.optimizer_steps)

    # ---- before training -------------------------------------------------------------------------------------------

    def connect_strategy(self, *, is_last_backward_of_step: Callable[[], bool]) -> None:
        """Take what only a strategy knows. A strategy that calls this saves and loads the fp32 masters.

        Args:
            is_last_backward_of_step: returns whether the backward in progress averages over ranks, for a step after it.
        """
        self._has_strategy, self._is_last_backward = True, is_last_backward_of_step

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert in place; in a fit only `follow_device` does. fp32 values are cloned before the cast."""
        if self.masters is not None:  # of an earlier run: its module must be fp32 to be cloned exactly
            self.masters.restore()
        self._module = module
        if not self._is_fit:
            self._convert()
        return module

    @property
    def _is_fit(self) -> bool:
        return self._lightning_module is not None and self._lightning_module.trainer.state.fn == "fit"

    @property
    def _lightning_module(self) -> LightningModule | None:
        is_one = isinstance(self._module, lightning_types("pytorch.LightningModule"))
        return self._module if is_one else None

    def _convert(self) -> None:
        assert self._module is not None
        is_evaluated = self._lightning_module is not None and not self._is_fit
        self.masters = MasterWeights(self._module, self.dtype, self.keep_fp32, frozen=is_evaluated)
        self.masters.hooks.step_context = self.forward_context

    def follow_device(self, device: torch.device, *, host: torch.device | None = None) -> None:
        """Move masters and loss scale to the module's `device`, or the `host` that has them; in a fit, convert now."""
        self._compute_device, self._device = device, host or device
        self._full_accumulation.begin()
        # Optimizers were made before, so that what their constructors make of parameters, such as accumulators and slow
        # weights, is fp32.
        if self._is_fit:
            self._convert()
        if self.masters is not None:
            self.masters.follow_device()
            self._step = MasterStep(self.masters, self._device)
        self.optimizer_steps.to(self._device)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Refuse strategies and optimizers that cannot work; guard per-step schedules against skipped steps."""
        trainer: Any = None if self._lightning_module is None else self._lightning_module.trainer
        # Refused before training, and not noticed in a checkpoint.
        if trainer is not None and not self._has_strategy:
            raise misconfiguration(
                f"`strategy` (={type(trainer.strategy).__name__}) does not know master weights: it would save the fp16 "
                "weights in checkpoints and load optimizer state in fp16. Use strategy='hybrid_allreduce', which works "
                "with one device as well."
            )
        for optimizer in optimizers:
            check_optimizer(optimizer, self.precision)
            self.optimizer_steps.of(optimizer)
            step = partial(self._step_past_lightning, optimizer)
            self._direct_steps.append(DirectSteps(optimizer, step, lambda: self._step is None or self._step.is_running))
        if trainer is not None:
            from lightning_hybrid.precision.averaging import average_masters  # here: only a trainer has callbacks

            average_masters(trainer.callbacks)
        self._num_schedules = len(lr_schedulers)
        if self.loss_scale is not None:
            for config in lr_schedulers:
                self._schedules.guard(config)
        return model, optimizers, lr_schedulers

    # ---- forward and backward --------------------------------------------------------------------------------------

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Run under autocast: matrix products take half operands, losses and other delicate functions are fp32."""
        # The default dtype stays fp32: what is logged or accumulated in a step is not rounded to fp16. Batches keep
        # their dtypes too: operands are cast where they are used, targets are not.
        with torch.autocast(self._compute_device.type, dtype=self.dtype), self._arithmetic():
            yield

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.masters is not None and not self.masters.hooks.is_in_step:
                stack.enter_context(self.masters.hooks.in_step())
                if self._compute_device.type == "cpu":
                    from lightning_hybrid.precision.fp16_emulation import Fp16MatmulEmulation  # here: not on CUDA

                    stack.enter_context(Fp16MatmulEmulation(with_products=self.dtype is torch.float16))
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Multiply the loss by its scale in fp32, and call the hooks `on_before_backward`."""
        assert self.masters is not None
        is_manual, averages = not module.automatic_optimization, self._is_last_backward()
        self._scale = None if self.loss_scale is None else self.optimizer_steps.scale_for_backward()
        self._unscaled.prepare_for_backward(self._scale, sums=is_manual, averages=lambda _: averages)
        if averages:
            self.masters.return_sums()
        if self._scale is not None:
            self._last_loss = tensor.detach()
            # In fp32: a half-precision loss times a scale of 65,536 would overflow.
            tensor = tensor.float() * self._scale
        return super().pre_backward(tensor, module)

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward; activations that `torch.utils.checkpoint` recomputes are computed as in forward."""
        with self._arithmetic():
            super().backward(tensor, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the hooks `on_after_backward`; sum up in fp32 the gradients of a batch that is not its step's last."""
        loss = super().post_backward(tensor, module)
        assert self.masters is not None
        is_local, to_fp32 = not self._is_last_backward(), self.masters.gradient_fp32
        if not module.automatic_optimization:
            # Unscaled at once: user code may read, clip and change them from now on.
            for parameters in self.optimizer_steps.parameters_by_optimizer(module.parameters()):
                self._unscaled.unscale(parameters, self._scale, to_fp32=to_fp32, is_local=lambda _: is_local)
            self._unscaled.put_back()
        elif is_local:
            sum_gradients_(self.masters.pairs.values())
        return loss

    # ---- optimizer step --------------------------------------------------------------------------------------------

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, call hooks and clip, then step on the masters or skip the step whole."""
        # Gradients are the same on every rank after the all-reduce, and inf and nan survive a sum: all ranks take the
        # same decision with no further collective.
        assert isinstance(optimizer, Optimizer)
        assert self._step is not None and self.masters is not None  # noqa: PT018
        state = self.optimizer_steps.of(optimizer)
        closure_result = closure()
        self.run_deferred_schedules()  # this step's rate may depend on how the last one ended: it is needed only now
        state.skip_flag = None
        if closure_result is None and model.automatic_optimization:
            # `training_step` returned None: there was no backward; earlier batches' gradients go, as by `zero_grad`.
            self.masters.drop_sums()
            self._after_closure(model, optimizer)
            return closure_result
        largest = self._largest_gradient(optimizer, state)
        if self._may_step_in_one_pass(optimizer, model):
            self._after_closure(model, optimizer)  # calls the hooks; none of them looks at gradients
            found_inf = self._step.in_one_pass(optimizer, state, **kwargs)
        else:
            found_inf = self._unscale_(optimizer, state)
            self._after_closure(model, optimizer)  # hooks and clipping see fp32 gradients, unscaled
            self._step.from_unscaled(optimizer, state, found_inf, **kwargs)
        if found_inf is not None:
            state.count(found_inf, largest)
            if state.skip_flag is None and len(self._schedules) > 0:
                state.skip_flag = SkipFlag(found_inf)
            self._stop_if_stuck(state, model)
        return closure_result

    def _largest_gradient(self, optimizer: Optimizer, state: OptimizerStepState) -> Tensor | None:
        # Where all ranks have the same gradients; for the first steps of a dynamic scale.
        scale, is_alone = state.loss_scale, self._is_automatic and not self._agree_on_overflow
        if scale is None or not scale.wants_largest or state.grad_scale is None or not is_alone:
            return None
        if self.masters is not None and self.masters.largest is not None:  # each rank has parts
            return self.masters.largest(parameters_of(optimizer)) / state.grad_scale
        if not (gradients := [g for p in parameters_of(optimizer) if (g := p.grad) is not None and g.numel()]):
            return None
        norms = torch._foreach_norm(gradients, float("inf"))
        return torch.stack([norm.float() for norm in norms]).amax() / state.grad_scale

    def _may_step_in_one_pass(self, optimizer: Optimizer, model: LightningModule) -> bool:
        return (
            self._is_automatic
            and self._decides_alone(optimizer)
            and supports_fused_master_step(optimizer, self._device)
            and not grads_are_observed(optimizer, model)
            and not any(self._unscaled.of(parameter) for parameter in parameters_of(optimizer))
        )

    def _unscale_(self, optimizer: Optimizer, state: OptimizerStepState) -> Tensor | None:
        assert self.masters is not None
        parameters, scale = list(parameters_of(optimizer)), None
        if state.loss_scale is not None:
            # In manual optimization backward has unscaled its own: any others are the user's, and were never scaled.
            is_scaled = state.grad_scale is not None and self._is_automatic
            scale = state.grad_scale if is_scaled else torch.ones((), device=self._device)
        self._unscaled.unscale(parameters, scale, to_fp32=self.masters.gradient_fp32)
        return self._agreed(self._unscaled.found_inf(parameters), is_asked=scale is not None)

    @property
    def _is_automatic(self) -> bool:
        return getattr(self._module, "automatic_optimization", True)

    @contextmanager
    def _step_past_lightning(self, outer: Optimizer, optimizer: Optimizer) -> Iterator[None]:
        # User code steps `optimizer`, which is `outer` or within it: on the masters, or on nothing after overflow.
        state = self.optimizer_steps.of(outer)
        found_inf = self._unscale_(optimizer, state)
        assert self._step is not None
        with self._step.called_by_user(optimizer, is_skipped=found_inf is not None and bool(found_inf)):
            yield
        if found_inf is not None:
            state.count(found_inf)

    def _stop_if_stuck(self, state: OptimizerStepState, model: Any, *, is_end: bool = False) -> None:
        # Only where the host knows of a skip, and at logged steps: else it would wait for the device in each step.
        flag, every = state.skip_flag, model.trainer.log_every_n_steps
        is_logged = every > 0 and (model.trainer.global_step + 1) % every == 0
        if is_end or is_logged or (flag is not None and flag.is_known and flag.was_skipped()):
            raise_if_stuck(state, model, self._last_loss, step=f"global step {model.trainer.global_step}")

    # ---- schedules -------------------------------------------------------------------------------------------------

    def _may_put_off_schedules(self) -> bool:
        # On CUDA, unless the rate is read before the next step: logged, or scheduled by epochs as well.
        trainer = self._module.trainer
        every = trainer.log_every_n_steps
        next_is_logged = every > 0 and (trainer.global_step + 1) % every == 0
        all_by_steps = len(self._schedules) == self._num_schedules
        return self._device.type == "cuda" and all_by_steps and not next_is_logged and not trainer.is_last_batch

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
        return {} if self.loss_scale is None else self.optimizer_steps.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the checkpoint's loss scales and counters."""
        if state_dict:
            self.optimizer_steps.load_state_dict(state_dict)

    # ---- after training --------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Make the module fp32 again, with the masters' values; give schedulers their own class back."""
        if self.masters is not None:
            self.masters.restore()
            self.masters = self._step = self._module = None
        self._full_accumulation.end()
        for steps in self._direct_steps:
            steps.remove()
        self._direct_steps.clear()
        self._schedules.release()
        self._unscaled.clear()
        self.optimizer_steps.release()
        self._last_loss = self._scale = None
        self._has_strategy, self._is_last_backward = False, partial(bool, True)
