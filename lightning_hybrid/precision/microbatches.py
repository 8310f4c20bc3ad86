"""The precision plugin's part in a pipeline, whose schedule runs forward and backward of all micro-batches by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.precision.gradients import BackwardGradients
from lightning_hybrid.precision.window import HalfPrecisionWindow

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision as _Base

    from lightning_hybrid.precision.skipped_steps import OptimizerStepStates
else:
    _Base = object


class MicrobatchMixin(_Base):
    """Precision mixin that unscales and sums the gradients of micro-batches, and agrees with stages whether to skip.

    The gradients of a stage are checked by its own ranks alone. The verdict is the largest of all stages', known before
    anything is written.
    """

    loss_scale: Any
    optimizer_steps: OptimizerStepStates
    window: HalfPrecisionWindow | None
    gradients: BackwardGradients | None
    _last_loss: Tensor | None
    _scale: Tensor | None
    _device: torch.device
    _agree_on_overflow: tuple[Callable[[Tensor], Tensor], ...] = ()
    _has_stages = False

    def connect_stages(self, agree: Callable[[Tensor], Tensor] | None, *, is_of_slices: bool = False) -> None:
        """Take a function that makes the verdicts of all stages one; None: this stage decides alone.

        The function takes a 0-dim fp32 tensor and returns the largest of all stages. Several are called one after the
        other: of the stages of a pipeline, and of the slices of a stage.
        """
        if agree is None:
            self._agree_on_overflow = ()
            self._has_stages = False
            return
        self._agree_on_overflow = (*self._agree_on_overflow, agree)
        self._has_stages = self._has_stages or not is_of_slices

    def begin_microbatches(self) -> Tensor | None:
        """Open the window for a whole schedule; return the loss scale, None if there is none."""
        assert self.window is not None
        self._scale = None if self.loss_scale is None else self.optimizer_steps.scale_for_backward()
        self.window.open()
        return self._scale

    def begin_backward_of_microbatch(self, parameters: Iterable[nn.Parameter], *, is_last: bool) -> None:
        """Set aside the sum of the micro-batches so far, or return it to the last backward, which averages it."""
        assert self.gradients is not None
        self.gradients.begin(parameters, self._scale, lambda _: is_last)

    def end_backward_of_microbatch(self, parameters: Iterable[nn.Parameter], *, is_last: bool) -> None:
        """Add a micro-batch's gradients to the sum, in fp32 and unscaled."""
        assert self.gradients is not None
        groups = self.optimizer_steps.parameters_by_optimizer(parameters)
        self.gradients.finish(groups, self._scale, lambda _: is_last)

    def end_microbatches(self, loss: Tensor) -> None:
        """Close the window; note the loss of the whole batch, for the error that ends endless overflow."""
        assert self.window is not None
        self.window.close()
        if self.loss_scale is not None:
            self._last_loss = loss.detach()

    def call_before_backward(self, loss: Tensor, module: LightningModule) -> Tensor:
        """Call the hooks `on_before_backward` alone, of a backward that the schedule has run."""
        return super().pre_backward(loss, module)

    def call_after_backward(self, loss: Tensor, module: LightningModule) -> Tensor:
        """Call the hooks `on_after_backward` alone."""
        return super().post_backward(loss, module)

    def _agreed(self, found_inf: Tensor | None) -> Tensor | None:
        for agree in self._agree_on_overflow:
            if found_inf is not None:
                found_inf = agree(found_inf)
        return found_inf

    def _decides_alone(self, optimizer: Optimizer) -> bool:
        # Or with the ranks that hold other parts of its parameters, in its own step.
        has_parts = not self._has_stages and bool(getattr(optimizer, "parts", None))
        return not self._agree_on_overflow or self.loss_scale is None or has_parts
