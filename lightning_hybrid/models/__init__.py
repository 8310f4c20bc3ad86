"""Networks that the recipes train."""

from lightning_hybrid.models.alexnet import AlexNetBN

__all__ = ["AlexNetBN"]
