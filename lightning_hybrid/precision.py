"""Half-precision training with fp32 master weights, as a Lightning precision plugin.

Methods stand in the order in which a run calls them: module conversion, then per step forward, backward, optimizer
step, then checkpoint, then teardown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.half_arithmetic import HalfOperandsFullArithmetic
from lightning_hybrid.handover import (
    does_all_by_itself,
    gradients_are_looked_at,
    is_between_batches_of_a_step,
    prepare_to_skip_,
    refuse_unless_it_can_be_skipped,
    skips_by_itself,
    told,
)
from lightning_hybrid.loss_scale import LossScale, loss_scale_from, unscale_
from lightning_hybrid.masters import MasterWeights, Twin, copy_to_low_
from lightning_hybrid.outside_writes import settle
from lightning_hybrid.overflow import Outcome, StepRecord, StepRecords, parameters_of, raise_if_stuck
from lightning_hybrid.scheduler_guard import ScheduleGuard
from lightning_hybrid.unscaled import UnscaledGradients


class MasterWeightPrecision(Precision):
    """fp16 (or bf16) model, gradients and communication; fp32 masters, optimizer state and normalisation layers.

    One step, with scale ``s``, masters ``w`` and the loss ``L``:

        forward, backward   g16 = grad of s * L at half(w)              fp16; matrix products accumulate in fp32
        all-reduce          g16 <- mean over ranks of g16
        unscale             g   = fp32(g16) / s                         what hooks and clipping see in ``p.grad``
        skip or step        any(g is inf or nan): w unchanged, s backs off;  else w <- optimizer(w, g)
        copy                model <- half(w)

    Of a step of several batches (``accumulate_grad_batches``) the gradients are added up in fp32 and rounded once:
    after each batch but the last they are taken out of ``p.grad``, and into the last backward they go back as a sum.

    Nothing in a step waits for the device where the optimizer skips by itself: torch's with ``fused=True``, our LARS
    and LAMB. Any other costs one wait, for the verdict. A schedule by steps costs one per step, for the step before:
    ``scheduler_guard``. LARS and LAMB (on a CPU: if ``fused=True``) also take over all from *unscale* to *copy*, in
    their own passes, from the fp16 gradients, unless clipping or a hook is promised fp32 ones
    (``handover.gradients_are_looked_at``). Where they do, ``p.grad`` is scaled and fp16 also after the step.

    In manual optimization each optimizer has a loss scale of its own. A backward takes the smallest of those whose
    parameters require gradients at that moment, and they go on from it: with ``toggle_optimizer`` just one.

    Parameters keep their identity and their place in ``param_groups``; checkpoints hold the fp32 masters and load
    anywhere. After fit, validate, test and predict the module is fp32 again.

    Args:
        precision: ``"16-true"``, or ``"bf16-true"``, which has fp32's range and therefore no loss scale.
        loss_scale: ``"dynamic"``, a power of two for a fixed scale, or a
            :class:`~lightning_hybrid.loss_scale.LossScale`.
        keep_fp32: module types that stay fp32 beside the normalisation layers (their own tensors, not submodules').

    Raises:
        ValueError: unknown ``precision``; a ``loss_scale`` that is no power of two; a ``loss_scale`` with bf16.
        RuntimeError: in training, after 40 skipped steps in a row. An optimizer that skips by itself is asked at every
            ``log_every_n_steps``-th step and at the end.

    Source: Micikevicius et al. 2017 (arXiv:1710.03740); fp32 LARS on masters: Jia et al. 2018 (arXiv:1807.11205).
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
        self.records = StepRecords(scale if precision == "16-true" else None)
        self.masters: MasterWeights | None = None
        self._module: nn.Module | None = None
        self._device = torch.device("cpu")
        self._schedules = ScheduleGuard(self._outcomes_of, self._may_put_off_schedules)
        self._num_schedules = 0
        self._unscaled = UnscaledGradients()
        self._last_loss: Tensor | None = None

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of the first optimizer; None with bf16."""
        return self.records[0].loss_scale

    @property
    def loss_scales(self) -> list[LossScale]:
        """The loss scales of all optimizers; none with bf16."""
        return [record.loss_scale for record in self.records if record.loss_scale is not None]

    @property
    def num_skipped_steps(self) -> int:
        """Steps skipped so far, of all optimizers. Waits for the device: for logging, not for every step."""
        return sum(int(record.num_skipped) for record in self.records)

    # ---- before training -------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert in place; fp32 values are cloned before the cast."""
        if self.masters is not None:
            self.masters.restore()
        self.masters = MasterWeights(module, self.dtype, self.keep_fp32)
        self._module = module
        return module

    def follow_device(self, device: torch.device) -> None:
        """The module was moved to ``device``: masters and loss scale follow."""
        self._device = device
        if self.masters is not None:
            self.masters.follow_device()
        self.records.to(device)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Refuse strategies and optimizers that cannot work; guard per-step schedules against skipped steps."""
        trainer = self._module.trainer if isinstance(self._module, LightningModule) else None
        if trainer is not None and not getattr(trainer.strategy, "carries_master_weights", False):
            raise MisconfigurationException(
                f"`strategy` (={type(trainer.strategy).__name__}) does not know master weights: it would save the fp16 "
                "weights in checkpoints and load optimizer state in fp16. Use strategy='hybrid_allreduce', which works "
                "with one device as well."
            )
        for optimizer in optimizers:
            refuse_unless_it_can_be_skipped(optimizer, self.precision)
            self.records.of(optimizer)
        self._num_schedules = len(lr_schedulers)
        if self.loss_scale is not None:
            for config in lr_schedulers:
                self._schedules.guard(config)
        return model, optimizers, lr_schedulers

    # ---- forward and backward --------------------------------------------------------------------------------------

    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors of a batch in the compute dtype."""

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

        return apply_to_collection(data, dtype=Tensor, function=convert)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Autocast: matrix products take half operands, losses and other delicate functions are fp32.

        On a CPU without fp16 arithmetic, fp16 matrix products are emulated (``half_arithmetic``). The default dtype
        stays fp32: what is logged or accumulated in a step is not rounded to fp16.
        """
        emulated = self._device.type == "cpu" and self.dtype is torch.float16
        with (
            torch.autocast(self._device.type, dtype=self.dtype),
            HalfOperandsFullArithmetic() if emulated else nullcontext(),
        ):
            yield

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """The loss times the scale (fp32), and the hooks ``on_before_backward``."""
        self._unscaled.take_back()
        if self.masters is not None and not is_between_batches_of_a_step(module):
            self.masters.hand_over_sums()
        if self.loss_scale is not None:
            self._last_loss = tensor.detach()
            tensor = tensor.float() * self.records.scale_for_backward()
        return super().pre_backward(tensor, module)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """The hooks ``on_after_backward``; then gradients of a batch that is not its step's last go into fp32 sums."""
        loss = super().post_backward(tensor, module)
        if self.masters is not None and is_between_batches_of_a_step(module):
            self.masters.sum_gradients()
        return loss

    # ---- optimizer step --------------------------------------------------------------------------------------------

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Steppable,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Closure, unscale, hooks and clipping, then step on the masters, or skip it whole.

        Gradients are the same on every rank after the all-reduce, and inf and nan survive a sum: all ranks decide
        alike with no further collective.
        """
        assert isinstance(optimizer, Optimizer)
        record = self.records.of(optimizer)
        closure_result = closure()
        self.settle_schedules()  # this step's rate may hang on how the last one ended: it is needed only now
        record.outcome = None
        if closure_result is None and model.automatic_optimization:
            # `training_step` returned None: there was no backward, so there is nothing to unscale or to step with, and
            # what earlier batches of the step gave is dropped, as `zero_grad` would.
            if self.masters is not None:
                self.masters.drop_sums()
            self._after_closure(model, optimizer)
            return closure_result
        if self._may_hand_over(optimizer, model):
            self._after_closure(model, optimizer)
            found_inf = self._step_in_one_pass(optimizer, record, **kwargs)
        else:
            found_inf = self._unscale_(optimizer, record)
            self._after_closure(model, optimizer)
            self._step(optimizer, record, found_inf, **kwargs)
        if found_inf is not None:
            record.count(found_inf)
            if record.outcome is None and len(self._schedules) > 0:
                record.outcome = Outcome(found_inf)
            self._stop_if_stuck(record, model)
        return closure_result

    def _may_hand_over(self, optimizer: Optimizer, model: LightningModule) -> bool:
        return (
            does_all_by_itself(optimizer, self._device)
            and not gradients_are_looked_at(optimizer, model)
            and not any(self._unscaled.has(parameter) for parameter in parameters_of(optimizer))
        )

    def _step_in_one_pass(self, optimizer: Optimizer, record: StepRecord, **kwargs: Any) -> Tensor | None:
        """Hand over scaled gradients, the scale, and where the half copies are; say whether any was inf or nan."""
        with self._masters_hold_gradients(optimizer) as twins:
            copies = {twin.master: twin.low for twin in twins}
            with told(optimizer, grad_scale=record.grad_scale, found_inf=None, copies=copies):
                optimizer.step(**kwargs)
        if record.loss_scale is None:
            return None
        found_inf = getattr(optimizer, "last_found_inf", None)  # None: there was no gradient
        return torch.zeros((), device=self._device) if found_inf is None else found_inf

    @torch.no_grad()
    def _unscale_(self, optimizer: Optimizer, record: StepRecord) -> Tensor | None:
        """Put fp32 gradients, divided by the scale, into ``p.grad``; say whether any is inf or nan: 1.0 or 0.0."""
        assert self.masters is not None
        gradients = []
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None or self._unscaled.has(parameter):
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"A gradient of shape {tuple(gradient.shape)} is sparse (layout={gradient.layout}): master weights "
                    "and the all-reduce of buckets need dense gradients. Build the embedding with `sparse=False`."
                )
            if gradient.dtype is self.dtype:
                twin = self.masters.twin_of(parameter)
                parameter.grad = gradient = gradient.float() if twin is None else twin.gradient_fp32()
            self._unscaled.add(parameter, gradient, record.grad_scale)
            if gradient.numel() > 0:
                gradients.append(gradient)
        if record.loss_scale is None:
            return None
        if not gradients or record.grad_scale is None:
            return torch.zeros((), device=self._device)
        return unscale_(gradients, record.grad_scale)

    def _step(self, optimizer: Optimizer, record: StepRecord, found_inf: Tensor | None, **kwargs: Any) -> None:
        """Step with unscaled gradients. What cannot skip by itself makes the host wait here for ``found_inf``."""
        by_itself = found_inf is not None and skips_by_itself(optimizer, self._device)
        if found_inf is not None and not by_itself:
            record.outcome = Outcome(bool(found_inf))
            if record.outcome.was_skipped():
                return
        with self._masters_hold_gradients(optimizer) as twins:
            if by_itself:
                prepare_to_skip_(optimizer)
                with told(optimizer, grad_scale=None, found_inf=found_inf):
                    optimizer.step(**kwargs)
            else:
                optimizer.step(**kwargs)
            copy_to_low_(twins)

    @contextmanager
    def _masters_hold_gradients(self, optimizer: Optimizer) -> Iterator[list[Twin]]:
        """The masters, up to date, stand in the optimizer with the gradients of their low tensors."""
        assert self.masters is not None
        twins = self.masters.of(optimizer)
        for twin in twins:
            twin.resync_()
            twin.master.grad = twin.low.grad
            twin.master.requires_grad_(twin.low.requires_grad)
        try:
            with self.masters.in_place_of_low(optimizer):
                yield twins
            for twin in twins:
                settle(twin.low)
        finally:
            for twin in twins:
                twin.master.grad = None

    def _stop_if_stuck(self, record: StepRecord, model: LightningModule) -> None:
        """Look for endless overflow where the host knows of a skip, and at logged steps; see :meth:`on_train_end`."""
        outcome, every = record.outcome, model.trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_logged = every > 0 and (model.trainer.global_step + 1) % every == 0
        if is_logged or (outcome is not None and outcome.is_known and outcome.was_skipped()):
            raise_if_stuck(record, model, self._last_loss)

    # ---- schedules -------------------------------------------------------------------------------------------------

    def _outcomes_of(self, optimizer: Optimizer | None) -> Iterable[Outcome]:
        records = self.records if optimizer is None else [self.records.of(optimizer)]
        return [record.outcome for record in records if record.outcome is not None]

    def _may_put_off_schedules(self) -> bool:
        """On CUDA, unless the rate is looked at before the next step: logged, or scheduled by epochs as well."""
        assert isinstance(self._module, LightningModule)
        trainer = self._module.trainer
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        next_is_logged = every > 0 and (trainer.global_step + 1) % every == 0
        all_by_steps = len(self._schedules) == self._num_schedules
        return self._device.type == "cuda" and all_by_steps and not next_is_logged and not trainer.is_last_batch

    def settle_schedules(self) -> None:
        """Make the schedules' steps that wait for an optimizer step's outcome: before a checkpoint, and at the end."""
        self._schedules.settle()

    def on_train_end(self) -> None:
        """Settle schedules; endless overflow that no logged step has seen is an error now.

        Raises:
            RuntimeError: the last 40 steps or more were all skipped.
        """
        self.settle_schedules()
        for record in self.records:
            assert isinstance(self._module, LightningModule)
            raise_if_stuck(record, self._module, self._last_loss)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and skip counters, the first optimizer's and then the others': plain numbers."""
        return {} if self.loss_scale is None else self.records.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the checkpoint's loss scales and counters."""
        if state_dict:
            self.records.load_state_dict(state_dict)

    # ---- after training --------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """The module is fp32 again, with the masters' values; schedulers have their own class back."""
        if self.masters is not None:
            self.masters.restore()
            self.masters = None
            self._module = None
        self._schedules.release()
        self._unscaled.clear()
        self.records.release()
        self._last_loss = None
