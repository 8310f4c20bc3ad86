"""Strategy, precision plugin and checkpoint plugin for `lightning.fabric`."""

from __future__ import annotations

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy

from lightning_hybrid.checkpoint.io import DurableCheckpointIOMixin
from lightning_hybrid.fabric.precision import FabricMasterWeightMixin
from lightning_hybrid.fabric.strategy import FabricHybridAllReduce


class DurableCheckpointIO(DurableCheckpointIOMixin, TorchCheckpointIO):  # noqa: D101
    __doc__ = DurableCheckpointIOMixin.__doc__


class MasterWeightPrecision(FabricMasterWeightMixin, Precision):  # noqa: D101
    __doc__ = FabricMasterWeightMixin.__doc__


class HybridAllReduceStrategy(FabricHybridAllReduce, DDPStrategy):  # noqa: D101
    __doc__ = FabricHybridAllReduce.__doc__
    _precision_type = MasterWeightPrecision
    _checkpoint_io_type = DurableCheckpointIO
