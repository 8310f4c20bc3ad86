"""Ablation without fp32 master weights, which rounds weights and optimizer state to fp16 after each step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


class WithoutMasters(Callback):
    """Callback that rounds all weights and the optimizer state to fp16 after each optimizer step.

    Between two steps, weights then have only the precision of a plain fp16 model: an update that is smaller than half
    the distance between two fp16 numbers is lost. The update itself is still computed in fp32.
    """

    def __init__(self) -> None:
        self._rounded_step = -1

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Round weights and optimizer state to fp16, once per optimizer step."""
        if trainer.global_step == self._rounded_step:
            return
        self._rounded_step = trainer.global_step
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.copy_(parameter.half())
            for optimizer in trainer.optimizers:
                for state in optimizer.state.values():
                    for value in state.values():
                        if (
                            isinstance(value, torch.Tensor)
                            and value.is_floating_point()
                            and value.dim() > 0
                        ):
                            value.copy_(value.half())
