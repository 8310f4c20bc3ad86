"""Large-batch, mixed-precision data-parallel training for PyTorch Lightning.

Importing this package makes the strategies known to Lightning:

    import lightning_hybrid
    trainer = Trainer(strategy="hybrid_allreduce", precision="16-true")
"""

from lightning_hybrid.checkpoint.io import DurableCheckpointIO
from lightning_hybrid.precision import MasterWeightPrecision
from lightning_hybrid.precision.loss_scale import DynamicLossScale, LossScale, StaticLossScale
from lightning_hybrid.strategy.hybrid_allreduce import HybridAllReduceStrategy

__all__ = [
    "DurableCheckpointIO",
    "DynamicLossScale",
    "HybridAllReduceStrategy",
    "LossScale",
    "MasterWeightPrecision",
    "StaticLossScale",
]
__version__ = "0.1.0"
