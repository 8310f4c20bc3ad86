"""Contrastive losses over the pairs of all ranks, with memory for only some of the pairs at a time."""

from lightning_hybrid.contrastive.global_batch import GlobalBatch
from lightning_hybrid.contrastive.losses import BarlowTwins, InfoNCE, SigLIP

__all__ = ["BarlowTwins", "GlobalBatch", "InfoNCE", "SigLIP"]
