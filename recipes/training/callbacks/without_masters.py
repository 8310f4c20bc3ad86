"""Ablation of fp32 master weights: weights and momentum that fp16 holds."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


class WithoutMasters(Callback):
    """Rounding of all weights and of the optimizer's state to fp16 after each optimizer step.

    What is left between two steps is then what a model in plain fp16 stores: an update below half the distance of two
    fp16 numbers is lost. The update itself is computed in fp32, as before.
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
        """Round, once per optimizer step."""
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
