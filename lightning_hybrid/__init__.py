"""Large-batch, mixed-precision data-parallel training for PyTorch Lightning.

Importing this package makes the strategies known to Lightning:

    import lightning_hybrid
    trainer = Trainer(strategy="hybrid_allreduce", precision="16-true")
"""

from typing import TYPE_CHECKING

from lightning_hybrid.precision import MasterWeightPrecision
from lightning_hybrid.precision.loss_scale import DynamicLossScale, LossScale, StaticLossScale
from lightning_hybrid.strategy.hybrid_allreduce import HybridAllReduceStrategy

if TYPE_CHECKING:
    from lightning_hybrid.checkpoint.io import DurableCheckpointIO

__all__ = [
    "DurableCheckpointIO",
    "DynamicLossScale",
    "HybridAllReduceStrategy",
    "LossScale",
    "MasterWeightPrecision",
    "StaticLossScale",
]
__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    # Imported when it is first asked for: only trainers that save need it, and every user pays for an import.
    if name != "DurableCheckpointIO":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_hybrid.checkpoint.io import DurableCheckpointIO

    return DurableCheckpointIO
