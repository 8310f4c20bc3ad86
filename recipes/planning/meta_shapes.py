"""Shapes of results and products on the meta device, of what most networks consist of.

torch itself takes these apart there, and imports its compiler and SymPy for that, which takes seconds. Others, and
unusual arguments, go to torch: the results have the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

aten = torch.ops.aten


def shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, by shapes alone where all tensors are on the meta device."""
    is_plain = func in SHAPES and not kwargs.keys() - {"pin_memory", "memory_format"}
    is_meta = all(not isinstance(each, Tensor) or each.is_meta for each in args)
    result = SHAPES[func](*args) if is_plain and is_meta else None
    return func(*args, **kwargs) if result is None else result


def _elementwise(first: Tensor, second: Any, *_: Any) -> Tensor:
    shape = np.broadcast_shapes(first.shape, getattr(second, "shape", ()))  # those of torch import SymPy
    return first.new_empty(shape, dtype=torch.result_type(first, second))


def _reduced(tensor: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Tensor:
    gone = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    left = [1 if dim in gone else size for dim, size in enumerate(tensor.shape) if keepdim or dim not in gone]
    return tensor.new_empty(left)


def _product(first: Tensor, second: Tensor) -> Tensor | None:
    return first.new_empty(first.shape[0], second.shape[1]) if first.shape[1] == second.shape[0] else None


def _batch_norm(images: Tensor, *more: Any) -> tuple[Tensor, ...] | None:
    if any(each is not None and each.shape != images.shape[1:2] for each in more[:4]):
        return None
    num_statistics = images.shape[1] * more[4]  # none in evaluation
    return images.new_empty(images.shape), *(images.new_empty(num_statistics, dtype=torch.float32) for _ in range(2))


def _gradients(gradient: Tensor, images: Tensor, weight: Tensor, *more: Any) -> tuple[Tensor | None, ...]:
    # Of a convolution or a normalisation, whose third parameter is a bias.
    likes = ((images, images.shape), (weight, weight.shape), (weight, gradient.shape[1:2]))
    return tuple(
        like.new_empty(shape) if wanted else None for (like, shape), wanted in zip(likes, more[-1], strict=True)
    )


def _places(images: Tensor, *, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[int]:
    sizes = zip(images.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [(size + 2 * pad - apart * (width - 1) - 1) // step + 1 for size, width, step, pad, apart in sizes]


def _convolution(images: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor | None:
    if more[3] or images.dim() != weight.dim() or images.shape[1] != more[5] * weight.shape[1]:
        return None
    places = _places(images, kernel=weight.shape[2:], stride=more[0], padding=more[1], dilation=more[2])
    return images.new_empty(images.shape[0], weight.shape[0], *places) if min(places) > 0 else None


def _max_pool(images: Tensor, kernel: Any, *more: Any) -> tuple[Tensor, Tensor] | None:
    if len(more) != 2 or images.dim() != 4 or not all(len(each) == 2 for each in (kernel, *more)):
        return None
    places = _places(images, kernel=kernel, stride=more[0], padding=more[1], dilation=(1, 1))
    shape = (*images.shape[:2], *places)
    return (images.new_empty(shape), images.new_empty(shape, dtype=torch.int64)) if min(places) > 0 else None


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Count the products of an operation, two for each pair; 0 of what is none."""
    if func in PRODUCTS and not (func is aten.convolution.default and args[6]):
        return PRODUCTS[func](result, *args)
    if "attention" not in func.name() and func not in (aten.convolution.default, aten.baddbmm.default):
        return 0
    from torch.utils.flop_counter import flop_registry  # here: it imports Triton

    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


PRODUCTS: dict[Any, Callable[..., int]] = {
    aten.convolution.default: lambda result, images, weight, *_: 2 * result.numel() * weight[0].numel(),
    aten.mm.default: lambda result, first, second: 2 * result.numel() * first.shape[-1],
    aten.bmm.default: lambda result, first, second: 2 * result.numel() * first.shape[-1],
    aten.addmm.default: lambda result, bias, first, second: 2 * result.numel() * first.shape[-1],
}
# None: arguments that torch has to look at, or refuse.
SHAPES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.add.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.threshold_backward.default), _elementwise),
    **dict.fromkeys((aten.empty_like.default, aten.ones_like.default), lambda like: like.new_empty(like.shape)),
    aten.div_.Scalar: lambda tensor, _: tensor,
    aten.mm.default: _product,
    aten.addmm.default: lambda bias, first, second: _product(first, second),
    **dict.fromkeys((aten.mean.dim, aten.sum.dim_IntList), _reduced),
    aten.convolution.default: _convolution,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.native_batch_norm.default: _batch_norm,
    **dict.fromkeys((aten.native_batch_norm_backward.default, aten.convolution_backward.default), _gradients),
    aten.max_pool2d_with_indices_backward.default: lambda gradient, images, *_: images.new_empty(images.shape),
}
