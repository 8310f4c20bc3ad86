"""Counting of floating-point operations per image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

_BATCH = 2  # BatchNorm cannot train on a single value per channel, such as one image of one pixel


def forward_flops_per_image(model: nn.Module, image_shape: Sequence[int]) -> int:
    """Count the floating-point operations of a forward pass per image.

        flops = 2 * multiply-adds of all convolutions and matrix products

    Nothing is computed, and `model` is not changed. As usual, normalization, activations, pooling and additions are not
    counted. Papers and torchvision often count multiply-adds as one FLOP, which gives half of this number.

    Args:
        model: Network for batches of images, on any device, in any dtype, in training or evaluation mode.
        image_shape: Channels, height and width of one image.

    Raises:
        ValueError: `image_shape` contains a value that is not a positive integer.

    >>> forward_flops_per_image(nn.Conv2d(3, 8, 3, padding=1), (3, 10, 10)) == 2 * 8 * 3 * 3**2 * 10**2
    True
    """
    return _flops(model, image_shape, backward=False)


def training_flops_per_image(model: nn.Module, image_shape: Sequence[int]) -> int:
    """Count the floating-point operations of a forward and backward pass per image.

        flops = forward + gradients of the weights + gradients of the activations = about 3 * forward

    It is a little less than three times, because the images need no gradient. The second forward pass of activation
    checkpointing is not counted (model FLOPs, not hardware FLOPs; Chowdhery et al. 2022, arXiv:2204.02311), nor is the
    optimizer. See `forward_flops_per_image`.

    >>> layers = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1))
    >>> training_flops_per_image(layers, (3, 1, 1)) == 2 * (2 * 3 * 8 + 3 * 8 * 8)
    True
    """
    return _flops(model, image_shape, backward=True)


def _flops(model: nn.Module, image_shape: Sequence[int], *, backward: bool) -> int:
    if not all(isinstance(size, int) and size > 0 for size in image_shape):
        raise ValueError(
            f"`image_shape` (={tuple(image_shape)}) must contain positive integers. Set it to "
            "the channels, height and width of one image, without a batch dimension."
        )
    # Imported here because it imports Triton, and every network imports this module.
    from torch.utils.flop_counter import (
        FlopCounterMode,
    )

    tensors = {name: _shadow(tensor) for name, tensor in model.named_parameters()}
    tensors |= {name: _shadow(tensor) for name, tensor in model.named_buffers()}
    images = torch.empty(_BATCH, *image_shape, device="meta")
    # functional_call uses the shadows instead of the model's own tensors, which stay unchanged.
    with (
        torch.enable_grad(),
        _without_recomputation(model),
        FlopCounterMode(display=False) as counter,
    ):
        logits = functional_call(model, tensors, (images,))
        if backward:
            logits.sum().backward()
    return counter.get_total_flops() // _BATCH


def _shadow(tensor: Tensor) -> Tensor:
    # Meta tensor of the same shape. It is fp32, so that a model with several dtypes needs no autocast.
    if not tensor.is_floating_point():
        # BatchNorm without momentum reads the value of its counter, which the meta device does not have.
        is_counter = tensor.dim() == 0 and tensor.device.type == "cpu"
        if is_counter:
            return tensor.clone()
        return torch.empty_like(tensor, device="meta")
    shadow = torch.empty_like(tensor, device="meta", dtype=torch.float32)
    return shadow.requires_grad_(tensor.requires_grad)


@contextmanager
def _without_recomputation(model: nn.Module) -> Iterator[None]:
    # The second forward pass is not useful work, so utilization is comparable with and without checkpointing.
    asked: list[Any] = [
        module for module in model.modules() if getattr(module, "checkpoint_activations", False)
    ]
    for module in asked:
        module.checkpoint_activations = False
    try:
        yield
    finally:
        for module in asked:
            module.checkpoint_activations = True
