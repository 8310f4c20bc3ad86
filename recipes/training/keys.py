"""Keys of conf/train.yaml, and what each must hold: the parts by what they make, the rest by type and range."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig
from pydantic import Field
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_hybrid.models import forward_flops_per_image
from recipes.cli.ranges import Count, NotNegative, Positive, Ranks, Seed

TRAIN_KEYS: dict[str, Any] = {
    "seed": Seed,
    "precision": str | int | None,
    "global_batch_size": Count,
    "batch_size_per_rank": int | None,
    "max_batch_size_per_rank": int | None,
    "warmup_epochs": NotNegative | None,
    "warmup_steps": int | None,
    "label_smoothing": float,
    "channels_last": bool,
    "compile": bool,
    "trust_ratio": bool,
    "decay_excluded": bool,
    "resume": str | None,
    "run_dir": str,
    "model": nn.Module,
    "model.num_classes": Count,
    "data": pl.LightningDataModule,
    "optim": Optimizer,
    "optim._partial_": Literal[True],
    "optim.weight_decay": float,
    "schedule": LRScheduler,
    "schedule._partial_": Literal[True],
    "strategy": Strategy,
    "trainer": pl.Trainer,
    "trainer.devices": Ranks | list[int] | str,
    "trainer.num_nodes": Ranks,
    "trainer.check_val_every_n_epoch": Count | None,
    "trainer.val_check_interval": Positive | str | dict | None,
    "trainer.accumulate_grad_batches": Count,
    "callbacks": dict[str, Callback | None],
    "logger": Logger | None | Annotated[dict, Field(max_length=0)],
}


# Names of dtypes, which are no names of Lightning's, and the precision that is meant here.
DTYPE_NAMES = {"fp16": "16-true", "float16": "16-true", "half": "16-true", "bfloat16": "bf16-true"}
DTYPE_NAMES |= {"fp32": "32-true", "float32": "32-true", "fp64": "64-true", "float64": "64-true"}


def check_precision(cfg: DictConfig) -> None:
    """Raise `ValueError` with Lightning's name where `precision` is the name of a dtype."""
    if (name := DTYPE_NAMES.get(str(cfg.precision))) is not None:
        raise ValueError(
            f"`precision` (='{cfg.precision}') must be a name of Lightning's, such as 16-true (half-precision model on "
            f"fp32 masters), bf16-true, 32-true or 16-mixed. Set precision={name}."
        )


def model_for(data: pl.LightningDataModule, cfg: DictConfig) -> nn.Module:
    """Make the configured network, and refuse it where it does not take what `data` gives.

    Raises:
        ValueError: It does not, or it has fewer logits than `data` has classes.
    """
    model: nn.Module = instantiate(cfg.model)
    num_classes, shape = getattr(data, "num_classes", 0), getattr(data, "image_shape", None)
    if cfg.model.num_classes < num_classes:
        raise ValueError(
            f"`model.num_classes` (={cfg.model.num_classes}) must be at least the number of classes of "
            f"{type(data).__name__} (={num_classes}): the others would have no logit. Set "
            f"model.num_classes={num_classes}."
        )
    if shape is not None:
        try:
            forward_flops_per_image(model, shape)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"`model` (={type(model).__name__}) must take images of {' x '.join(map(str, shape))}, which "
                f"{type(data).__name__} gives: {error}. Set model.in_channels={shape[0]}, and model.image_size="
                f"{shape[1]} where it has one."
            ) from error
    return model
