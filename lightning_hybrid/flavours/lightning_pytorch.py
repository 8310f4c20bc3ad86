"""Strategy, precision plugin and checkpoint plugin for `lightning.pytorch`, exported at top level."""

from __future__ import annotations

from importlib import import_module

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy

from lightning_hybrid.checkpoint.io import DurableCheckpointIOMixin
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.precision.sharded import ShardedHalfMixin
from lightning_hybrid.strategy.hybrid_allreduce import HybridAllReduce


class DurableCheckpointIO(DurableCheckpointIOMixin, TorchCheckpointIO):  # noqa: D101
    __doc__ = DurableCheckpointIOMixin.__doc__


class MasterWeightPrecision(MasterWeightMixin, Precision):  # noqa: D101
    __doc__ = MasterWeightMixin.__doc__


class ShardedHalfPrecision(ShardedHalfMixin, Precision):  # noqa: D101
    __doc__ = ShardedHalfMixin.__doc__


class HybridAllReduceStrategy(HybridAllReduce, DDPStrategy):  # noqa: D101
    __doc__ = HybridAllReduce.__doc__
    _precision_type = MasterWeightPrecision
    _checkpoint_io_type = DurableCheckpointIO


_MODULES = {"HybridElasticStrategy": "elastic", "HybridPipelineStrategy": "pipeline"}
"""Strategies in separate modules, so that other runs do not import them."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}_{_MODULES[name]}"), name)
