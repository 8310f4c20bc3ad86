"""Callback that keeps an exponential moving average of the weights."""

from __future__ import annotations

from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_hybrid.checks import plain_value, require_whole


class HostCountedAverage(AveragedModel):
    """`AveragedModel` that stores its update counter on the CPU, to avoid device synchronization.

    torch's own class reads the counter from the device twice in each update.

    Args:
        averaged: torch's `AveragedModel`, whose copy of the module is reused.
    """

    def __init__(self, averaged: AveragedModel) -> None:
        # The constructor of `AveragedModel` would copy the module again.
        nn.Module.__init__(self)
        self.module = averaged.module
        self.avg_fn = averaged.avg_fn
        self.multi_avg_fn = averaged.multi_avg_fn
        self.use_buffers = averaged.use_buffers
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the weights of `model`, without waiting for the device."""
        assert self.avg_fn is not None
        is_first = int(self.n_averaged) == 0
        averages = self._tensors_of(self.module)
        for average, current in zip(averages, self._tensors_of(model), strict=True):
            weight = current.detach().to(average.device)
            if is_first:
                average.copy_(weight)
            else:
                average.copy_(self.avg_fn(average, weight, self.n_averaged))
        if not self.use_buffers:
            for average, current in zip(self.module.buffers(), model.buffers(), strict=True):
                average.copy_(current)
        self.n_averaged += 1

    def _tensors_of(self, model: nn.Module) -> chain[torch.Tensor]:
        buffers = model.buffers() if self.use_buffers else ()
        return chain(model.parameters(), buffers)


class MasterWeightAveraging(EMAWeightAveraging):
    """Exponential moving average of the fp32 weights, based on Lightning's `EMAWeightAveraging`.

        average <- decay * average + (1 - decay) * weight         fp32, after each step

    Validation uses the average. When `fit` ends, the average is copied to the module. Checkpoints
    contain the average as their weights, and the trained weights under a separate key. Unlike
    Lightning's class, this callback checks its arguments, and it copies the average to the module
    even if no training step was left to run.

    Args:
        decay: Fraction of the average that is kept at each update, between 0 and 1.
        **kwargs: As in `EMAWeightAveraging`: `update_every_n_steps`, `update_starting_at_step`,
            `use_buffers`, ...

    Raises:
        ValueError: `decay` is not between 0 and 1, or, in `setup`, the strategy shards the module.
    """

    def __init__(self, decay: float = 0.999, **kwargs: Any) -> None:
        decay = plain_value(decay)
        if not 0 <= decay <= 1:
            raise ValueError(
                f"`decay` (={decay}) must be between 0 and 1, because each update multiplies the previous average by "
                "`decay`. Set decay=0.999, for example, to average over about a thousand steps."
            )
        every = plain_value(kwargs.pop("update_every_n_steps", 1))
        require_whole(
            "update_every_n_steps",
            every,
            "the average is updated every `update_every_n_steps` steps. Set update_every_n_steps=1",
        )
        super().__init__(decay=decay, update_every_n_steps=every, **kwargs)
        self._is_handed_over = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Create the averaged model on the training device."""
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise ValueError(
                f"`strategy` (={type(trainer.strategy).__name__}) cannot be combined with MasterWeightAveraging, "
                "because the callback averages a copy of the module, but FSDP2 modules cannot be copied. Remove the "
                "callback, or use another strategy."
            )
        # Lightning would create the copy on the module's current device, which is not yet the
        # training device.
        device_of_user = self._device
        if self._device is None:
            self._device = trainer.strategy.root_device
        try:
            super().setup(trainer, pl_module, stage)
        finally:
            self._device = device_of_user
        if stage == "fit":
            self._is_handed_over = False
            assert self._average_model is not None
            self._average_model = HostCountedAverage(self._average_model)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the averaged weights to the module at the end of training."""
        super().on_train_end(trainer, pl_module)
        self._is_handed_over = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the average to the module if no training step was left to run.

        This happens if a finished run is resumed only to be tested.
        """
        if not self._is_handed_over and self._average_model is not None:
            self._copy_average_to_current(pl_module)
