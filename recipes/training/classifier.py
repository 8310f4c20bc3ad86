"""LightningModule for image classification, with loss, accuracy, optimizer and learning-rate schedule."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.optim import param_groups

log = logging.getLogger(__name__)
# Few steps per epoch and per run, chosen by us. The default recipe has 9 and 270.
FEW_STEPS = 10
MANY_STEPS = 200

Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    """LightningModule that trains a classifier of images, or of masked tokens.

    For masked tokens, the classes are the vocabulary.

    Args:
        model: Network that maps images `"batch channels height width"`, or the inputs of `datasets.text`, to logits
            `"batch num_classes"`.
        optimizer: Function that creates the optimizer from parameter groups.
        weight_decay: Weight decay of the weights. Biases and normalization parameters get none.
        schedule: Function that creates the schedule from `(optimizer, total_steps=, warmup_steps=)`. The schedule
            advances once per optimizer step.
        warmup_epochs: Warm-up of the learning rate in epochs, which may be a fraction. None: use `warmup_steps`.
        warmup_steps: Warm-up of the learning rate in optimizer steps. None: use `warmup_epochs`.
        num_classes: Number of classes, for the accuracy.
        label_smoothing: Fraction of a training target that is spread evenly over all classes (Szegedy et al. 2015,
            arXiv:1512.00567). The validation loss uses the plain targets.
        trust_ratio: False disables the trust ratio for all layers, as an ablation.
        decay_excluded: True applies weight decay to biases and normalization parameters too, as in the paper's
            ablation.
        channels_last: Use the channels-last memory format for network and images, which is faster on tensor cores.
            Results are equal up to the order of summation.
        compile: Compile the network with `torch.compile` at its first batch.

    Raises:
        ValueError: Both or none of `warmup_epochs` and `warmup_steps` are given, or an option is out of range.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Callable[..., Optimizer],
        weight_decay: float,
        schedule: Callable[..., LRScheduler],
        num_classes: int,
        warmup_epochs: float | None = None,
        warmup_steps: int | None = None,
        label_smoothing: float = 0.0,
        trust_ratio: bool = True,
        decay_excluded: bool = False,
        channels_last: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        _check_warmup(warmup_epochs, warmup_steps)
        _check_label_smoothing(label_smoothing)
        switches = {"trust_ratio": trust_ratio, "decay_excluded": decay_excluded}
        for name, value in (
            switches | {"channels_last": channels_last, "compile": compile}
        ).items():
            if not isinstance(value, bool):
                raise ValueError(f"`{name}` (={value}) must be true or false. Set {name}=true.")
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.model: nn.Module = model.to(memory_format=self.memory_format)  # type: ignore[call-overload,unused-ignore]
        if compile:
            model.compile()
        self.optimizer = optimizer
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.warmup_epochs = warmup_epochs
        self.warmup_steps = warmup_steps
        self.label_smoothing = label_smoothing
        self.trust_ratio = trust_ratio
        self.decay_excluded = decay_excluded
        # by default torchmetrics would leave NaN out of the mean
        self.val_loss = MeanMetric(nan_strategy="disable")
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")
        self._planned_steps: dict[str, int] = {}  # lengths of the schedule
        has_top5 = num_classes > 5  # with five classes or fewer it would always be 1
        self.val_acc_top5 = (
            MulticlassAccuracy(num_classes, top_k=5, average="micro") if has_top5 else None
        )
        self.test_acc_top5 = (
            MulticlassAccuracy(num_classes, top_k=5, average="micro") if has_top5 else None
        )

    def forward(self, images: Any) -> Tensor:
        """Return the logits, converted to at least fp32 so that the loss is computed in full precision."""
        if isinstance(images, Tensor):  # images, and not a pair of tensors for text
            images = images.contiguous(memory_format=self.memory_format)
        logits: Tensor = self.model(images)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of this rank's batch, with label smoothing if it is enabled."""
        images, labels = batch
        return F.cross_entropy(self(images), labels.flatten(), label_smoothing=self.label_smoothing)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the accuracy and the loss without label smoothing, averaged over batches and ranks."""
        images, labels = batch
        logits = self(images)
        labels = labels.flatten()
        self.val_loss(F.cross_entropy(logits, labels), weight=len(labels))
        self.val_acc(logits, labels)
        self.log(m.VAL_LOSS, self.val_loss, on_step=False, on_epoch=True)
        self.log(m.VAL_ACC, self.val_acc, on_step=False, on_epoch=True, prog_bar=True)
        if self.val_acc_top5 is not None:
            self.val_acc_top5(logits, labels)
            self.log(m.VAL_ACC_TOP5, self.val_acc_top5, on_step=False, on_epoch=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the top-1 and top-5 test accuracy."""
        images, labels = batch
        logits = self(images)
        labels = labels.flatten()
        self.test_acc(logits, labels)
        self.log(m.TEST_ACC, self.test_acc, on_step=False, on_epoch=True)
        if self.test_acc_top5 is not None:
            self.test_acc_top5(logits, labels)
            self.log(m.TEST_ACC_TOP5, self.test_acc_top5, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create the optimizer with parameter groups, and a learning-rate schedule for the whole run."""
        groups = param_groups(self, weight_decay=self.weight_decay)
        rank_zero_info(groups.report())
        adapted, excluded = groups
        adapted["trust_ratio"] = self.trust_ratio
        excluded["weight_decay"] = self.weight_decay if self.decay_excluded else 0.0
        optimizer = self.optimizer(groups)
        steps_per_epoch, total_steps = self._num_steps()
        if self.warmup_epochs is None:
            asked = self.warmup_steps
        else:
            asked = round(self.warmup_epochs * steps_per_epoch)
        if asked and asked >= total_steps and self.trainer.is_global_zero:
            if self.warmup_epochs is None:
                name = "warmup_steps"
            else:
                name = "warmup_epochs"
            log.warning(
                f"`{name}` (={getattr(self, name)}) is {asked} steps, but the run has only "
                f"{total_steps} steps, so the learning rate reaches optim.lr only in the last step. "
                f"Set a smaller {name}, or train longer."
            )
        if steps_per_epoch < FEW_STEPS and total_steps < MANY_STEPS and self.trainer.is_global_zero:
            log.warning(
                f"An epoch has only {steps_per_epoch} steps and the run only {total_steps}, which is "
                "too few for most networks. Set a smaller global_batch_size, or set "
                "recipe=small_images for your own images."
            )
        # A short run, such as a test of three steps, may end during its warm-up.
        warmup_steps = min(asked or 0, total_steps - 1)
        self._planned_steps = {"total_steps": total_steps, "warmup_steps": warmup_steps}
        schedule = self.schedule(optimizer, **self._planned_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Adapt a resumed learning-rate schedule to the length of this run, and warn if its length changes.

        A schedule restores its length with its state. Without this adaptation, a longer run would continue training
        beyond the end of the schedule in the checkpoint.
        """
        schedule: Any = self.lr_schedulers()
        saved_steps = {name: getattr(schedule, name, None) for name in self._planned_steps}
        if saved_steps == self._planned_steps or None in saved_steps.values():
            return
        rate_before = float(schedule.optimizer.param_groups[0]["lr"])
        for name, value in self._planned_steps.items():
            setattr(schedule, name, value)
        rates = schedule.get_lr()
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        schedule._last_lr = rates
        if self.trainer.is_global_zero:
            log.warning(
                f"The schedule now has {self._planned_steps['total_steps']} steps instead of "
                f"{saved_steps['total_steps']}, and {self._planned_steps['warmup_steps']} steps of "
                f"warm-up instead of {saved_steps['warmup_steps']}, so the learning rate jumps from "
                f"{rate_before:g} to {float(rates[0]):g} after step {self.trainer.global_step}. The "
                "result differs from that of an uninterrupted run of this length."
            )

    def _num_steps(self) -> tuple[int, int]:
        """Return the number of optimizer steps per epoch and in the whole run.

        `trainer.estimated_stepping_batches` is not used: with it Lightning 2.6 keeps a data loader from before the
        checkpoint is read, and a run resumed in the middle of an epoch would silently repeat its epoch.
        """
        trainer = self.trainer
        num_batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
        limit = trainer.limit_train_batches
        if isinstance(limit, int):
            num_batches = min(num_batches, limit)
        else:
            num_batches = int(num_batches * limit)
        steps_per_epoch = max(1, math.ceil(num_batches / trainer.accumulate_grad_batches))
        bounds = [steps_per_epoch * (trainer.max_epochs or 0), trainer.max_steps]
        return steps_per_epoch, max(1, min((bound for bound in bounds if bound > 0), default=1))


def _check_warmup(epochs: Any, steps: Any) -> None:
    if (epochs is None) == (steps is None):
        if steps is not None:
            problem = "cannot both be set, because each determines the length of the warm-up"
        else:
            problem = "cannot both be null, because one must determine the length of the warm-up"
        raise ValueError(
            f"`warmup_epochs` (={epochs}) and `warmup_steps` (={steps}) {problem}. Set one of "
            "them to null and the other to a number, such as 0 for no warm-up."
        )
    name = "warmup_steps"
    value = steps
    kind = "an integer"
    if steps is None:
        name = "warmup_epochs"
        value = epochs
        kind = "a number"
    fits = isinstance(value, int) or (isinstance(value, float) and steps is None)
    if not fits or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"`{name}` (={value}) must be {kind} of at least 0. Set {name}=0 for no warm-up."
        )


def _check_label_smoothing(value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(
            f"`label_smoothing` (={value}) must be at least 0 and below 1, because it is a "
            "fraction of the target. Set label_smoothing=0.1, or 0 to disable it."
        )
