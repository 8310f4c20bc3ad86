"""fp16 matrix products on a CPU, as tensor cores compute them.

CPUs without native fp16 arithmetic run half-precision convolutions 30 to 100 times slower than fp32 ones. A tensor
core multiplies fp16 operands and accumulates in fp32; so does this mode: operands rounded to fp16, arithmetic in fp32,
result rounded to fp16, in forward and (through autograd's casts) in backward. The numbers are those of a GPU up to the
order of summation, at fp32 speed, so that a test on a CPU says something about the run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# The matrix-product family by name: functional, method and operator spellings. Recurrent cells and attention run
# whole in fp32 between two roundings: their inner products never surface as calls of their own.
_MATRIX_PRODUCTS = frozenset(
    "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution "
    "matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addr addbmm baddbmm einsum chain_matmul multi_dot tensordot "
    "dot vdot inner outer scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu "
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()
)


class HalfOperandsFullArithmetic(TorchFunctionMode):
    """Run the matrix-product family on fp16 operands with fp32 arithmetic.

        y = half( f( float(half(x)), float(half(w)) ) )

    A call is taken over when one of its tensors is fp16; fp32 operands beside it are rounded to fp16 first, as
    ``torch.autocast`` does. Calls with ``out=`` and all other functions run unchanged.

    >>> x = torch.full((1, 2048), 1.0, dtype=torch.float16)
    >>> with HalfOperandsFullArithmetic():
    ...     torch.nn.functional.linear(x, x)   # 2048 ones: exact in fp32, and 2048 is a fp16 number
    tensor([[2048.]], dtype=torch.float16)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take over ``func`` if it is a matrix product of fp16 tensors."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _MATRIX_PRODUCTS or "out" in kwargs or not _any_half((args, kwargs)):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _operand, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            result = func(*args, **kwargs)
        return tree_map_only(Tensor, _round, result)


def _any_half(arguments: Any) -> bool:
    found = False

    def look(tensor: Tensor) -> Tensor:
        nonlocal found
        found = found or tensor.dtype is torch.float16
        return tensor

    tree_map_only(Tensor, look, arguments)
    return found


def _operand(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float32:
        return tensor.half().float()
    return tensor.float() if tensor.dtype is torch.float16 else tensor


def _round(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.dtype is torch.float32 else tensor
