"""The networks of the recipes, their arithmetic cost, and BatchNorm under gradient accumulation."""

from lightning_hybrid.models.alexnet import AlexNet, AlexNetBN
from lightning_hybrid.models.batch_norm import correct_momentum_, corrected_momentum, ghost_batch_size
from lightning_hybrid.models.flops import forward_flops_per_image, training_flops_per_image
from lightning_hybrid.models.peak_flops import PeakFlops, peak_flops_per_s
from lightning_hybrid.models.resnet import ResNet

__all__ = [
    "AlexNet",
    "AlexNetBN",
    "PeakFlops",
    "ResNet",
    "correct_momentum_",
    "corrected_momentum",
    "forward_flops_per_image",
    "ghost_batch_size",
    "peak_flops_per_s",
    "training_flops_per_image",
]
