"""Activation memory and FLOPs of a training step, measured on the meta device."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_hybrid.precision.half_window import HalfPrecisionWindow

# Larger batches are extrapolated in proportion, because tensor sizes must stay below 2^63.
MOST_IMAGES = 2**16
aten = torch.ops.aten
HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class LiveBytes(TorchDispatchMode):
    """Context manager that counts FLOPs and the bytes of live tensors created inside it.

    A tensor and its views count once. FLOPs include only products, by torch's own formulas.

    Args:
        known: Tensors that do not count.

    >>> with LiveBytes() as live:
    ...     kept = torch.empty(100, device="meta") + 1
    >>> live.now, live.peak
    (400, 800)
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.flops = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        # References keep these tensors alive, so that no new tensor reuses one of their addresses.
        self._known = list(known)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to keep torch from importing its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, count its FLOPs, and track the memory of its results until they are freed."""
        kwargs = kwargs or {}
        results = shapes_of(func, args, kwargs)
        self.flops += flops_of(func, args, kwargs, results)
        for result in tree_iter(results):
            if isinstance(result, Tensor):
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, address: int) -> None:
        self.now -= self._sizes.pop(address)


def example_of(
    model: nn.Module, num_samples: int, shape: Sequence[int], *, dtype: torch.dtype = torch.float32
) -> Any:
    """Return an example input of the network on the meta device.

    The network's own `example` method creates it if there is one. Otherwise it is a batch of images
    of this shape.
    """
    example = getattr(model, "example", None)
    if example is not None:
        return example(num_samples, *shape, device="meta")
    return torch.empty(num_samples, *shape, device="meta", dtype=dtype)


@contextmanager
def meta_step(model: nn.Module, precision: str) -> Iterator[tuple[nn.Module, torch.dtype]]:
    """Yield a copy of the network on the meta device, in a given precision, and the dtype of its input.

    Gradients of parameters are dropped as soon as they are computed, because they are part of the
    buckets, whose memory is counted elsewhere.
    """
    shadow = copy.deepcopy(model).to("meta").train()
    for parameter in shadow.parameters():
        parameter.register_post_accumulate_grad_hook(_drop)
    if precision not in HALF:
        yield shadow, torch.float32
        return
    # A run uses the same conversion, which decides the layers that stay fp32 and their output dtype.
    with HalfPrecisionWindow(shadow, HALF[precision], on_meta=True).opened():
        yield shadow, HALF[precision]


def _logarithms(result: Tensor) -> Tensor:
    # A classifier's loss keeps its log-probabilities, which are as large as the logits.
    if result.dim() == 2:
        return F.log_softmax(result, 1)
    return result


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def step_bytes(
    model: nn.Module, image_shape: Sequence[int], *, batch_size: int, precision: str
) -> int:
    """Return the peak memory of a forward and backward pass in bytes, without parameters and their gradients.

    The peak includes activations saved for the backward pass, temporary tensors of both passes,
    recomputed activations, and two batches of images, because the next batch is loaded during
    the step. It does not include workspaces of the device's libraries.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Sigmoid(), nn.Linear(5, 1))
    >>> images, hidden = 2 * 2 * 12 * 4, 2 * 5 * 4                 # two batches of two images
    >>> images + 2 * hidden < step_bytes(net, (3, 2, 2), batch_size=2, precision="32-true") < images + 6 * hidden + 300
    True
    """
    counted = min(batch_size, MOST_IMAGES)
    with meta_step(model, precision) as (shadow, dtype):
        images = example_of(shadow, counted, image_shape, dtype=dtype)
        inputs = list(tree_iter(images))
        with LiveBytes(known=[*shadow.parameters(), *shadow.buffers(), *inputs]) as live:
            _forward_and_backward(shadow, images)
    # `LiveBytes` did not count the images, so add this batch and the next.
    input_bytes = sum(tensor.nbytes for tensor in inputs)
    return (live.peak + 2 * input_bytes) * batch_size // counted


def _forward_and_backward(network: nn.Module, images: Any) -> None:
    # A network may return any structure of tensors. A frozen one has no backward.
    results = [value for value in tree_iter(network(images)) if isinstance(value, Tensor)]
    rows = [
        _logarithms(result.float()).reshape(1, -1) for result in results if result.requires_grad
    ]

    # Sum by a matrix product: torch's own sum imports SymPy on the meta device.
    losses = [row.mm(row.new_empty(row.shape[1], 1)) for row in rows]
    del results, rows
    if losses:
        sum(losses[1:], losses[0]).backward()


def has_checkpointing(model: nn.Module) -> bool:
    """Return whether the network has the option `checkpoint_activations`.

    Networks of this library have it.
    """
    return hasattr(model, "checkpoint_activations")


def with_checkpointing(model: nn.Module, *, is_on: bool) -> nn.Module:
    """Return a copy of the network with activation checkpointing switched on or off."""
    changed = copy.deepcopy(model)
    changed.checkpoint_activations = is_on  # type: ignore[assignment]
    return changed


# ---- shapes on the meta device --------------------------------------------------------------------------------------


def shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, computing only the shapes of its results if it operates on meta tensors.

    Operations without a function in `SHAPES`, and operations on other devices, run normally.
    """
    is_plain = func in SHAPES and not kwargs.keys() - {"pin_memory", "memory_format"}
    is_meta = all(not isinstance(value, Tensor) or value.is_meta for value in args)

    result = None
    if is_plain and is_meta:
        result = SHAPES[func](*args)
    if result is None:
        return func(*args, **kwargs)
    return result


def _elementwise(first: Tensor, second: Any, *_: Any) -> Tensor:
    # NumPy's function, because torch's imports SymPy.
    shape = np.broadcast_shapes(first.shape, getattr(second, "shape", ()))
    return first.new_empty(shape, dtype=torch.result_type(first, second))


def _reduced(tensor: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Tensor:
    reduced_dims = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    shape = []
    for dim, size in enumerate(tensor.shape):
        if dim not in reduced_dims:
            shape.append(size)
        elif keepdim:
            shape.append(1)
    return tensor.new_empty(shape)


def _product(first: Tensor, second: Tensor) -> Tensor | None:
    if first.shape[1] != second.shape[0]:
        return None
    return first.new_empty(first.shape[0], second.shape[1])


def _batch_norm(images: Tensor, *options: Any) -> tuple[Tensor, ...] | None:
    # The first four are weight, bias, running mean and running variance, each of them optional.
    for tensor in options[:4]:
        if tensor is not None and tensor.shape != images.shape[1:2]:
            return None

    is_training = options[4]
    num_statistics = images.shape[1] if is_training else 0
    output = images.new_empty(images.shape)
    mean = images.new_empty(num_statistics, dtype=torch.float32)
    inverse_deviation = images.new_empty(num_statistics, dtype=torch.float32)
    return output, mean, inverse_deviation


def _gradients(
    gradient: Tensor, images: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor | None, ...]:
    """Return uninitialised gradients of the input, weight and bias of a convolution or normalisation."""
    wants_input, wants_weight, wants_bias = options[-1]
    of_input = images.new_empty(images.shape) if wants_input else None
    if weight is None:  # a normalisation with affine=False
        return of_input, None, None
    of_weight = weight.new_empty(weight.shape) if wants_weight else None
    of_bias = weight.new_empty(gradient.shape[1:2]) if wants_bias else None
    return of_input, of_weight, of_bias


def _output_sizes(
    images: Tensor, *, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> list[int]:
    output_sizes = []
    windows = zip(images.shape[2:], kernel, stride, padding, dilation, strict=True)
    for size, width, step, pad, spacing in windows:
        output_sizes.append((size + 2 * pad - spacing * (width - 1) - 1) // step + 1)
    return output_sizes


def _convolution(
    images: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> Tensor | None:
    stride, padding, dilation, is_transposed, _, groups = options
    if is_transposed or images.dim() != weight.dim():
        return None
    if images.shape[1] != groups * weight.shape[1]:
        return None

    output_sizes = _output_sizes(
        images, kernel=weight.shape[2:], stride=stride, padding=padding, dilation=dilation
    )
    if min(output_sizes) <= 0:
        return None
    return images.new_empty(images.shape[0], weight.shape[0], *output_sizes)


def _max_pool(images: Tensor, kernel: Any, *options: Any) -> tuple[Tensor, Tensor] | None:
    # With dilation or ceil mode, torch has to compute the shape.
    if len(options) != 2 or images.dim() != 4:
        return None
    stride, padding = options
    if not all(len(values) == 2 for values in (kernel, stride, padding)):
        return None

    output_sizes = _output_sizes(
        images, kernel=kernel, stride=stride, padding=padding, dilation=(1, 1)
    )
    if min(output_sizes) <= 0:
        return None
    shape = (*images.shape[:2], *output_sizes)
    return images.new_empty(shape), images.new_empty(shape, dtype=torch.int64)


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of an operation if it is a matrix product or a convolution, otherwise 0.

    A multiply-add counts as two FLOPs.
    """
    is_convolution = func is aten.convolution.default
    is_transposed = is_convolution and args[6]
    if func in PRODUCTS and not is_transposed:
        return PRODUCTS[func](result, *args)

    has_formula = is_convolution or func is aten.baddbmm.default or "attention" in func.name()
    if not has_formula:
        return 0
    from torch.utils.flop_counter import flop_registry  # imports Triton

    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0
    return formula(*args, **kwargs, out_val=result)


PRODUCTS: dict[Any, Callable[..., int]] = {
    aten.convolution.default: lambda result, images, weight, *_: (
        2 * result.numel() * weight[0].numel()
    ),
    aten.mm.default: lambda result, first, second: 2 * result.numel() * first.shape[-1],
    aten.bmm.default: lambda result, first, second: 2 * result.numel() * first.shape[-1],
    aten.addmm.default: lambda result, bias, first, second: 2 * result.numel() * first.shape[-1],
}
# Result shapes of the operations that most networks consist of. On the meta device torch decomposes these
# operations and imports its compiler and SymPy to do so, which takes seconds. The results have the same
# bytes. A function returns None for arguments that torch itself has to handle or reject.
SHAPES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (aten.add.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.threshold_backward.default),
        _elementwise,
    ),
    **dict.fromkeys(
        (aten.empty_like.default, aten.ones_like.default), lambda like: like.new_empty(like.shape)
    ),
    aten._log_softmax.default: lambda tensor, *_: tensor.new_empty(tensor.shape),
    aten._log_softmax_backward_data.default: lambda gradient, *_: gradient.new_empty(
        gradient.shape
    ),
    aten.div_.Scalar: lambda tensor, _: tensor,
    aten.mm.default: _product,
    aten.addmm.default: lambda bias, first, second: _product(first, second),
    **dict.fromkeys((aten.mean.dim, aten.sum.dim_IntList), _reduced),
    aten.convolution.default: _convolution,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.native_batch_norm.default: _batch_norm,
    **dict.fromkeys(
        (aten.native_batch_norm_backward.default, aten.convolution_backward.default), _gradients
    ),
    aten.max_pool2d_with_indices_backward.default: lambda gradient, images, *_: images.new_empty(
        images.shape
    ),
}
