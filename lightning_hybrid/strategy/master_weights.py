"""Half precision on fp32 master weights, as a strategy uses it, whether or not the run has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.precision.window import HalfPrecisionWindow
from lightning_hybrid.run_status import has_grad_scaler
from lightning_hybrid.strategy.arguments import refuse_two_precisions

if TYPE_CHECKING:
    import lightning.pytorch as pl


class MasterWeights:
    """Half precision of a strategy's fits. In any other precision its methods do nothing.

    Attributes:
        plugin: The precision plugin of the strategy, which sets it.
    """

    def __init__(self) -> None:
        self.plugin: Any = None
        self._has_rebuilt_buckets = False

    @property
    def half(self) -> MasterWeightMixin | None:
        """The plugin, if it trains fp32 weights in half precision."""
        if isinstance(self.plugin, MasterWeightMixin):
            return self.plugin
        return None

    @property
    def window(self) -> HalfPrecisionWindow | None:
        """The module's parameters in both precisions, while a run lasts."""
        if self.half is None:
            return None
        return self.half.window

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of forward and backward, while a run in half precision lasts."""
        if self.window is None:
            return None
        return self.window.dtype

    def status(self) -> dict[str, Any]:
        """Return the fields of `RunStatus` that the precision knows."""
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
        """Connect the plugin to the strategy, which knows the backward that ends a step.

        Args:
            module: The user's module.
            get_wrapped: Returns the module as the strategy has wrapped it by then.
            flush_backward: Ends DDP's own work for a backward, given the loss.

        Raises:
            MisconfigurationException: `Trainer(precision=...)` differs from the plugin's precision.
        """
        if self.half is None:
            return
        refuse_two_precisions(module.trainer, self.half)

        def is_last_backward_of_step() -> bool:
            # DDP's own flag: False between the batches of one step, whose gradients it does not average.
            return getattr(get_wrapped(), "require_backward_grad_sync", True)

        self.half.connect_strategy(
            is_last_backward_of_step=is_last_backward_of_step, flush_backward=flush_backward
        )

    def follow_device(self, device: torch.device) -> None:
        """Make the half-precision copies on `device`."""
        self._has_rebuilt_buckets = False
        if self.half is not None:
            self.half.follow_device(device)

    def broadcast(self, module: nn.Module, ignored: set[str]) -> None:
        """Give every rank the fp32 weights of rank zero, except ignored ones. Collective in half precision."""
        if self.window is not None:
            self.window.broadcast_(module, ignored)

    def opened(self) -> AbstractContextManager[Any]:
        """Return a context in which the module shows its half-precision parameters."""
        if self.window is None:
            return nullcontext()
        return self.window.opened()

    # ---- step --------------------------------------------------------------------------------

    def rebuild_buckets(self, model: Any) -> None:
        """Let DDP rebuild its buckets, once per setup, while it sees no gradients that it would round."""
        is_due = self.window is not None and not self._has_rebuilt_buckets
        if not is_due or not torch.is_grad_enabled():
            return
        if isinstance(model, DistributedDataParallel):
            assert self.half is not None
            assert self.half.gradients is not None
            with self.half.gradients.hidden(list(model.parameters())):
                self._has_rebuilt_buckets = model.reducer._rebuild_buckets()

    def close_window(self) -> None:
        """Let the module show its fp32 parameters again."""
        if self.half is not None:
            self.half.close_window()

    def run_deferred_schedules(self) -> None:
        """Run the learning-rate schedules that wait for a step's outcome."""
        if self.half is not None:
            self.half.run_deferred_schedules()

    def to_fp32(self, outputs: Any) -> Any:
        """Return a model's outputs in fp32."""
        if self.window is None:
            return outputs
        return self.window.hooks.to_fp32(outputs)

    # ---- end ---------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Run the last schedules, and raise an error if the last steps were skipped for overflow."""
        if self.half is not None:
            self.half.on_train_end()

    def end_run(self) -> None:
        """Give the module its fp32 weights for good."""
        if self.half is not None:
            self.half.end_run()
