"""Random numbers that a resumed run draws exactly as the run that was not interrupted."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from lightning_hybrid.checks import require_whole

# What numbers are drawn for, if not for a batch: the fifth word of the entropy.
_EPOCH = 1
_VALIDATION = 2


class SeedEachStep(Callback):
    """Seeding of each batch's random numbers from (seed, rank, epoch, batch), not from all that went before.

    A run resumed in mid-epoch then draws the same dropout masks as the uninterrupted one, on each rank. The start of an
    epoch is seeded from (seed, rank, epoch), a validation from these and the step. It seeds torch's generators, the
    CUDA ones too, numpy's and Python's. List it before callbacks that draw numbers.

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int) -> None:
        require_whole("seed", seed, "NumPy's generators take no other. Set seed=0", least=0)
        self.seed = seed

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed for what is drawn before the first batch."""
        self._seed(trainer, 0, _EPOCH)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed for the batch."""
        self._seed(trainer, batch_idx)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed for a validation, which may come at any batch of the epoch."""
        self._seed(trainer, trainer.global_step, _VALIDATION)

    def _seed(self, trainer: pl.Trainer, *place: int) -> None:
        # Seeded, and not saved: Lightning saves no generator state, and rank zero alone writes the checkpoint.
        entropy = [self.seed, trainer.global_rank, trainer.current_epoch, *place]
        # Three independent words: with one seed for all, the generators would draw related numbers.
        for_torch, for_numpy, for_python = (
            np.random.SeedSequence(entropy).generate_state(3, np.uint64).tolist()
        )
        torch.manual_seed(for_torch)
        np.random.seed(for_numpy % 2**32)
        random.seed(for_python)
