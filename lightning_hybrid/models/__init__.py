"""Corrections for BatchNorm under gradient accumulation and activation checkpointing."""

from lightning_hybrid.models.batch_norm import correct_momentum_, corrected_momentum

__all__ = ["correct_momentum_", "corrected_momentum"]
