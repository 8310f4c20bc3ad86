"""Strategy, precision plugin and checkpoint plugin for `lightning_fabric`."""

from __future__ import annotations

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_fabric.plugins.precision import Precision
from lightning_fabric.strategies import DDPStrategy

from lightning_hybrid.checkpoint.io import DurableCheckpointIOMixin
from lightning_hybrid.fabric.precision import FabricMasterWeightMixin
from lightning_hybrid.fabric.strategy import FabricHybridAllReduce


class DurableCheckpointIO(DurableCheckpointIOMixin, TorchCheckpointIO):  # noqa: D101
    __doc__ = DurableCheckpointIOMixin.__doc__


class MasterWeightPrecision(FabricMasterWeightMixin, Precision):  # type: ignore[misc] # noqa: D101
    __doc__ = FabricMasterWeightMixin.__doc__


class HybridAllReduceStrategy(FabricHybridAllReduce, DDPStrategy):  # type: ignore[misc] # noqa: D101
    __doc__ = FabricHybridAllReduce.__doc__
    _precision_type = MasterWeightPrecision
    _checkpoint_io_type = DurableCheckpointIO
