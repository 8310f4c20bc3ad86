"""Callback for mid-epoch checkpoints that never make a resumed run skip validation or epoch-end hooks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class StepCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` that postpones a checkpoint if validation or the epoch end follows the step.

    With `every_n_train_steps`, a postponed checkpoint is saved at the end of the epoch or, in the middle of an epoch,
    one step later. All arguments and other behavior are those of `ModelCheckpoint`.
    """

    # Lightning 2.6 treats a checkpoint of such a step as one of a finished epoch. A run that resumes from it
    # skips that validation and, at the end of an epoch, all epoch-end work, including schedules by epochs.
    _is_due = False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save a due checkpoint, or postpone it if validation or the end of the epoch follows this batch."""
        every = self._every_n_train_steps
        step = trainer.global_step
        loop = trainer.fit_loop.epoch_loop
        is_its_step = every > 0 and step % every == 0
        # A checkpoint is due once per optimizer step, even with gradient accumulation.
        self._is_due |= is_its_step and self._last_global_step_saved != step
        data_fetcher = trainer.fit_loop._data_fetcher
        assert data_fetcher is not None
        # A validation or the end of the epoch follows this batch: postpone the checkpoint.
        if loop.batch_progress.is_last_batch or loop._should_check_val_fx(data_fetcher):
            return
        accumulates = loop._should_accumulate()
        if not self._is_due or (is_its_step and not accumulates):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self._is_due &= self._last_global_step_saved != step
        elif not accumulates:
            # During accumulation a checkpoint would lose the accumulated gradients.
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save checkpoints as `ModelCheckpoint` does, and save a postponed checkpoint."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._is_due:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
        self._is_due = False
