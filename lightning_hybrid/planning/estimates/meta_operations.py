"""Result shapes and FLOPs of operations on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

aten = torch.ops.aten


# ---- result shapes --------------------------------------------------------------------------------------------------


def shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, computing only the shapes of its results if it operates on meta tensors.

    Operations without a function in `SHAPES`, and operations on other devices, run normally.
    """
    result = None
    if func in SHAPES and _are_plain(args, kwargs):
        result = SHAPES[func](*args)
    if result is None:
        return func(*args, **kwargs)
    return result


def _are_plain(args: Any, kwargs: Any) -> bool:
    """Return whether all tensors are on the meta device, and no keyword argument changes a result's shape or dtype."""
    for value in args:
        if isinstance(value, Tensor) and not value.is_meta:
            return False
    return kwargs.keys() <= {"pin_memory", "memory_format"}


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(first.shape)


def _like_second(first: Tensor, second: Tensor, *_: Any) -> Tensor:
    return second.new_empty(second.shape)


def _in_place(tensor: Tensor, _: Any) -> Tensor:
    return tensor


def _elementwise(first: Tensor, second: Any, *_: Any) -> Tensor:
    second_shape = getattr(second, "shape", ())
    # NumPy's function, because torch's imports SymPy.
    shape = np.broadcast_shapes(first.shape, second_shape)
    dtype = torch.result_type(first, second)
    return first.new_empty(shape, dtype=dtype)


def _reduced(tensor: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Tensor:
    num_dims = tensor.dim()
    reduced_dims = {dim % num_dims for dim in dims or range(num_dims)}
    shape = []
    for dim, size in enumerate(tensor.shape):
        if dim not in reduced_dims:
            shape.append(size)
        elif keepdim:
            shape.append(1)
    return tensor.new_empty(shape)


def _matrix_product(first: Tensor, second: Tensor) -> Tensor | None:
    if first.dim() != 2 or second.dim() != 2:
        return None
    num_rows, num_products = first.shape
    num_products_of_second, num_columns = second.shape
    if num_products != num_products_of_second:
        return None
    return first.new_empty(num_rows, num_columns)


def _matrix_product_with_bias(bias: Tensor, first: Tensor, second: Tensor) -> Tensor | None:
    return _matrix_product(first, second)


def _batch_norm(images: Tensor, *options: Any) -> tuple[Tensor, ...] | None:
    # The first four are weight, bias, running mean and running variance, each of them optional.
    shape_of_channels = images.shape[1:2]
    for tensor in options[:4]:
        if tensor is not None and tensor.shape != shape_of_channels:
            return None

    is_training = options[4]
    num_statistics = 0
    if is_training:
        num_statistics = images.shape[1]
    output = images.new_empty(images.shape)
    mean = images.new_empty(num_statistics, dtype=torch.float32)
    inverse_deviation = images.new_empty(num_statistics, dtype=torch.float32)
    return output, mean, inverse_deviation


def _gradients(
    gradient: Tensor, images: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor | None, ...]:
    """Return uninitialized gradients of the input, weight and bias of a convolution or normalization."""
    output_mask = options[-1]
    wants_input, wants_weight, wants_bias = output_mask
    of_input = None
    of_weight = None
    of_bias = None
    if wants_input:
        of_input = images.new_empty(images.shape)
    if weight is None:  # a normalization with affine=False
        return of_input, None, None
    if wants_weight:
        of_weight = weight.new_empty(weight.shape)
    if wants_bias:
        of_bias = weight.new_empty(gradient.shape[1:2])
    return of_input, of_weight, of_bias


def _output_sizes(
    images: Tensor, *, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> list[int]:
    """Return the height and width of the images after a convolution or pooling.

        output = (input + 2 * padding - reach) // stride + 1,   reach = dilation * (kernel - 1) + 1

    The reach is the number of pixels from the first to the last element of the kernel.
    """
    output_sizes = []
    windows = zip(images.shape[2:], kernel, stride, padding, dilation, strict=True)
    for size, width, step, pad, spacing in windows:
        padded_size = size + 2 * pad
        reach = spacing * (width - 1) + 1
        output_sizes.append((padded_size - reach) // step + 1)
    return output_sizes


def _convolution(
    images: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> Tensor | None:
    stride, padding, dilation, is_transposed, _, groups = options
    if is_transposed or images.dim() != weight.dim():
        return None
    num_filters, num_channels_per_group = weight.shape[:2]
    if images.shape[1] != groups * num_channels_per_group:
        return None

    output_sizes = _output_sizes(
        images, kernel=weight.shape[2:], stride=stride, padding=padding, dilation=dilation
    )
    if min(output_sizes) <= 0:
        return None
    return images.new_empty(images.shape[0], num_filters, *output_sizes)


def _max_pool(images: Tensor, kernel: Any, *options: Any) -> tuple[Tensor, Tensor] | None:
    # With dilation or ceil mode, torch has to compute the shape.
    if len(options) != 2 or images.dim() != 4:
        return None
    stride, padding = options
    for values in (kernel, stride, padding):
        if len(values) != 2:
            return None

    output_sizes = _output_sizes(
        images, kernel=kernel, stride=stride, padding=padding, dilation=(1, 1)
    )
    if min(output_sizes) <= 0:
        return None
    num_images, num_channels = images.shape[:2]
    shape = (num_images, num_channels, *output_sizes)
    maxima = images.new_empty(shape)
    indices = images.new_empty(shape, dtype=torch.int64)
    return maxima, indices


# Result shapes of the operations that most networks consist of. On the meta device torch decomposes these
# operations and imports its compiler and SymPy to do so, which takes seconds. The results have the same
# bytes. A function returns None for arguments that torch itself has to handle or reject.
SHAPES: dict[Any, Callable[..., Any]] = {
    aten.empty_like.default: _like_first,
    aten.ones_like.default: _like_first,
    aten._log_softmax.default: _like_first,
    aten._log_softmax_backward_data.default: _like_first,
    aten.max_pool2d_with_indices_backward.default: _like_second,
    aten.div_.Scalar: _in_place,
    aten.add.Tensor: _elementwise,
    aten.mul.Tensor: _elementwise,
    aten.div.Scalar: _elementwise,
    aten.threshold_backward.default: _elementwise,
    aten.mean.dim: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.mm.default: _matrix_product,
    aten.addmm.default: _matrix_product_with_bias,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _gradients,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _gradients,
    aten.max_pool2d_with_indices.default: _max_pool,
}


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of an operation if it is a matrix product or a convolution, otherwise 0.

    A multiply-add counts as two FLOPs.
    """
    is_convolution = func is aten.convolution.default
    is_transposed = is_convolution and args[6]
    if func in PRODUCTS and not is_transposed:
        return PRODUCTS[func](result, *args)

    is_batched_product = func is aten.baddbmm.default
    is_attention = "attention" in func.name()
    if not (is_convolution or is_batched_product or is_attention):
        return 0
    from torch.utils.flop_counter import flop_registry  # imports Triton

    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0
    return formula(*args, **kwargs, out_val=result)


def _convolution_flops(result: Tensor, images: Tensor, weight: Tensor, *_: Any) -> int:
    one_filter = weight[0]
    return 2 * result.numel() * one_filter.numel()


def _matrix_product_flops(result: Tensor, first: Tensor, second: Tensor) -> int:
    num_inner = first.shape[-1]
    return 2 * result.numel() * num_inner


def _matrix_product_with_bias_flops(
    result: Tensor, bias: Tensor, first: Tensor, second: Tensor
) -> int:
    return _matrix_product_flops(result, first, second)


PRODUCTS: dict[Any, Callable[..., int]] = {
    aten.convolution.default: _convolution_flops,
    aten.mm.default: _matrix_product_flops,
    aten.bmm.default: _matrix_product_flops,
    aten.addmm.default: _matrix_product_with_bias_flops,
}
