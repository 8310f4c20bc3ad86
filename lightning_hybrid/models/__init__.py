"""Networks that the recipes train."""

from lightning_hybrid.models.alexnet import AlexNet, AlexNetBN
from lightning_hybrid.models.resnet import ResNet

__all__ = ["AlexNet", "AlexNetBN", "ResNet"]
