"""Memory-efficient contrastive losses over the pairs of all ranks."""

from lightning_hybrid.contrastive.global_batch import GlobalBatch
from lightning_hybrid.contrastive.losses import BarlowTwins, InfoNCE, SigLIP

__all__ = ["BarlowTwins", "GlobalBatch", "InfoNCE", "SigLIP"]
