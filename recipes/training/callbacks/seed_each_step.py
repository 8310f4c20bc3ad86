"""Callback that lets a resumed run draw the same random numbers as an uninterrupted run."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from lightning_hybrid.checks import require_whole

# Fifth word of the entropy, for random numbers that are not drawn for a training batch.
_EPOCH = 1
_VALIDATION = 2


class SeedEachStep(Callback):
    """Callback that seeds all random number generators before each batch from (seed, rank, epoch, batch).

    A run resumed in the middle of an epoch then draws the same dropout masks as an uninterrupted run, on each rank. The
    start of an epoch is seeded from (seed, rank, epoch), and a validation from (seed, rank, epoch, step). The callback
    seeds the generators of torch (CPU and CUDA), NumPy and Python. List it before callbacks that draw random numbers.

    Args:
        seed: Seed of the run.
    """

    def __init__(self, seed: int) -> None:
        require_whole(
            "seed", seed, "random number generators accept no other seeds. Set seed=0", least=0
        )
        self.seed = seed

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed the random number generators for code that runs before the first batch of an epoch."""
        self._seed(trainer, 0, _EPOCH)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed the random number generators for a training batch."""
        self._seed(trainer, batch_idx)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed the random number generators for a validation, which can run after any batch of an epoch."""
        self._seed(trainer, trainer.global_step, _VALIDATION)

    def _seed(self, trainer: pl.Trainer, *place: int) -> None:
        # Seeded instead of saved: Lightning saves no generator state, and only rank zero writes the checkpoint.
        entropy = [self.seed, trainer.global_rank, trainer.current_epoch, *place]
        # Three independent seeds: with a common seed, the numbers of the generators would be related.
        for_torch, for_numpy, for_python = (
            np.random.SeedSequence(entropy).generate_state(3, np.uint64).tolist()
        )
        torch.manual_seed(for_torch)
        np.random.seed(for_numpy % 2**32)
        random.seed(for_python)
