"""Image classification as a LightningModule: network, loss, accuracy, optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning.pytorch as pl
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid import metrics as m
from lightning_hybrid.optim import param_groups

Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    """Train a network to name the class of an image.

    Args:
        model: Images `"batch channels height width"` -> logits `"batch num_classes"`.
        optimizer: Makes the optimizer out of parameter groups.
        weight_decay: Of weights; biases and normalisation get none.
        schedule: Makes the schedule out of `(optimizer, total_steps=, warmup_steps=)`; it steps once per update.
        warmup_epochs: Of the learning rate; may be a fraction.
        num_classes: For the accuracy.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Callable[..., Optimizer],
        weight_decay: float,
        schedule: Callable[..., LRScheduler],
        warmup_epochs: float,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.warmup_epochs = warmup_epochs
        self.val_loss = MeanMetric()
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")
        has_top5 = num_classes > 5  # else it is 1
        self.val_acc_top5 = MulticlassAccuracy(num_classes, top_k=5, average="micro") if has_top5 else None
        self.test_acc_top5 = MulticlassAccuracy(num_classes, top_k=5, average="micro") if has_top5 else None

    def forward(self, images: Tensor) -> Tensor:
        """Logits, fp32 whatever the network computes in: the loss is fp32 before any mean."""
        logits: Tensor = self.model(images)
        return logits.float()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy of this rank's batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracy; the metrics add up over batches and ranks."""
        images, labels = batch
        logits = self(images)
        self.val_loss(F.cross_entropy(logits, labels), weight=len(labels))
        self.val_acc(logits, labels)
        self.log(m.VAL_LOSS, self.val_loss, on_step=False, on_epoch=True)
        self.log(m.VAL_ACC, self.val_acc, on_step=False, on_epoch=True, prog_bar=True)
        if self.val_acc_top5 is not None:
            self.val_acc_top5(logits, labels)
            self.log(m.VAL_ACC_TOP5, self.val_acc_top5, on_step=False, on_epoch=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Accuracy, top-1 and top-5."""
        images, labels = batch
        logits = self(images)
        self.test_acc(logits, labels)
        self.log(m.TEST_ACC, self.test_acc, on_step=False, on_epoch=True)
        if self.test_acc_top5 is not None:
            self.test_acc_top5(logits, labels)
            self.log(m.TEST_ACC_TOP5, self.test_acc_top5, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimizer on the parameter groups, schedule over all steps of the run."""
        groups = param_groups(self.model, weight_decay=self.weight_decay)
        rank_zero_info(groups.report())
        optimizer = self.optimizer(groups)
        steps_per_epoch, total_steps = self._num_steps()
        warmup_steps = min(round(self.warmup_epochs * steps_per_epoch), total_steps - 1)
        schedule = self.schedule(optimizer, total_steps=total_steps, warmup_steps=warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _num_steps(self) -> tuple[int, int]:
        """Steps of an epoch, and of the run.

        Not `trainer.estimated_stepping_batches`: that makes Lightning 2.6 keep a loader from before the checkpoint is
        read, and a run resumed in mid-epoch then begins its epoch anew, without a word.
        """
        trainer = self.trainer
        num_batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
        limit = trainer.limit_train_batches
        num_batches = min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
        steps_per_epoch = max(1, math.ceil(num_batches / trainer.accumulate_grad_batches))
        bounds = [steps_per_epoch * (trainer.max_epochs or 0), trainer.max_steps]
        return steps_per_epoch, max(1, min((bound for bound in bounds if bound > 0), default=1))
