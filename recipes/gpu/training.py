"""Modules, loaders and callbacks for timing training runs with images that are already on the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_hybrid.optim import LARS, param_groups


def fused_sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Create torch's fused SGD, without weight decay for biases and normalization layers."""
    groups = param_groups(net, weight_decay=1e-4)
    plain = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
    return torch.optim.SGD(plain, lr=1e-3, momentum=0.9, fused=True)


def fused_lars(net: nn.Module) -> torch.optim.Optimizer:
    """Create fused LARS, without weight decay and trust ratios for biases and normalization layers."""
    return LARS(param_groups(net, weight_decay=1e-4), lr=1e-3, momentum=0.9, fused=True)


class SameBatch:
    """Data loader that repeats one batch, so that no time is spent on loading."""

    def __init__(self, batch: tuple[Tensor, Tensor], num_batches: int) -> None:
        self._batch = batch
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.repeat(self._batch, self._num_batches)


class TrainedNet(pl.LightningModule):
    """LightningModule that trains a classifier with the optimizer that a given function creates."""

    def __init__(self, net: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net = net
        self._make = make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images).float(), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer with the function passed to the constructor."""
        return self._make(self.net)


class FitClock(Callback):
    """Callback that measures the total time of the training steps from `begin` to `end - 1`.

    Before it reads the clock, it waits for the device.
    """

    def __init__(self, *, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self.seconds = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock before the first timed step."""
        if batch_idx == self.begin:
            self.seconds = -self._now(module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop the clock after the last timed step."""
        if batch_idx == self.end - 1:
            self.seconds += self._now(module)

    @staticmethod
    def _now(module: pl.LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        return time.perf_counter()
