"""Construction of the trainer, LightningModule and data module from a configuration."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_info
from omegaconf import DictConfig
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.models import correct_momentum_
from recipes.cli import config_check, launch
from recipes.cli.world import batch_line, check_world
from recipes.training import keys, mfu, resume, tracking
from recipes.training.classifier import Classifier
from recipes.training.fully_sharded import FullyShardedStrategy, ShardedClassifier

launch.register_resolvers()  # registered here because all programs and tests that compose `train` import this module

OPTIONS = "warmup_epochs warmup_steps label_smoothing trust_ratio decay_excluded channels_last compile".split()


def build(
    cfg: DictConfig, ckpt_path: str | None = None
) -> tuple[pl.Trainer, Classifier, pl.LightningDataModule]:
    """Build and validate the trainer, LightningModule and data module before Lightning starts processes.

    Raises:
        ValueError: A value of the configuration is invalid.
    """
    keys.check_precision(cfg)
    config_check.check(cfg, keys.TRAIN_KEYS)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    # The data module is built first, so that a missing folder is reported before a large network is built.
    data: pl.LightningDataModule = instantiate(cfg.data)
    optimizer = instantiate(cfg.optim)
    schedule = instantiate(cfg.schedule)
    # raises here if an argument is wrong
    schedule(optimizer([nn.Parameter(torch.zeros(1))]), total_steps=2, warmup_steps=1)
    trainer: pl.Trainer = instantiate(
        cfg.trainer,
        strategy=instantiate(cfg.strategy),
        callbacks=[
            resume.SameCheckpoint(ckpt_path),
            *filter(None, map(instantiate, cfg.callbacks.values())),
        ],
        logger=tracking.logger_of(cfg, ckpt_path=ckpt_path) or False,
    )
    check_world(trainer)
    if hasattr(data, "image_shape"):
        unit = "images"
    else:
        unit = "sequences"
    line = batch_line(
        cfg.global_batch_size, trainer.world_size, trainer.accumulate_grad_batches, unit=unit
    )
    model = keys.model_for(data, cfg, trainer)
    if any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        share = cfg.global_batch_size // (trainer.world_size * trainer.accumulate_grad_batches)
        line += f" BatchNorm uses {share} images."
    rank_zero_info(line)
    num_parts = getattr(trainer.strategy, "num_microbatches", trainer.accumulate_grad_batches)
    correct_momentum_(model, accumulate_grad_batches=num_parts)
    kind: Any = instantiate(cfg.module)
    if kind.func is Classifier:
        mfu.fill_in(trainer, model, cfg)
    if isinstance(trainer.strategy, FullyShardedStrategy):
        if kind.func is not Classifier:
            raise ValueError(
                f"`module` (={kind.func.__name__}) and strategy=fsdp2 cannot be combined, because "
                "this strategy can shard only a `Classifier`. Set strategy=hybrid."
            )
        kind = ShardedClassifier
    module = kind(
        model=model,
        optimizer=optimizer,
        weight_decay=cfg.optim.weight_decay,
        schedule=schedule,
        num_classes=cfg.model.num_classes,
        **{name: cfg[name] for name in OPTIONS},
    )
    return trainer, module, data
