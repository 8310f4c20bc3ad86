"""Contrastive losses over all pairs of all ranks, with memory for only a few pairs at a time."""

from lightning_hybrid.contrastive.global_batch import GlobalBatch
from lightning_hybrid.contrastive.losses import BarlowTwins, InfoNCE, SigLIP

__all__ = ["BarlowTwins", "GlobalBatch", "InfoNCE", "SigLIP"]
