"""Pipeline strategy for `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy

from lightning_hybrid.flavours.pytorch_lightning import DurableCheckpointIO, MasterWeightPrecision
from lightning_hybrid.pipeline.strategy import HybridPipeline


class HybridPipelineStrategy(HybridPipeline, DDPStrategy):  # type: ignore[misc] # noqa: D101
    __doc__ = HybridPipeline.__doc__
    _precision_type = MasterWeightPrecision
    _checkpoint_io_type = DurableCheckpointIO
