"""Precision-plugin methods for pipeline schedules, which run forward and backward per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.precision.gradients import BackwardGradients
from lightning_hybrid.precision.half_window import HalfPrecisionWindow

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision as _Base

    from lightning_hybrid.precision.skipped_steps import OptimizerStepStates
    from lightning_hybrid.precision.user_steps import UserSteps
else:
    _Base = object


class MicrobatchMixin(_Base):
    """Precision mixin for pipelines, which accumulates unscaled micro-batch gradients in fp32.

    Steps are skipped on all stages or on none. The ranks of a stage check only the gradients of this stage. If a stage
    finds inf or nan, all stages learn of it before any weight is written, and skip the step.
    """

    loss_scale: Any
    optimizer_steps: OptimizerStepStates
    window: HalfPrecisionWindow | None
    gradients: BackwardGradients | None
    _user_steps: UserSteps | None
    _follow_optimizers: Callable[[], None]
    _half_arithmetic: Callable[[], AbstractContextManager[None]]
    _in_backward: Callable[[list[nn.Parameter]], AbstractContextManager[None]]
    _last_loss: Tensor | None
    _scale: Tensor | None
    _device: torch.device
    _agree_on_overflow: tuple[Callable[[Tensor], Tensor], ...] = ()
    _has_stages = False

    def connect_stages(
        self, agree: Callable[[Tensor], Tensor] | None, *, is_of_slices: bool = False
    ) -> None:
        """Register a function that combines overflow flags across stages, or unregister all such functions.

        Args:
            agree: Function that takes a 0-dim fp32 tensor and returns its maximum over all stages, or over all slices
                of a stage. If there are several functions, they are called one after the other. None: remove all.
            is_of_slices: Whether the function combines the flags of slices.
        """
        if agree is None:
            self._agree_on_overflow = ()
            self._has_stages = False
            return
        self._agree_on_overflow = (*self._agree_on_overflow, agree)
        self._has_stages = self._has_stages or not is_of_slices

    @contextmanager
    def schedule_context(self) -> Iterator[Tensor | None]:
        """Enter a context for a pipeline schedule, in which parameters are in half precision.

        It yields the loss scale, or None with bf16.
        """
        assert self.window is not None
        assert self._user_steps is not None
        self._user_steps.begin_step()
        self._follow_optimizers()
        self._scale = None
        if self.loss_scale is not None:
            self._scale = self.optimizer_steps.scale_for_backward()
        with self.window.opened(), self._half_arithmetic():
            yield self._scale

    @contextmanager
    def backward_of_microbatch(
        self, parameters: Iterable[nn.Parameter], *, is_last: bool
    ) -> Iterator[None]:
        """Enter a context for the backward pass of one micro-batch that accumulates unscaled fp32 gradients.

        Args:
            parameters: All parameters that the backward may reach. Other parameters are not changed, because another
                stage of this rank may have finished its gradients.
            is_last: Whether this backward averages the sum of all micro-batches over ranks.
        """
        assert self.gradients is not None
        reached = list(parameters)
        self.gradients.begin(reached, self._scale, lambda _: is_last)
        with self._in_backward(reached):
            yield
        self.gradients.finish(self._groups_of(reached), self._scale, lambda _: is_last)

    def _groups_of(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Group parameters by optimizer, with a last group of parameters that have no optimizer."""
        reached = {id(parameter): parameter for parameter in parameters}
        groups = []
        for group in self.optimizer_steps.parameters_by_optimizer(parameters):
            groups.append(
                [reached[id(parameter)] for parameter in group if id(parameter) in reached]
            )
        return groups

    def end_microbatches(self, loss: Tensor) -> None:
        """Switch the parameters back to fp32, and store the loss of the batch for error messages."""
        assert self.window is not None
        self.window.close()
        if self.loss_scale is not None:
            self._last_loss = loss.detach()

    def call_before_backward(self, loss: Tensor, module: LightningModule) -> Tensor:
        """Call the `on_before_backward` hooks for backward passes that the pipeline schedule has run."""
        return super().pre_backward(loss, module)

    def call_after_backward(self, loss: Tensor, module: LightningModule) -> Tensor:
        """Call the `on_after_backward` hooks for backward passes that the pipeline schedule has run."""
        return super().post_backward(loss, module)

    def _agreed(self, found_inf: Tensor | None) -> Tensor | None:
        for agree in self._agree_on_overflow:
            if found_inf is not None:
                found_inf = agree(found_inf)
        return found_inf

    def _decides_alone(self, optimizer: Optimizer) -> bool:
        # An optimizer with sharded parameters agrees in its own step with the ranks that hold the other shards.
        has_parts = not self._has_stages and bool(getattr(optimizer, "parts", None))
        return not self._agree_on_overflow or self.loss_scale is None or has_parts
