"""What the strategy's promises need of networks: BatchNorm under gradient accumulation, activation checkpointing."""

from lightning_hybrid.checks import moved
from lightning_hybrid.models.batch_norm import correct_momentum_, corrected_momentum

__all__ = ["correct_momentum_", "corrected_momentum"]

__getattr__ = moved(
    __name__,
    dict.fromkeys(("AlexNet", "AlexNetBN", "alexnet"), "recipes.networks.alexnet")
    | dict.fromkeys(("ResNet", "resnet"), "recipes.networks.resnet")
    | dict.fromkeys(("forward_flops_per_image", "training_flops_per_image"), "recipes.networks.flops")
    | dict.fromkeys(("PeakFlops", "peak_flops_per_s"), "recipes.networks.peak_flops")
    | {"ghost_batch_size": "lightning_hybrid.data.batch_size_per_rank"},
)
