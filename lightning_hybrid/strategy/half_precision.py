"""Half precision on fp32 masters, for the strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.master_weights import MasterWeights
from lightning_hybrid.precision.plugin import MasterWeightMixin

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class HalfPrecisionMixin(_Base):
    """The strategy's side of `MasterWeightMixin`: it stands in for Lightning's plain half precision."""

    _precision_type: type[MasterWeightMixin]  # of the same Lightning
    _loss_scale: str | float | LossScale | None

    @property
    def precision_plugin(self) -> Precision:
        """The precision in force, which Lightning's `trainer.precision` reads."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Put master weights in the place of Lightning's plain half precision; leave everything else."""
        if isinstance(plugin, lightning_types("pytorch.plugins.precision.HalfPrecision")):
            scale = self._loss_scale if plugin.precision == "16-true" else None
            plugin = self._precision_type(plugin.precision, loss_scale=scale)
        self._precision_plugin = plugin

    @property
    def _half(self) -> MasterWeightMixin | None:
        return self.precision_plugin if isinstance(self.precision_plugin, MasterWeightMixin) else None

    @property
    def _masters(self) -> MasterWeights | None:
        return None if self._half is None else self._half.masters

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as DDP, and return fp32: what a model in fp32 returns."""
        outputs = super().predict_step(*args, **kwargs)
        return outputs if self._masters is None else self._masters.hooks.to_fp32(outputs)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state, once schedules that wait for a step's outcome have set the learning rate."""
        if self._half is not None:
            self._half.run_deferred_schedules()
        return super().optimizer_state(optimizer)

    def on_train_end(self) -> None:
        """Make the last schedules' steps; endless overflow that no logged step has seen is an error now."""
        super().on_train_end()
        if self._half is not None:
            self._half.on_train_end()
