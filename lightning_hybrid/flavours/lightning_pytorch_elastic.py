"""Elastic strategy for `lightning.pytorch`."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from lightning_hybrid.elastic.strategy import HybridElastic
from lightning_hybrid.flavours.lightning_pytorch import DurableCheckpointIO, MasterWeightPrecision


class HybridElasticStrategy(HybridElastic, DDPStrategy):  # noqa: D101
    __doc__ = HybridElastic.__doc__
    _precision_type = MasterWeightPrecision
    _checkpoint_io_type = DurableCheckpointIO
