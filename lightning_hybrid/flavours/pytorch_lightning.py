"""Strategy, precision plugin and checkpoint plugin for `pytorch_lightning`."""

from __future__ import annotations

from importlib import import_module

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy

from lightning_hybrid.checkpoint.io import DurableCheckpointIOMixin
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.precision.sharded import ShardedHalfMixin
from lightning_hybrid.strategy.hybrid_allreduce import HybridAllReduce


class DurableCheckpointIO(DurableCheckpointIOMixin, TorchCheckpointIO):  # noqa: D101
    __doc__ = DurableCheckpointIOMixin.__doc__


class MasterWeightPrecision(MasterWeightMixin, Precision):  # type: ignore[misc] # noqa: D101
    __doc__ = MasterWeightMixin.__doc__


class ShardedHalfPrecision(ShardedHalfMixin, Precision):  # type: ignore[misc] # noqa: D101
    __doc__ = ShardedHalfMixin.__doc__


class HybridAllReduceStrategy(HybridAllReduce, DDPStrategy):  # type: ignore[misc] # noqa: D101
    __doc__ = HybridAllReduce.__doc__
    _precision_type = MasterWeightPrecision
    _checkpoint_io_type = DurableCheckpointIO


_MODULES = {"HybridElasticStrategy": "elastic", "HybridPipelineStrategy": "pipeline"}
"""Strategies in separate modules, so that other runs do not import them."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}_{_MODULES[name]}"), name)
