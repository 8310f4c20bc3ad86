"""Pipeline strategy for `lightning.pytorch`."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from lightning_hybrid.flavours.lightning_pytorch import DurableCheckpointIO, MasterWeightPrecision
from lightning_hybrid.pipeline.strategy import HybridPipeline


class HybridPipelineStrategy(HybridPipeline, DDPStrategy):  # noqa: D101
    __doc__ = HybridPipeline.__doc__
    _precision_type = MasterWeightPrecision
    _checkpoint_io_type = DurableCheckpointIO
