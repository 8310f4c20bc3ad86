"""The precision plugin's part in a pipeline, whose schedule runs forward and backward of micro-batches by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    from lightning_hybrid.precision.user_steps import UserSteps
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
        """Connect a function that combines the decisions of all stages, or None if this stage decides alone.

        The function takes a 0-dim fp32 tensor and returns the largest of all stages. Several are called one after the
        other: of the stages of a pipeline, and of the slices of a stage.
        """
        if agree is None:
            self._agree_on_overflow = ()
            self._has_stages = False
            return
        self._agree_on_overflow = (*self._agree_on_overflow, agree)
        self._has_stages = self._has_stages or not is_of_slices

    @contextmanager
    def schedule_context(self) -> Iterator[Tensor | None]:
        """Run the schedule of a step on half-precision parameters, and yield the loss scale or None."""
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
        """Run one backward inside, and add its gradients to `p.grad`, in fp32 and unscaled.

        Args:
            parameters: all that the backward may reach. No others are touched: those of another stage of this rank
                have finished gradients.
            is_last: whether this backward averages the sum of all micro-batches over ranks.
        """
        assert self.gradients is not None
        reached = list(parameters)
        self.gradients.begin(reached, self._scale, lambda _: is_last)
        with self._in_backward(reached):
            yield
        self.gradients.finish(self._groups_of(reached), self._scale, lambda _: is_last)

    def _groups_of(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return `parameters` by optimizer, and nothing else that these optimizers train."""
        reached = {id(parameter): parameter for parameter in parameters}
        groups = []
        for group in self.optimizer_steps.parameters_by_optimizer(parameters):
            groups.append(
                [reached[id(parameter)] for parameter in group if id(parameter) in reached]
            )
        return groups

    def end_microbatches(self, loss: Tensor) -> None:
        """Close the window, and note the loss of the whole batch for the error that ends endless overflow."""
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
