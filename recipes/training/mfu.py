"""Calculation of the FLOPs per image and the peak FLOP/s that determine the model FLOPs utilization (MFU)."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from torch import nn

from lightning_hybrid.callbacks import TrainingMetrics
from recipes.networks.flops import training_flops_per_image
from recipes.networks.peak_flops import peak_flops_per_s


def fill_in(trainer: pl.Trainer, model: nn.Module, cfg: DictConfig) -> None:
    """Set the FLOPs per image and the device's peak FLOP/s in the callback `TrainingMetrics`.

    Values that the user has configured are not changed. Nothing is set if processes are forked: querying the device
    name initializes CUDA, which cannot be used after a fork.
    """
    device = trainer.strategy.root_device
    may_ask = device.type == "cuda" and getattr(trainer.strategy, "_start_method", None) in (
        None,
        "popen",
    )
    if may_ask:
        name = torch.cuda.get_device_name(device)
    else:
        name = ""
    peak = peak_flops_per_s(
        name, _operands(cfg.precision), allow_tf32=torch.backends.cuda.matmul.allow_tf32
    )
    shape = image_shape(cfg)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (
            isinstance(callback, TrainingMetrics)
            and callback.flops_per_image is None
            and peak
            and shape
        ):
            callback.flops_per_image = training_flops_per_image(model, shape)
            callback.peak_flops_per_s = peak


def image_shape(cfg: DictConfig) -> tuple[int, int, int] | None:
    """Return the channels, height and width of input images, or None if their size is not configured."""
    size = cfg.data.get("image_size") or cfg.model.get("image_size")
    if isinstance(size, int):
        return (cfg.model.get("in_channels", 3), size, size)
    return None


def _operands(precision: object) -> torch.dtype:
    """Return the dtype of matrix-product operands for a Lightning precision.

    >>> _operands("16-mixed"), _operands("bf16-true"), _operands(32)
    (torch.float16, torch.bfloat16, torch.float32)
    """
    words = str(precision)
    if words.startswith("16"):
        return torch.float16
    if words.startswith("bf16"):
        return torch.bfloat16
    return torch.float32
