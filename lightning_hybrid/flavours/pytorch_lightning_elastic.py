"""Elastic strategy for `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy

from lightning_hybrid.elastic.strategy import HybridElastic
from lightning_hybrid.flavours.pytorch_lightning import DurableCheckpointIO, MasterWeightPrecision


class HybridElasticStrategy(HybridElastic, DDPStrategy):  # type: ignore[misc] # noqa: D101
    __doc__ = HybridElastic.__doc__
    _precision_type = MasterWeightPrecision
    _checkpoint_io_type = DurableCheckpointIO
