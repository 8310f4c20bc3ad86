"""What networks are asked here: arithmetic cost, peak speed of a device, BatchNorm under gradient accumulation."""

from lightning_hybrid.checks import moved
from lightning_hybrid.models.batch_norm import correct_momentum_, corrected_momentum
from lightning_hybrid.models.flops import forward_flops_per_image, training_flops_per_image
from lightning_hybrid.models.peak_flops import PeakFlops, peak_flops_per_s

__all__ = [
    "PeakFlops",
    "correct_momentum_",
    "corrected_momentum",
    "forward_flops_per_image",
    "peak_flops_per_s",
    "training_flops_per_image",
]

__getattr__ = moved(
    __name__,
    dict.fromkeys(("AlexNet", "AlexNetBN", "alexnet"), "recipes.networks.alexnet")
    | dict.fromkeys(("ResNet", "resnet"), "recipes.networks.resnet")
    | {"ghost_batch_size": "lightning_hybrid.data.batch_size_per_rank"},
)
