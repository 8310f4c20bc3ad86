"""Steps that a resumed run repeats exactly."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback


class SeedEachStep(Callback):
    """Draw the random numbers of a batch from (seed, rank, epoch, batch), not from all that went before.

    A run resumed in mid-epoch then draws the same dropout masks as the uninterrupted one, on each rank, although
    Lightning saves no generator state and rank zero alone writes the checkpoint.

    Args:
        seed: The run's.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed torch's generators, the CUDA ones too."""
        entropy = [self.seed, trainer.global_rank, trainer.current_epoch, batch_idx]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
