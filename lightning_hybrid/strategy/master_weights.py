"""Interface between a strategy and the precision plugin with fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.run_status import has_grad_scaler
from lightning_hybrid.strategy.user_code_checks import refuse_two_precisions

if TYPE_CHECKING:
    import lightning.pytorch as pl


Masters = TypeVar("Masters", bound=MasterWeightMixin)


_PLAIN_HALF_PRECISION = (
    "pytorch.plugins.precision.HalfPrecision",
    "fabric.plugins.precision.HalfPrecision",
)


def with_masters(
    plugin: Any, plugin_type: type[Masters], loss_scale: str | float | LossScale | None
) -> Any:
    """Replace Lightning's plain half-precision plugin by one with fp32 master weights.

    Any other plugin is returned unchanged.
    """
    if not any(isinstance(plugin, lightning_types(name)) for name in _PLAIN_HALF_PRECISION):
        return plugin
    if plugin.precision != "16-true":
        loss_scale = None
    return plugin_type(plugin.precision, loss_scale=loss_scale)


class MasterWeights:
    """Adapter through which a strategy uses half precision on fp32 master weights.

    With any other precision plugin, the methods do nothing.

    Attributes:
        plugin: The precision plugin, which the strategy sets.
    """

    def __init__(self) -> None:
        self.plugin: Any = None
        self._has_rebuilt_buckets = False

    @property
    def half(self) -> MasterWeightMixin | None:
        """Precision plugin, if it trains in half precision on fp32 master weights, or None."""
        if isinstance(self.plugin, MasterWeightMixin):
            return self.plugin
        return None

    @property
    def window(self) -> HalfPrecisionWindow | None:
        """Object that holds the module's fp32 and half-precision parameters during a run, or None."""
        if self.half is None:
            return None
        return self.half.window

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of forward and backward during a run in half precision, or None."""
        if self.window is None:
            return None
        return self.window.dtype

    def status(self) -> dict[str, Any]:
        """Return the fields of `RunStatus` about precision: loss scales, step counters and parameters."""
        optimizer_steps: Any = ()
        if self.half is not None:
            optimizer_steps = self.half.optimizer_steps
        return {
            "optimizer_steps": optimizer_steps,
            "window": self.window,
            "has_grad_scaler": has_grad_scaler(self.plugin),
        }

    # ---- setup -------------------------------------------------------------------------------

    def connect(
        self,
        module: pl.LightningModule,
        *,
        get_wrapped: Callable[[], Any],
        flush_backward: Callable[[Tensor], object],
    ) -> None:
        """Connect the precision plugin to the strategy, which determines the last backward of each step.

        Args:
            module: The user's module.
            get_wrapped: Function that returns the current wrapper of the module, such as DDP.
            flush_backward: Function that finishes DDP's work for a backward pass, given the loss.

        Raises:
            MisconfigurationException: `Trainer(precision=...)` differs from the plugin's precision.
        """
        if self.half is None:
            return
        refuse_two_precisions(module.trainer, self.half)

        def is_last_backward_of_step() -> bool:
            # DDP sets its flag to False for all batches of a step except the last one. It averages after that one only.
            return getattr(get_wrapped(), "require_backward_grad_sync", True)

        self.half.connect_strategy(
            is_last_backward_of_step=is_last_backward_of_step, flush_backward=flush_backward
        )

    def follow_device(self, device: torch.device) -> None:
        """Create the half-precision copies of the parameters on `device`."""
        self._has_rebuilt_buckets = False
        if self.half is not None:
            self.half.follow_device(device)

    def broadcast(self, module: nn.Module, ignored: set[str]) -> None:
        """Broadcast the fp32 weights of rank zero to all ranks, except ignored parameters.

        Collective in half precision: every rank must call it.
        """
        if self.window is not None:
            self.window.broadcast_(module, ignored)

    def opened(self) -> AbstractContextManager[Any]:
        """Return a context in which the module's parameters are the half-precision copies."""
        if self.window is None:
            return nullcontext()
        return self.window.opened()

    # ---- step --------------------------------------------------------------------------------

    def rebuild_buckets(self, model: Any) -> None:
        """Let DDP rebuild its buckets once per setup, while fp32 gradients are hidden from its rounding."""
        is_due = self.window is not None and not self._has_rebuilt_buckets
        if not is_due or not torch.is_grad_enabled():
            return
        if isinstance(model, DistributedDataParallel):
            assert self.half is not None
            assert self.half.gradients is not None
            with self.half.gradients.hidden(list(model.parameters())):
                self._has_rebuilt_buckets = model.reducer._rebuild_buckets()

    def close_window(self) -> None:
        """Switch the module's parameters back to fp32."""
        if self.half is not None:
            self.half.close_window()

    def run_deferred_schedules(self) -> None:
        """Run the deferred learning-rate schedules, which wait to see if the step was skipped."""
        if self.half is not None:
            self.half.run_deferred_schedules()

    def to_fp32(self, outputs: Any) -> Any:
        """Convert half-precision tensors in a model's outputs to fp32."""
        if self.window is None:
            return outputs
        return self.window.hooks.to_fp32(outputs)

    # ---- end ---------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Run deferred learning-rate schedules, and raise after too many overflows in a row."""
        if self.half is not None:
            self.half.on_train_end()

    def end_run(self) -> None:
        """Restore the module's fp32 weights permanently at the end of a run."""
        if self.half is not None:
            self.half.end_run()
