"""Contrastive losses over a global batch: all pairs of all ranks, in the memory of a few."""

from lightning_hybrid.contrastive.global_batch import GlobalBatch
from lightning_hybrid.contrastive.losses import BarlowTwins, InfoNCE, SigLIP

__all__ = ["BarlowTwins", "GlobalBatch", "InfoNCE", "SigLIP"]
