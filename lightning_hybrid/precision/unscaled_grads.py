"""Gradients that were divided by the loss scale: none is divided twice, and one that outlives its step can go back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.precision.loss_scale import unscale_

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision as _Base

    from lightning_hybrid.precision.skipped_steps import OptimizerStepStates
else:
    _Base = object


@dataclass(eq=False)
class Unscaled:
    """One fp32 gradient in `p.grad` that was divided by a loss scale."""

    parameter: Tensor
    gradient: Tensor
    found_inf: Tensor | None = None  # whether it or one divided with it is inf or nan; None: not known, or no scale
    is_local: bool = False  # this rank's alone: the next backward that averages has to average it too


class UnscaledGradients:
    """All fp32 gradients in `p.grad` that were divided by a loss scale."""

    def __init__(self) -> None:
        self._held: dict[int, Unscaled] = {}
        self._aside: dict[int, Unscaled] = {}

    @torch.no_grad()
    def unscale(
        self,
        parameters: Iterable[Tensor],
        scale: Tensor | None,
        *,
        to_fp32: Callable[[Tensor], Tensor] | None = None,
        is_local: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        """Put fp32 gradients, divided by `scale`, into `p.grad`, and add to them what was set aside.

        Args:
            parameters: of one optimizer: one of their gradients that is inf or nan makes it skip its step. Those whose
                gradient was unscaled before are left alone.
            scale: what the gradients were multiplied by; None: they need no division and no check.
            to_fp32: the gradient of a half-precision parameter in fp32; None: a new tensor.
            is_local: returns whether a parameter's gradient was not averaged over ranks.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        new = [p for p in parameters if p.grad is not None and self.of(p) is None]
        asides = [self._aside.pop(id(parameter), None) for parameter in new]
        gradients = []
        for parameter, aside in zip(new, asides, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"A gradient of shape {tuple(gradient.shape)} is sparse (layout={gradient.layout}): master weights "
                    "and the all-reduce of buckets need dense gradients. Build the embedding with `sparse=False`."
                )
            if gradient.dtype.itemsize == 2:  # half precision
                # What was set aside may lie in the memory that `to_fp32` reuses, and both are needed for the sum.
                gradient = gradient.float() if to_fp32 is None or aside is not None else to_fp32(parameter)
            gradients.append(gradient)
        found_inf = None
        if scale is not None and (filled := [gradient for gradient in gradients if gradient.numel() > 0]):
            found_inf = unscale_(filled, scale)
            earlier = [aside.found_inf for aside in asides if aside is not None and aside.found_inf is not None]
            found_inf = torch.stack([found_inf, *earlier]).amax() if earlier else found_inf
        for parameter, gradient, aside in zip(new, gradients, asides, strict=True):
            total = gradient if aside is None else aside.gradient.add_(gradient)
            self._put(Unscaled(parameter, total, found_inf, is_local(parameter)))

    def _put(self, unscaled: Unscaled) -> None:
        parameter = unscaled.parameter
        # `grad_dtype` None allows a gradient of another dtype than the parameter's.
        if unscaled.gradient is not parameter.grad:
            parameter.grad_dtype = None
            parameter.grad = unscaled.gradient
        self._held[id(parameter)] = unscaled

    def found_inf(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """Return 1.0 if one of the gradients was inf or nan, else 0.0; None if none was checked."""
        held = (self.of(parameter) for parameter in parameters)
        found = {id(one.found_inf): one.found_inf for one in held if one is not None and one.found_inf is not None}
        return torch.stack(list(found.values())).amax() if len(found) > 1 else next(iter(found.values()), None)

    def of(self, parameter: Tensor) -> Unscaled | None:
        """Return what is known of `p.grad`; None where that is another gradient."""
        held = self._held.get(id(parameter))
        if held is None or parameter.grad is None:
            return None
        if held.gradient is parameter.grad:
            return held
        # DDP, once it knows the order of gradients, makes its buckets again and copies into them what is in `p.grad`,
        # rounded: the gradient itself is put back.
        if torch.equal(parameter.grad, held.gradient.to(parameter.grad.dtype)):
            self._put(held)
            return held
        return None

    @torch.no_grad()
    def prepare_for_backward(
        self, scale: Tensor | None, *, sums: bool = False, averages: Callable[[Tensor], bool] = lambda _: True
    ) -> None:
        """Make gradients that outlived their step ready for another backward, which adds to them.

        They return to the parameter's dtype and to the scale, or are set aside in fp32 until `unscale` and `put_back`.

        Args:
            scale: the loss scale of this backward; None: there is none.
            sums: whether gradients may be set aside.
            averages: returns whether this backward averages over ranks what it finds in a parameter's `grad`.
        """
        # Usually `zero_grad` removed them, and there is nothing to do. In a manual loop they often stay, and half
        # precision would round at each return: there those that need no further average are set aside.
        for held in list(self._held.values()):
            parameter, is_held = held.parameter, self.of(held.parameter) is not None
            gradient = parameter.grad
            if held.gradient.dtype is not parameter.dtype:
                # `grad_dtype` can only change while there is no gradient.
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype  # backward casts what it brings
            if gradient is None:
                continue
            if held.gradient.dtype is parameter.dtype:
                parameter.grad = gradient if scale is None else gradient.mul_(scale)
            elif is_held and sums and not (held.is_local and averages(parameter)):
                self._aside[id(parameter)] = held
            else:
                parameter.grad = (gradient if scale is None else gradient * scale).to(parameter.dtype)
        self._held.clear()

    @torch.no_grad()
    def put_back(self) -> None:
        """Make what is still set aside `p.grad` again: the backward brought nothing to add to it."""
        for unscaled in self._aside.values():
            self._put(unscaled)
        self._aside.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        self._held.clear()
        self._aside.clear()


class MicrobatchMixin(_Base):
    """Precision mixin: scale and sum the gradients of micro-batches, and agree with other stages whether to skip.

    The gradients of a stage are unscaled and checked by its own ranks alone, so the verdict is the largest of all
    stages', known before anything is written.
    """

    loss_scale: Any
    optimizer_steps: OptimizerStepStates
    _unscaled: UnscaledGradients
    _last_loss: Tensor | None
    _device: torch.device
    _agree_on_overflow: tuple[Callable[[Tensor], Tensor], ...] = ()
    _has_stages = False

    def connect_stages(self, agree: Callable[[Tensor], Tensor] | None, *, is_of_slices: bool = False) -> None:
        """Take what makes the verdicts of all stages one: 0-dim fp32 in, the largest of all stages out; None: alone.

        Several are called one after the other: of the stages of a pipeline, and of the slices of a stage.
        """
        self._agree_on_overflow = () if agree is None else (*self._agree_on_overflow, agree)
        self._has_stages = agree is not None and (self._has_stages or not is_of_slices)

    def begin_microbatches(self) -> Tensor | None:
        """Begin the backward passes of a step, without gradients; return the loss scale, None where there is none."""
        scale = None if self.loss_scale is None else self.optimizer_steps.scale_for_backward()
        self._unscaled.prepare_for_backward(scale)
        return scale

    def end_microbatches(self, loss: Tensor) -> None:
        """Note the loss of the whole batch, for the error that ends endless overflow."""
        if self.loss_scale is not None:
            self._last_loss = loss.detach()

    def call_before_backward(self, loss: Tensor, module: LightningModule) -> Tensor:
        """Call the hooks `on_before_backward` alone, of a backward that the schedule has run."""
        return super().pre_backward(loss, module)

    def call_after_backward(self, loss: Tensor, module: LightningModule) -> Tensor:
        """Call the hooks `on_after_backward` alone."""
        return super().post_backward(loss, module)

    def _agreed(self, found_inf: Tensor | None, *, is_asked: bool) -> Tensor | None:
        # A stage without gradients for this optimizer found none that are inf or nan, and the others wait for its word.
        if found_inf is None and is_asked:
            found_inf = torch.zeros((), device=self._device)
        for agree in self._agree_on_overflow:
            found_inf = None if found_inf is None else agree(found_inf)
        return found_inf

    def _decides_alone(self, optimizer: Optimizer) -> bool:
        # Or with the ranks that hold other parts of its parameters, in its own step.
        has_parts = not self._has_stages and bool(getattr(optimizer, "parts", None))
        return not self._agree_on_overflow or self.loss_scale is None or has_parts
