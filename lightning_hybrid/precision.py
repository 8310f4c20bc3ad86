"""Half-precision training with fp32 master weights, as a Lightning precision plugin.

Methods stand in the order in which a run calls them: module conversion, then per step forward, backward, optimizer
step, then checkpoint, then teardown.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_hybrid.half_arithmetic import HalfOperandsFullArithmetic
from lightning_hybrid.loss_scale import LossScale, all_finite, loss_scale_from
from lightning_hybrid.masters import MasterWeights
from lightning_hybrid.scheduler_guard import guard, unguard

# From 2**16 a dynamic scale reaches its floor after 16 halvings, from its ceiling 2**24 after 24. Whoever still
# overflows after 40 steps in a row has non-finite numbers that no scale can cure.
MAX_SKIPPED_STEPS_IN_A_ROW = 40


class MasterWeightPrecision(Precision):
    """fp16 (or bf16) model, gradients and communication; fp32 masters, optimizer state and normalisation layers.

    One step, with scale ``s``, masters ``w`` and the loss ``L``:

        forward, backward   g16 = grad of s * L at half(w)              fp16; matrix products accumulate in fp32
        all-reduce          g16 <- mean over ranks of g16
        unscale             g   = fp32(g16) / s                         what hooks and clipping see in ``p.grad``
        skip or step        any(g is inf or nan): w unchanged, s backs off;  else w <- optimizer(w, g)
        copy                model <- half(w)

    Parameters keep their identity and their place in ``param_groups``; checkpoints hold the fp32 masters and load
    anywhere. After fit, validate, test and predict the module is fp32 again.

    Args:
        precision: ``"16-true"``, or ``"bf16-true"``, which has fp32's range and therefore no loss scale.
        loss_scale: ``"dynamic"``, a power of two for a fixed scale, or a
            :class:`~lightning_hybrid.loss_scale.LossScale`.
        keep_fp32: module types that stay fp32 beside the normalisation layers (their own tensors, not submodules').

    Raises:
        ValueError: unknown ``precision``; a ``loss_scale`` that is no power of two; a ``loss_scale`` with bf16.
        RuntimeError: in training, after 40 skipped steps in a row.

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
        self.loss_scale: LossScale | None = None
        if precision == "16-true":
            self.loss_scale = loss_scale_from("dynamic" if loss_scale is None else loss_scale)
        self.num_skipped_steps = 0
        self.masters: MasterWeights | None = None
        self._module: nn.Module | None = None
        self._device = torch.device("cpu")
        self._guarded: list[LRSchedulerConfig] = []
        self._num_skipped_in_a_row = 0
        self._skipped_last: dict[int, bool] = {}
        self._outcomes: list[Tensor] = []  # found_inf of each optimizer step since the scale was last updated
        self._unscaled: dict[int, tuple[Tensor, Tensor]] = {}  # parameter id -> (parameter, the gradient we unscaled)
        self._last_loss: Tensor | None = None

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
        if self.loss_scale is not None:
            self.loss_scale.to(device)

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
            _refuse_unless_it_can_be_skipped(optimizer, self.precision)
        if self.loss_scale is not None:
            for config in lr_schedulers:
                guard(config, self._was_skipped)
                self._guarded.append(config)
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
        self._take_back_unscaling()
        self._update_scale()
        if self.loss_scale is not None:
            self._last_loss = tensor.detach()
            tensor = tensor.float() * self.loss_scale.scale
        return super().pre_backward(tensor, module)

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
        closure_result = closure()
        if closure_result is None and model.automatic_optimization:
            # `training_step` returned None: there was no backward, so there is nothing to unscale or to step with.
            self._after_closure(model, optimizer)
            self._skipped_last[id(optimizer)] = False
            return closure_result
        found_inf = self._unscale_(optimizer)
        self._after_closure(model, optimizer)
        if found_inf is not None and bool(found_inf):
            self._skip(optimizer, model)
        else:
            self._step(optimizer, **kwargs)
        if found_inf is not None:
            self._outcomes.append(found_inf)
        return closure_result

    @torch.no_grad()
    def _unscale_(self, optimizer: Optimizer) -> Tensor | None:
        """Put fp32 gradients, divided by the scale, into ``p.grad``; say whether any is inf or nan (0-dim bool)."""
        assert self.masters is not None
        gradients = []
        for parameter in _parameters(optimizer):
            gradient = parameter.grad
            if gradient is None or self._is_unscaled(parameter):
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"A gradient of shape {tuple(gradient.shape)} is sparse (layout={gradient.layout}): master weights "
                    "and the all-reduce of buckets need dense gradients. Build the embedding with `sparse=False`."
                )
            if gradient.dtype is self.dtype:
                twin = self.masters.twin_of(parameter)
                parameter.grad = gradient = gradient.float() if twin is None else twin.gradient_fp32()
            self._unscaled[id(parameter)] = (parameter, gradient)
            if gradient.numel() > 0:
                gradients.append(gradient)
        if self.loss_scale is None:
            return None
        if not gradients:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        torch._foreach_mul_(gradients, self.loss_scale.scale.reciprocal())
        return ~all_finite(gradients)

    def _step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        assert self.masters is not None
        twins = self.masters.of(optimizer)
        for twin in twins:
            twin.resync_()
            twin.master.grad = twin.low.grad
            twin.master.requires_grad_(twin.low.requires_grad)
        try:
            with self.masters.in_place_of_low(optimizer):
                optimizer.step(**kwargs)
        finally:
            for twin in twins:
                twin.master.grad = None
        with torch.no_grad():
            if twins:
                torch._foreach_copy_([twin.low for twin in twins], [twin.master for twin in twins])
        self._skipped_last[id(optimizer)] = False
        self._num_skipped_in_a_row = 0

    def _skip(self, optimizer: Optimizer, model: LightningModule) -> None:
        self._skipped_last[id(optimizer)] = True
        self.num_skipped_steps += 1
        self._num_skipped_in_a_row += 1
        if self._num_skipped_in_a_row >= MAX_SKIPPED_STEPS_IN_A_ROW:
            raise RuntimeError(self._diagnosis(optimizer, model))

    def _diagnosis(self, optimizer: Optimizer, model: LightningModule) -> str:
        assert self.loss_scale is not None
        assert self._last_loss is not None
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        bad = [
            names.get(id(parameter), "?")
            for parameter in _parameters(optimizer)
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        loss = float(self._last_loss.float().sum())
        finite = torch.isfinite(self._last_loss).all()
        cause = (
            "The loss itself is finite, so the gradients overflow in backward: look for a division by zero, a log or "
            "square root at 0, or fp16 activations above 65504 in the layers named."
            if finite
            else "The loss itself is not finite: look at the learning rate, at the data of this step, and for a log or "
            "division of 0 in the loss."
        )
        return (
            f"Gradients were inf or nan for {self._num_skipped_in_a_row} steps in a row, up to global step "
            f"{model.trainer.global_step}; the loss scale is {self.loss_scale.value:g} and no scale can cure this. "
            f"Last loss: {loss:g}. First parameters with non-finite gradients: {', '.join(bad[:3])} "
            f"({len(bad)} in all). {cause} The weights are those of the last good step; resume from the last "
            "checkpoint after the cure."
        )

    def _was_skipped(self, optimizer: Optimizer | None) -> bool:
        if optimizer is None:
            return any(self._skipped_last.values())
        return self._skipped_last.get(id(optimizer), False)

    def _is_unscaled(self, parameter: Tensor) -> bool:
        held = self._unscaled.get(id(parameter))
        return held is not None and held[1] is parameter.grad

    @torch.no_grad()
    def _take_back_unscaling(self) -> None:
        """Make gradients that outlived their step ready for another backward to be added to them.

        Usually ``zero_grad`` removed them. Where it did not (``set_to_none=False``, or a manual loop that adds up),
        they return to the model's dtype and to the current scale.
        """
        for parameter, gradient in self._unscaled.values():
            if parameter.grad is gradient:
                if self.loss_scale is not None:
                    gradient.mul_(self.loss_scale.scale)
                parameter.grad = gradient.to(parameter.dtype)
        self._unscaled.clear()

    @torch.no_grad()
    def _update_scale(self) -> None:
        """Let the scale follow the steps since the last backward.

        Only here, between backward passes: with several optimizers a change between the backward of one and the step
        of another would unscale the latter by the wrong factor. Scaled gradients still waiting for their step are
        brought to the new scale (a power of two: exact).
        """
        if self.loss_scale is None or not self._outcomes:
            return
        old = self.loss_scale.scale
        self.loss_scale.update(torch.stack(self._outcomes).any())
        self._outcomes.clear()
        ratio = self.loss_scale.scale / old
        for parameter in self._module.parameters() if self._module is not None else ():
            if parameter.grad is not None and not self._is_unscaled(parameter):
                parameter.grad.mul_(ratio)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and skip counters: plain numbers."""
        if self.loss_scale is None:
            return {}
        self._update_scale()
        return {
            "loss_scale": self.loss_scale.state_dict(),
            "num_skipped_steps": self.num_skipped_steps,
            "num_skipped_in_a_row": self._num_skipped_in_a_row,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the checkpoint's loss scale and counters."""
        if self.loss_scale is None or not state_dict:
            return
        self.loss_scale.load_state_dict(state_dict["loss_scale"])
        self.num_skipped_steps = int(state_dict["num_skipped_steps"])
        self._num_skipped_in_a_row = int(state_dict["num_skipped_in_a_row"])

    # ---- after training --------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """The module is fp32 again, with the masters' values; schedulers have their own class back."""
        if self.masters is not None:
            self.masters.restore()
            self.masters = None
            self._module = None
        for config in self._guarded:
            unguard(config)
        self._guarded.clear()
        self._unscaled.clear()
        self._skipped_last.clear()
        self._last_loss = None


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _refuse_unless_it_can_be_skipped(optimizer: Optimizer, precision: str) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    owns_closure = closure is not None and closure.default is inspect.Parameter.empty
    if isinstance(optimizer, LBFGS) or owns_closure:
        raise MisconfigurationException(
            f"`optimizer` (={type(optimizer).__name__}) must not run the closure by itself with "
            f"precision={precision!r}: gradients have to be unscaled and checked between backward and "
            "step, and LBFGS-like optimizers evaluate the loss inside `step`. Use another optimizer, or "
            "precision='32-true'."
        )
    if hasattr(optimizer, "consolidate_state_dict"):
        raise MisconfigurationException(
            f"`optimizer` (={type(optimizer).__name__}) shards its parameters over ranks and keeps references of its "
            f"own to them, which master weights cannot replace. Use precision='32-true' or an unsharded optimizer."
        )
