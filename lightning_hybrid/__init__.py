"""Large-batch, mixed-precision data-parallel training for PyTorch Lightning.

Importing this package registers the strategies with Fabric and with Lightning, under both of Lightning's import names:

    import lightning_hybrid
    trainer = Trainer(strategy="hybrid_allreduce", precision="16-true")

The classes here are for `lightning.pytorch`. The classes for other Lightning packages are in
`lightning_hybrid.flavours`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_hybrid.strategy.registration import register_everywhere

if TYPE_CHECKING:
    from lightning_hybrid.flavours.lightning_pytorch import (
        DurableCheckpointIO,
        HybridAllReduceStrategy,
        MasterWeightPrecision,
        ShardedHalfPrecision,
    )
    from lightning_hybrid.flavours.lightning_pytorch_elastic import HybridElasticStrategy
    from lightning_hybrid.flavours.lightning_pytorch_pipeline import HybridPipelineStrategy
    from lightning_hybrid.precision.loss_scale import DynamicLossScale, LossScale, StaticLossScale
    from lightning_hybrid.strategy.extension import FitContext, FitExtension
    from lightning_hybrid.strategy.option_classes import Adasum, Comm, LocalSteps, Mean, Report

__all__ = [
    "Adasum",
    "Comm",
    "DurableCheckpointIO",
    "DynamicLossScale",
    "FitContext",
    "FitExtension",
    "HybridAllReduceStrategy",
    "HybridElasticStrategy",
    "HybridPipelineStrategy",
    "LocalSteps",
    "LossScale",
    "MasterWeightPrecision",
    "Mean",
    "Report",
    "ShardedHalfPrecision",
    "StaticLossScale",
]
__version__ = "0.2.0"

# Modules of the public classes that are not in `flavours.lightning_pytorch`.
_MODULE_OF_CLASS = {
    "Adasum": "strategy.option_classes",
    "Comm": "strategy.option_classes",
    "DynamicLossScale": "precision.loss_scale",
    "FitContext": "strategy.extension",
    "FitExtension": "strategy.extension",
    "HybridElasticStrategy": "flavours.lightning_pytorch_elastic",
    "HybridPipelineStrategy": "flavours.lightning_pytorch_pipeline",
    "LocalSteps": "strategy.option_classes",
    "LossScale": "precision.loss_scale",
    "Mean": "strategy.option_classes",
    "Report": "strategy.option_classes",
    "StaticLossScale": "precision.loss_scale",
}

register_everywhere()


def __getattr__(name: str) -> object:
    # Classes are imported at first use, because imports take time and users of `pytorch_lightning` or Fabric do not
    # need these classes.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name = _MODULE_OF_CLASS.get(name, "flavours.lightning_pytorch")
    return getattr(import_module(f"{__name__}.{module_name}"), name)
