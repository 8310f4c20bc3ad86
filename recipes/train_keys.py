"""Keys of conf/train.yaml, and what each must hold: the parts by what they make, the rest by type and range."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recipes import configuration
from recipes.configuration import COUNT, RANKS, SEED

TRAIN_KEYS: dict[str, Any] = {
    "seed": SEED,
    "precision": str | int | None,
    "global_batch_size": COUNT,
    "batch_size_per_rank": int | None,
    "max_batch_size_per_rank": int | None,
    "warmup_epochs": float | None,
    "warmup_steps": int | None,
    "label_smoothing": float,
    "channels_last": bool,
    "compile": bool,
    "trust_ratio": bool,
    "decay_excluded": bool,
    "resume": str | None,
    "run_dir": str,
    "model": nn.Module,
    "model.num_classes": COUNT,
    "data": pl.LightningDataModule,
    "optim": Optimizer,
    "optim.weight_decay": float,
    "schedule": LRScheduler,
    "strategy": Strategy,
    "trainer": pl.Trainer,
    "trainer.devices": (RANKS, list[int], str),
    "trainer.num_nodes": RANKS,
    "trainer.accumulate_grad_batches": COUNT,
    "callbacks": dict[str, Callback | None],
    "logger": Logger | None,
}


def check(cfg: DictConfig) -> None:
    """Refuse a configuration of `recipes/train.py` that cannot work.

    Raises:
        ValueError: As :func:`recipes.configuration.check`.
    """
    configuration.check(cfg, TRAIN_KEYS)
