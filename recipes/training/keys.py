"""Types and ranges of the keys in `conf/train.yaml`, and checks of precision and network."""

from __future__ import annotations

from collections.abc import Sequence
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

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.checks import first_line
from lightning_hybrid.data.order import EpochOrder, largest_global_batch_size
from recipes.cli import preflight
from recipes.cli.ranges import Count, NotNegative, Positive, Ranks, Seed
from recipes.networks.flops import forward_flops_per_image

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
    "overwrite": bool,
    "run_dir": str,
    "module": pl.LightningModule,
    "module._partial_": Literal[True],
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


# Largest image side, in pixels, that the small networks of conf/model are meant for.
SMALL_IMAGE = 64


def check_precision(cfg: DictConfig) -> None:
    """Raise if the configured precision is unknown to Lightning or not supported by the strategy.

    Raises:
        ValueError: The precision is unknown or not supported.
    """
    preflight.check_values({"precision": cfg.precision})
    is_sharded = str(cfg.strategy.get("_target_")).endswith("FullyShardedStrategy")
    if is_sharded and str(cfg.precision) not in (
        "32-true",
        "32",
        "bf16-mixed",
        "16-true",
        "bf16-true",
    ):
        raise ValueError(
            f"`precision` (='{cfg.precision}') and strategy=fsdp2 cannot be combined, because the "
            "shards are fp32 master weights, but Lightning does not scale the loss for them. Set "
            "precision=16-true, bf16-true, bf16-mixed or 32-true."
        )


def model_for(data: pl.LightningDataModule, cfg: DictConfig, trainer: pl.Trainer) -> nn.Module:
    """Build the configured network, and raise if it does not match the images and classes of the dataset.

    Raises:
        ValueError: The network does not accept the images, it has fewer logits than `data` has classes, or `data` has
            fewer images than a step needs. The message gives all keys to set.
    """
    model: nn.Module = instantiate(cfg.model)
    if getattr(model, "node_slices", ()) and not isinstance(
        trainer.strategy, HybridAllReduceStrategy
    ):
        raise ValueError(
            f"`model.slice_fc` (=node) and `strategy` (={type(trainer.strategy).__name__}) cannot "
            "be combined, because this strategy does not divide layers among ranks. Set "
            "strategy=hybrid, or model.slice_fc=off."
        )
    num_classes = getattr(data, "num_classes", 0)
    shape = getattr(data, "image_shape", None)
    count = getattr(data, "num_train_images_up_to", None)
    batch = cfg.global_batch_size
    num_images = batch if count is None else count(batch)
    parts = {
        "world_size": trainer.world_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }
    if cfg.model.num_classes >= num_classes:
        also = []
    else:
        also = [f"model.num_classes={num_classes}"]
    if num_images < batch:
        also.append(f"global_batch_size={largest_global_batch_size(num_images, **parts)}")
    if shape is not None:
        try:
            forward_flops_per_image(model, shape)
        except (RuntimeError, ValueError) as error:
            reason = first_line(error)
            raise ValueError(
                f"`model` (={type(model).__name__}) cannot process the images of {type(data).__name__}, "
                f"which are {' x '.join(map(str, shape))}: {reason}. Set "
                f"{' '.join([_fitting(cfg, shape), *also])}."
            ) from error
    if cfg.model.num_classes < num_classes:
        raise ValueError(
            f"`model.num_classes` (={cfg.model.num_classes}) must be at least the number of "
            f"classes of {type(data).__name__} (={num_classes}), because every class needs a "
            f"logit. Set {' '.join(also)}."
        )
    # raises if the batch has more images than the dataset
    EpochOrder(num_images=num_images, global_batch_size=batch, seed=0, **parts)
    return model


def _fitting(cfg: DictConfig, shape: Sequence[int]) -> str:
    """Return command-line overrides with which the network accepts images of this shape."""
    channels, size, _ = shape
    is_for_one_size = "image_size" in cfg.model
    if is_for_one_size and cfg.model.in_channels != channels == 3 and size > SMALL_IMAGE:
        return "model=resnet50"  # suited to large images; the small networks would be slower and no better
    if is_for_one_size:
        has_size = [f"model.image_size={size}"]
    else:
        has_size = []
    return " ".join([f"model.in_channels={channels}", *has_size])
