"""Base class of the strategies, which adds half-precision training with fp32 master weights to DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_hybrid.comm.stats.phases import Phase
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.strategy.communicating_ddp import CommunicatingDDP
from lightning_hybrid.strategy.master_weights import MasterWeights, with_masters
from lightning_hybrid.strategy.strategy_options import StrategyOptions
from lightning_hybrid.strategy.user_code_checks import warn_of_unused_loss_scale

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision


class HalfPrecisionDDP(CommunicatingDDP):
    """DDP strategy that uses fp32 master weights for the precisions `"16-true"` and `"bf16-true"`.

    With any other precision plugin, it works like `CommunicatingDDP`.

    Args:
        options: The validated options of the strategy, with the loss scale for `"16-true"`.
        **arguments: Further arguments of `CommunicatingDDP`.
    """

    # The classes in `flavours/` set it to the class for their own Lightning package.
    _precision_type: type[MasterWeightMixin]

    def __init__(self, options: StrategyOptions, **arguments: Any) -> None:
        self._masters = MasterWeights()
        super().__init__(options, **arguments)

    @property
    def precision_plugin(self) -> Precision:
        """Precision plugin of the strategy, from which Lightning reads `trainer.precision`."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Set the precision plugin, replacing plain half precision by one with fp32 master weights."""
        loss_scale = self._options.loss_scale
        self._precision_plugin = with_masters(plugin, self._precision_type, loss_scale)
        self._masters.plugin = self._precision_plugin

    @property
    def _half(self) -> MasterWeightMixin | None:
        return self._masters.half

    @property
    def _window(self) -> HalfPrecisionWindow | None:
        return self._masters.window

    def _run_status_fields(self) -> dict[str, Any]:
        return self._masters.status() | super()._run_status_fields()

    def connect(self, model: pl.LightningModule) -> None:
        """Connect the strategy to the module like DDP, and connect the precision plugin to the strategy."""
        super().connect(model)
        if model.trainer.state.fn == "fit":
            warn_of_unused_loss_scale(self._options.loss_scale, self.precision_plugin)
        self._masters.connect(
            model, get_wrapped=lambda: self.model, flush_backward=self._flush_backward
        )

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Finish DDP's gradient averaging after a backward pass, unless the precision plugin has already done so."""
        if self._half is None:
            self._flush_backward(closure_loss)

    def _flush_backward(self, closure_loss: torch.Tensor) -> None:
        """Finish DDP's gradient averaging after a backward pass."""
        self._comm.enter(self._phase_unless_manual(Phase.OPTIMIZER))
        super().post_backward(closure_loss)

    def _phase_unless_manual(self, phase: Phase) -> Phase:
        """Return `phase`, or `Phase.FORWARD` in manual optimization.

        In manual optimization, optimizer steps run within `training_step`.
        """
        if self._module.automatic_optimization:
            return phase
        return Phase.FORWARD

    def on_train_end(self) -> None:
        """Run DDP's `on_train_end` and deferred scheduler steps, and raise after repeated overflows."""
        super().on_train_end()
        self._masters.on_train_end()
