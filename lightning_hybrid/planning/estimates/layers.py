"""Layers of a network, and the compute times of one rank in a training step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.planning.estimates.activations import LiveBytes, example_of
from lightning_hybrid.planning.model.workload import StepWorkload

# Fraction of a step's arithmetic, because backward has two products for each product in forward.
FORWARD_SHARE = 1 / 3


class WithoutValues(TorchFunctionMode):
    """Context manager under which parameters are created on the meta device, without initial values.

    Random initial values would import torch's compiler.

    >>> with WithoutValues():
    ...     nn.Linear(2, 3).weight.is_meta
    True
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skip functions that initialize a tensor, and run other functions on the meta device."""
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if (
            name in ("normal_", "uniform_", "trunc_normal_")
            or getattr(func, "__module__", "") == "torch.nn.init"
        ):
            return args[0] if args else kwargs["tensor"]
        with torch.device("meta"):
            return func(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Module of a network that directly holds parameters.

    `numels` are the numbers of elements of the parameters, in their order. `forward_flops` are the
    FLOPs of a forward pass of one image.
    """

    name: str
    numels: tuple[int, ...]
    forward_flops: int


def layers_of(model: nn.Module, image_shape: Sequence[int]) -> list[Layer]:
    """Return the layers of a network in the order in which forward runs them.

    FLOPs are counted on the meta device, where nothing is computed. Only products are counted (`models/flops.py`), so
    normalization and activations have no FLOPs. Their time is attributed to the products next to them.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 4 * 4, 2))
    >>> [(layer.name, layer.numels, layer.forward_flops) for layer in layers_of(net, (3, 4, 4))]
    [('0', (216, 8), 6912), ('1', (8, 8), 0), ('3', (256, 2), 512)]
    """
    shadow = copy.deepcopy(model).to("meta").train()
    layers: dict[str, Layer] = {}
    counter = LiveBytes()
    before: dict[str, int] = {}
    # A shared parameter belongs to the first layer, whose backward completes its gradient.
    owners: dict[int, str] = {}

    def begin(name: str) -> None:
        before[name] = counter.flops

    def end(name: str, module: nn.Module) -> None:
        own_parameters = [
            one
            for one in module.parameters(recurse=False)
            if owners.setdefault(id(one), name) == name
        ]
        numels = tuple(parameter.numel() for parameter in own_parameters)
        flops = (counter.flops - before[name]) // 2  # two images
        earlier = layers.pop(name).forward_flops if name in layers else 0
        layers[name] = Layer(name=name, numels=numels, forward_flops=earlier + flops)

    for name, module in shadow.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_, name=name: begin(name))
            module.register_forward_hook(lambda module, *_, name=name: end(name, module))
    with counter:
        shadow(example_of(shadow, 2, image_shape))
    return list(layers.values())


def work_of(
    layers: Sequence[Layer],
    *,
    batch_size: int,
    images_per_s: float,
    update_s: float = 0.0,
    input_s: float = 0.0,
) -> StepWorkload:
    """Estimate the compute times of a training step, divided among layers in proportion to their FLOPs.

    `images_per_s` is the rate of a single device, either measured or achieved FLOP/s over FLOPs per
    image. Forward is a third of the step. Backward goes from the last layer to the first, and in a
    layer the last tensor is ready first.
    """
    if not images_per_s > 0 or not batch_size > 0:
        raise ValueError(
            f"`images_per_s` (={images_per_s}) and `batch_size_per_rank` (={batch_size}) must be positive, because "
            "their ratio is the compute time of a step. Set images_per_s to the number of images that one device "
            "processes per second."
        )
    step_s = batch_size / images_per_s
    total = sum(layer.forward_flops for layer in layers) or 1
    gradients: list[tuple[int, float]] = []
    # Backward of layers without tensors of their own, such as a head with tied weights.
    waiting_s = 0.0
    for layer in reversed(layers):
        waiting_s += (1 - FORWARD_SHARE) * step_s * layer.forward_flops / total
        for numel in reversed(layer.numels):
            gradients.append((numel, waiting_s))
            waiting_s = 0.0
    if gradients and waiting_s > 0.0:
        # No gradient is ready after the backward of the first layers, so its time is added to the last gradient.
        numel, backward_s = gradients[-1]
        gradients[-1] = (numel, backward_s + waiting_s)
    return StepWorkload(
        forward_s=FORWARD_SHARE * step_s,
        gradients=tuple(gradients),
        update_s=update_s,
        input_s=input_s,
    )


def flops_per_image(layers: Sequence[Layer]) -> int:
    """Return the FLOPs of a training step per image, which are three times those of a forward pass."""
    return 3 * sum(layer.forward_flops for layer in layers)
