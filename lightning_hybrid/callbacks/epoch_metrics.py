"""Averages of an epoch that survive a checkpoint in its middle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_hybrid.run_status import run_status

# The key of the sums in a checkpoint.
KEY = "epoch_metrics"


class KeepEpochMetrics(Callback):
    """Save what training has summed up in the epoch so far, on each rank, in checkpoints within the epoch.

        `torchmetrics` objects of the module        their states
        `self.log(..., on_epoch=True)`              sums and weights of Lightning's

    Lightning 2.6 saves neither: after a resume in mid-epoch the epoch's values are those of its rest; so it is here
    under another number of ranks, with a warning. *Every rank must have this callback.* A value that is logged before
    the checkpoint and never again in that epoch is lost.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None  # of a checkpoint, as far as it has not been given back
        self._is_in_epoch = False

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Gather the sums of all ranks into the checkpoint. Collective."""
        # A value that is not logged again before this checkpoint is still in what the last one restored.
        own: dict[str, Any] = self._restored or {"metrics": {}, "logged": {}}
        # A checkpoint after the last batch goes on in the next epoch, whose sums start at zero.
        if self._is_in_epoch and not trainer.is_last_batch:
            own = {
                "metrics": own["metrics"] | dict(_states(trainer, pl_module)),
                "logged": own["logged"] | dict(_sums(trainer)),
            }
        ranks: list[Any] = [own]
        if run_status(trainer).is_ending:
            return  # the next run has the values of the epoch's rest only
        if trainer.world_size > 1 and dist.is_initialized():
            ranks = [None] * trainer.world_size
            # Each rank has sums of its own, and rank zero alone writes the checkpoint.
            dist.all_gather_object(ranks, own)
        if any(each["metrics"] or each["logged"] for each in ranks):
            checkpoint[KEY] = ranks

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take this rank's sums out of the checkpoint."""
        ranks = checkpoint.get(KEY)
        if ranks is not None and len(ranks) != trainer.world_size:
            rank_zero_warn(
                f"`world_size` (={trainer.world_size}) is not that of the checkpoint (={len(ranks)}), whose ranks had "
                "each summed up its part of the epoch's metrics: the values of this epoch will be of its rest only."
            )
            ranks = None
        self._restored = None if ranks is None else ranks[trainer.global_rank]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Give the metrics their sums back, before the first batch after a resume."""
        self._is_in_epoch = True
        if self._restored is None:
            return
        metrics = dict(_metrics(pl_module))
        for name, (num_updates, states) in self._restored["metrics"].items():
            for state, value in states.items():
                setattr(metrics[name], state, _on(value, pl_module.device))
            metrics[name]._update_count = num_updates
        self._restored["metrics"] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the restored sums to Lightning's, each when it is logged for the first time after a resume."""
        if self._restored is None:
            return
        results, logged = cast(Any, trainer.fit_loop.epoch_loop._results), self._restored["logged"]
        for key in [key for key in logged if key in results]:
            for name, value in logged.pop(key).items():
                setattr(results[key], name, getattr(results[key], name) + _on(value, pl_module.device))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the sums: the epoch is over."""
        self._restored, self._is_in_epoch = None, False


def _metrics(module: torch.nn.Module) -> Iterator[tuple[str, Metric]]:
    return ((name, child) for name, child in module.named_modules() if isinstance(child, Metric))


def _states(trainer: pl.Trainer, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    # Those that training has updated since their reset, and not those that validation logs.
    results = cast(Any, trainer.fit_loop.epoch_loop.val_loop._results) or {}
    of_validation = {id(result.value) for result in results.values() if not result.is_tensor}
    for name, metric in _metrics(module):
        if metric._update_count and id(metric) not in of_validation:
            states = {state: _on(getattr(metric, state), "cpu", is_copied=True) for state in metric._defaults}
            yield name, (metric._update_count, states)


def _sums(trainer: pl.Trainer) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for key, result in cast(Any, trainer.fit_loop.epoch_loop._results).items():
        names = {"mean": ("value", "cumulated_batch_size"), "sum": ("value",)}
        reduction = "mean" if result.meta.is_mean_reduction else "sum" if result.meta.is_sum_reduction else None
        if result.is_tensor and result.meta.on_epoch and reduction is not None:
            yield key, {name: _on(getattr(result, name), "cpu", is_copied=True) for name in names[reduction]}


def _on(value: Any, device: torch.device | str, *, is_copied: bool = False) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=is_copied)
    return [each.detach().to(device, copy=is_copied) for each in value]
