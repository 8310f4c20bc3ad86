"""Gradient shapes of well-known networks, and a synthetic network that produces such gradients.

The synthetic network does almost no arithmetic. The communication cost of a step depends only on the shapes: which
tensors share a bucket, in which order they become ready, and how many bytes are sent. A communication benchmark
therefore needs only the shapes. One set is computed with real arithmetic, to measure complete steps with forward,
backward and casts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_hybrid.optim import LARS
from recipes.networks.alexnet import AlexNet
from recipes.networks.resnet import ResNet

Shapes = Sequence[tuple[int, ...]]


def alexnet_shapes() -> list[tuple[int, ...]]:
    """Return the parameter shapes of AlexNet (Krizhevsky 2014, arXiv:1404.5997), in layer order.

    >>> numel(alexnet_shapes()), len(alexnet_shapes())
    (61100840, 16)
    """
    return _shapes_of(AlexNet)


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the parameter shapes of ResNet-50 (He et al. 2015, arXiv:1512.03385), in layer order.

    Convolutions have no bias. Each one is followed by the weight and the bias of its normalization.

    >>> numel(resnet50_shapes()), len(resnet50_shapes())
    (25557032, 161)
    """
    return _shapes_of(ResNet)


def _shapes_of(network: type[nn.Module]) -> list[tuple[int, ...]]:
    with torch.device("meta"):
        model = network()
    return [tuple(parameter.shape) for parameter in model.parameters()]


def linear_8mib_shapes() -> list[tuple[int, ...]]:
    """Return the parameter shapes of eight 512 x 512 linear layers.

    They have 8 MiB of fp32 gradients and 16 KiB of biases.

    >>> numel(linear_8mib_shapes()) * 4 / 2**20
    8.015625
    """
    weight_shape = (512, 512)
    bias_shape = (512,)
    return [weight_shape, bias_shape] * 8


GRADIENT_SETS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "linear_8mib": linear_8mib_shapes,
    "linear_8mib_arithmetic": linear_8mib_shapes,
    "alexnet": alexnet_shapes,
    "resnet50": resnet50_shapes,
}

# Sets that are computed layer by layer. The other sets create each gradient with one pass over memory.
WITH_ARITHMETIC = frozenset({"linear_8mib_arithmetic"})
NUM_ROWS = 2  # rows of a rank's batch


def numel(shapes: Shapes) -> int:
    """Return the total number of elements of several shapes.

    >>> numel([(2, 3), (4,)])
    10
    """
    return sum(math.prod(shape) for shape in shapes)


class GradientSet(pl.LightningModule):
    """LightningModule that produces synthetic gradients of given shapes, from the last layer to the first.

    Backward creates each gradient with one pass over memory. Gradients differ between ranks.

    Args:
        shapes: Shapes of the parameters in layer order.
        backward_s: Total seconds that backward sleeps, divided among the gradients in proportion to their sizes. This
            imitates a host that waits for an accelerator, because the processor is free in the meantime.
        optimizer: `sgd`, the cheapest one, or `lars`, fused.
        has_arithmetic: Treat shapes as weights and biases of consecutive linear layers, which process a batch of two
            rows per rank. `backward_s` is ignored.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        backward_s: float = 0.0,
        optimizer: str = "sgd",
        has_arithmetic: bool = False,
    ) -> None:
        super().__init__()
        self.has_arithmetic = has_arithmetic
        self.optimizer = optimizer
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        if has_arithmetic:  # because most gradients would be zero with zero weights
            generator = torch.Generator().manual_seed(0)
            for layer in self.layers:
                nn.init.normal_(layer, std=layer.shape[-1] ** -0.5, generator=generator)
        self.seconds_per_element = backward_s / numel(shapes)
        self._noise: Tensor | None = None

    def on_fit_start(self) -> None:
        """Create the random values that this rank uses as gradients, seeded with its rank."""
        largest = max(self.layers, key=Tensor.numel)
        num_values = largest.numel()
        generator = torch.Generator().manual_seed(self.global_rank)
        noise = 1e-3 * torch.randn(num_values, generator=generator)
        self._noise = noise.to(dtype=largest.dtype, device=self.device)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return an fp32 loss whose backward produces a gradient for every parameter."""
        if self.has_arithmetic:
            return self._loss_of_rows()
        loss = torch.zeros((), device=self.device)
        for parameter in self.layers:
            wait_s = self.seconds_per_element * parameter.numel()
            loss = _Layer.apply(loss, parameter, self._noise, wait_s)
        return loss

    def _loss_of_rows(self) -> Tensor:
        assert self._noise is not None
        layers = list(self.layers)
        weights = layers[::2]
        biases = layers[1::2]
        num_features = weights[0].shape[1]
        num_values = NUM_ROWS * num_features
        rows = self._noise[:num_values].view(NUM_ROWS, -1)
        for weight, bias in zip(weights, biases, strict=True):
            rows = nn.functional.linear(rows, weight, bias)
        errors = rows.float() - 1
        return errors.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer selected by `optimizer`: fused LARS or SGD."""
        if self.optimizer == "lars":
            return LARS(self.parameters(), lr=1e-3, fused=True)
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Layer(torch.autograd.Function):
    """Autograd identity whose backward gives a parameter a random gradient.

    The gradient of the parameter is the noise times the gradient of the output.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, parameter: Tensor, noise: Tensor, wait_s: float) -> Tensor:
        ctx.shape = parameter.shape
        ctx.noise = noise
        ctx.wait_s = wait_s
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.wait_s:
            time.sleep(ctx.wait_s)
        num_values = ctx.shape.numel()
        noise = ctx.noise[:num_values].view(ctx.shape)
        parameter_grad = torch.mul(noise, grad)
        return grad, parameter_grad, None, None
