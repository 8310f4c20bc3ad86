"""An exponential moving average of the weights, or of their fp32 masters where there are any."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

from lightning_hybrid.checks import require_whole
from lightning_hybrid.precision.averaging import AverageOfMasters, write_master_


class MasterWeightAveraging(EMAWeightAveraging):
    """Lightning's `EMAWeightAveraging`, exact in fp32 under `precision="16-true"` and `"bf16-true"`.

        average <- decay * average + (1 - decay) * master         fp32, after each step

    Validation sees the average, rounded to the model's precision; after `fit` the module holds the average. Checkpoints
    hold it as their weights, and the trained weights under a key of their own.

    Args:
        decay: part of the average that stays at each update, 0 to 1.
        **kwargs: as in `EMAWeightAveraging`: `update_every_n_steps`, `update_starting_at_step`, `use_buffers`, ...

    Raises:
        ValueError: `decay` is not between 0 and 1; in `setup`, the strategy shards the module.
    """

    def __init__(self, decay: float = 0.999, **kwargs: Any) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(
                f"`decay` (={decay}) must be between 0 and 1: it is the part of the average that stays at each update. "
                "0.999 remembers about a thousand steps."
            )
        every = kwargs.get("update_every_n_steps", 1)
        require_whole("update_every_n_steps", every, "steps are counted. Set callbacks.ema.update_every_n_steps=1")
        super().__init__(decay=decay, **kwargs)
        self._trained: list[Tensor] | None = None
        self._is_handed_over = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the averaged model, of masters, on the device to which the module has still to move."""
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise ValueError(
                f"`strategy` (={type(trainer.strategy).__name__}) and MasterWeightAveraging exclude each other: the "
                "average is a copy of the module, and FSDP2 cannot copy one. Leave the callback out, as by "
                "callbacks=default, or take another strategy."
            )
        # Lightning would copy the module where it is now, before it moves to the device.
        given, self._device = self._device, trainer.strategy.root_device if self._device is None else self._device
        try:
            super().setup(trainer, pl_module, stage)
        finally:
            self._device = given
        if stage == "fit":
            self._is_handed_over = False
            average: Any = self._average_model
            average.__class__ = AverageOfMasters
            average.gathers_at_update = False  # here it is read now and then

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the average. Collective where ranks share the update."""
        self._gather_average(pl_module)
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def _gather_average(self, pl_module: pl.LightningModule) -> None:
        if isinstance(self._average_model, AverageOfMasters):
            self._average_model.gather_(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the module the average."""
        super().on_train_end(trainer, pl_module)
        self._is_handed_over = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the module the average where nothing was left to train: a run resumed only to be tested."""
        if not self._is_handed_over and self._average_model is not None:
            self._copy_average_to_current(pl_module)

    @torch.no_grad()
    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        # Lightning swaps the two, which would round the average itself to fp16 at each validation. Here it stays where
        # it is, and the module's tensors are saved meanwhile; the second call puts them back.
        current = list(_tensors(pl_module))
        if self._trained is None:
            assert self._average_model is not None
            self._gather_average(pl_module)
            self._trained = [tensor.clone() for tensor in current]
            shown = _tensors(self._average_model.module)
        else:
            shown, self._trained = iter(self._trained), None
        for tensor, value in zip(current, shown, strict=True):
            tensor.data.copy_(value)

    @torch.no_grad()
    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        assert self._average_model is not None
        self._gather_average(pl_module)
        for tensor, average in zip(_tensors(pl_module), _tensors(self._average_model.module), strict=True):
            tensor.data.copy_(average)
            write_master_(pl_module, tensor, average)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
