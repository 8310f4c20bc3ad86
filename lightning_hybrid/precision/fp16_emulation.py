"""CPU emulation of fp16 matrix products with the rounding behavior of tensor cores.

CPUs without native fp16 arithmetic run half-precision convolutions 30 to 100 times slower than fp32 ones. Here operands
are rounded to fp16, the arithmetic is in fp32, and the result is rounded to fp16. The same holds in backward, because
autograd applies the casts there as well. Results therefore equal those of a GPU except for the order of summation, and
the speed is that of fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# Names of functions, methods and operators that compute matrix products. Recurrent cells and attention run completely
# in fp32 between two roundings, because their inner products are not separate calls.
_MATRIX_PRODUCTS = frozenset(
    "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution "
    "matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addr addbmm baddbmm einsum chain_matmul multi_dot tensordot "
    "dot vdot inner outer scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu "
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()
)

# On CUDA, autocast runs these in fp32. On a CPU it does not, and they do not accept half-precision weights.
_IN_FP32 = frozenset("layer_norm group_norm rms_norm".split())

# With fp32 operands only, autocast runs these in fp32 on CUDA as well.
_NOT_CAST = frozenset("dot vdot inner outer bilinear tensordot".split())

_WITHOUT_TENSORS = frozenset({type(None), int, float, bool, str})


class Fp16MatmulEmulation(TorchFunctionMode):
    """Torch function mode that computes matrix products of fp16 operands with fp32 arithmetic.

        y = half( f( float(half(x)), float(half(w)) ) )

    It applies to a call if one of its tensors is fp16, or if `torch.autocast` is enabled, which would round fp32
    operands to fp16. Functional normalization with half-precision weights runs in fp32, as with autocast on CUDA.

    Args:
        with_products: Whether the mode applies to matrix products. It is False for bfloat16, which CPUs support.
    """

    def __init__(self, *, with_products: bool = True) -> None:
        super().__init__()
        self._with_products = with_products

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            # torch disables the mode while it handles a call. Without entering it again, activations that
            # `torch.utils.checkpoint` recomputes in backward would differ from the forward.
            with self:
                return _backward(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = _map_tensors(_wide, (args, kwargs))
        if not self._with_products or name not in _MATRIX_PRODUCTS or "out" in kwargs:
            return func(*args, **kwargs)
        dtypes = _dtypes_of((args, kwargs))
        is_autocast = torch.is_autocast_enabled("cpu")
        if not is_autocast and dtypes == {torch.float16, torch.float32}:
            return func(*args, **kwargs)  # The call raises an error, as on a GPU.
        if torch.float16 not in dtypes and not (
            is_autocast and torch.float32 in dtypes and name not in _NOT_CAST
        ):
            return func(*args, **kwargs)
        # The products of two fp16 numbers are exact in fp32, as in tensor cores.
        args, kwargs = _map_tensors(_operand, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            result = func(*args, **kwargs)
        return _map_tensors(_round, result)


def _backward(
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    # This calls the autograd engine directly, because torch's Python functions would disable the mode.
    if gradient is None:
        gradient = torch.ones_like(tensor)
    if retain_graph is None:
        retain_graph = create_graph
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    else:
        inputs = tuple(inputs or ())
    _engine_run_backward(
        (tensor,),
        (gradient,),
        retain_graph,
        create_graph,
        inputs,
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _dtypes_of(arguments: Any) -> set[torch.dtype]:
    dtypes: set[torch.dtype] = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            dtypes.add(tensor.dtype)
        return tensor

    _map_tensors(note, arguments)
    return dtypes


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to each tensor in nested containers, and return the new containers."""
    # Plain containers, which are the most frequent, are handled here, because `tree_map_only` takes longer than the
    # arithmetic of a small layer.
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_map_tensors(function, element) for element in value])
    if kind in _WITHOUT_TENSORS:
        return value
    if kind is dict:
        if not value:
            return value
        return {key: _map_tensors(function, element) for key, element in value.items()}
    if isinstance(value, Tensor):
        return function(value)
    return tree_map_only(Tensor, function, value)


def _wide(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


def _operand(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float32:
        return tensor.half().float()
    if tensor.dtype is torch.float16:
        return tensor.float()
    return tensor


def _round(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float32:
        return tensor.half()
    return tensor
