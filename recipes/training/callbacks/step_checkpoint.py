"""Checkpoints within an epoch from which a run goes on with nothing left out."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class StepCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, but never between a step and the validation or the end of the epoch after it.

    With `every_n_train_steps` such a checkpoint comes at the end of the epoch, or in mid-epoch one step later. All
    arguments and all else are `ModelCheckpoint`'s.
    """

    # Lightning 2.6 takes a checkpoint that was written there for one of a finished epoch: a run that goes on from it
    # leaves out that validation, and at the end of an epoch all that is done there, schedules by epochs included.
    _is_due = False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save, or put off a checkpoint that is due."""
        every = self._every_n_train_steps
        step = trainer.global_step
        loop = trainer.fit_loop.epoch_loop
        is_its_step = every > 0 and step % every == 0
        # Due once per step, also where several batches make it.
        self._is_due |= is_its_step and self._last_global_step_saved != step
        data_fetcher = trainer.fit_loop._data_fetcher
        assert data_fetcher is not None
        # A validation or the end of the epoch follows this batch: the checkpoint waits for it.
        if loop.batch_progress.is_last_batch or loop._should_check_val_fx(data_fetcher):
            return
        accumulates = loop._should_accumulate()
        if not self._is_due or (is_its_step and not accumulates):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self._is_due &= self._last_global_step_saved != step
        elif not accumulates:  # the gradients of a part of a step would be lost
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save as `ModelCheckpoint`, and what was put off."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._is_due:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
        self._is_due = False
