"""Interface between a strategy and the precision plugin with fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
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
    """Adapter between a strategy and a precision plugin with fp32 master weights.

    With any other precision plugin, the methods do nothing.

    Attributes:
        plugin: The precision plugin, which the strategy sets.
    """

    def __init__(self) -> None:
        self.plugin: Any = None
        self._has_rebuilt_buckets = False

    @property
    def half(self) -> MasterWeightMixin | None:
        """Precision plugin, or None if it does not use fp32 master weights."""
        if isinstance(self.plugin, MasterWeightMixin):
            return self.plugin
        return None

    @property
    def window(self) -> HalfPrecisionWindow | None:
        """Window that switches parameters between fp32 and half precision, or None without master weights."""
        if self.half is None:
            return None
        return self.half.window

    @property
    def dtype(self) -> torch.dtype | None:
        """Data type of the forward and backward passes in half-precision training, or None otherwise."""
        if self.window is None:
            return None
        return self.window.dtype

    def status(self) -> dict[str, Any]:
        """Return the precision fields of `RunStatus`, such as loss scales and step counters."""
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
        """Connect the precision plugin to the strategy, so that it knows when DDP averages gradients.

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
            # DDP averages gradients only in the last backward of a step. For all others Lightning clears this flag.
            return getattr(get_wrapped(), "require_backward_grad_sync", True)

        def note_used_parameters(loss: Tensor) -> None:
            model = get_wrapped()
            if not isinstance(model, DistributedDataParallel):
                return
            is_searching = model.find_unused_parameters and not model.static_graph
            if is_searching and model.require_backward_grad_sync:
                model.reducer.prepare_for_backward([loss])

        self.half.connect_strategy(
            is_last_backward_of_step=is_last_backward_of_step,
            flush_backward=flush_backward,
            note_used_parameters=note_used_parameters,
        )

    def follow_device(self, device: torch.device) -> None:
        """Create the half-precision copies of the module's parameters on a device."""
        self._has_rebuilt_buckets = False
        if self.half is not None:
            self.half.follow_device(device)

    def broadcast(self, module: nn.Module, ignored: set[str]) -> None:
        """Broadcast rank zero's fp32 weights to all ranks, except ignored parameters.

        Collective in half precision: every rank must call it.
        """
        if self.window is not None:
            self.window.broadcast_(module, ignored)

    def opened(self) -> AbstractContextManager[Any]:
        """Return a context in which the module's parameters hold their half-precision copies."""
        if self.window is None:
            return nullcontext()
        return self.window.opened()

    # ---- step --------------------------------------------------------------------------------

    def rebuild_buckets(self, model: Any) -> None:
        """Let DDP rebuild its gradient buckets before a step, without rounding existing fp32 gradients.

        After its first backward pass, DDP rebuilds its buckets in the order in which gradients became ready. By default
        it does so at the beginning of a later forward pass. `p.grad` may then hold accumulated fp32 gradients, which
        DDP would round to half precision as it moves them into the new buckets. This method therefore rebuilds the
        buckets before the forward pass, and sets the gradients to None in the meantime.

        The strategy calls the method before every training step. It does nothing without half precision, without DDP,
        or after DDP has rebuilt the buckets. DDP does not rebuild them before its first backward pass, or if it
        searches for unused parameters.

        Args:
            model: The current module, which may be wrapped in DDP.
        """
        is_due = self.window is not None and not self._has_rebuilt_buckets
        if not is_due or not torch.is_grad_enabled():
            return
        if isinstance(model, DistributedDataParallel):
            assert self.half is not None
            assert self.half.gradients is not None
            with self.half.gradients.hidden(list(model.parameters())):
                # DDP returns True only when it has rebuilt the buckets, which it does once per setup.
                self._has_rebuilt_buckets = model.reducer._rebuild_buckets()

    def close_window(self) -> None:
        """Switch the module's parameters from half-precision copies back to fp32."""
        if self.half is not None:
            self.half.close_window()

    def run_deferred_schedules(self) -> None:
        """Run the steps of learning-rate schedules that were deferred until after the optimizer step."""
        if self.half is not None:
            self.half.run_deferred_schedules()

    def to_fp32(self, outputs: Any) -> Any:
        """Convert half-precision tensors in a module's outputs to fp32, also in dataclasses."""
        if self.window is None:
            return outputs
        return apply_to_collection(outputs, Tensor, self.window.hooks.tensor_to_fp32)

    # ---- end ---------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Run deferred learning-rate schedules, and raise if too many consecutive steps have overflowed."""
        if self.half is not None:
            self.half.on_train_end()

    def end_run(self) -> None:
        """Restore the module's fp32 parameters at the end of a run."""
        if self.half is not None:
            self.half.end_run()
