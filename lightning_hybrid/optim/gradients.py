"""What a step reads of a parameter group: gradients and directions, learning rate, the dtype of the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import as_dtype
from lightning_hybrid.optim.grad_scaling import UNSCALED, GradScaling


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of optimizer state and arithmetic for a parameter of `dtype`: at least float32.

    >>> state_dtype(torch.bfloat16), state_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def param_name(group: dict[str, Any], index: int) -> str:
    """Return the name of a parameter of a group, for error messages."""
    return group["param_names"][index] if "param_names" in group else f"params[{index}]"


def dense_gradients(group: dict[str, Any]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield `(index in the group, (parameter, gradient))` of each parameter that has a gradient.

    Raises:
        ValueError: A gradient is sparse.
    """
    for index, param in enumerate(group["params"]):
        grad = param.grad
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise ValueError(
                f"`{param_name(group, index)}.grad.layout` (={grad.layout}) must be torch.strided: a sparse gradient "
                "touches some rows, but the trust ratio is of the whole layer. Build the layer with `sparse=False`, "
                "or give it to `torch.optim.SparseAdam`."
            )
        yield index, (param, grad)


def is_together(group: dict[str, Any], param: Tensor) -> bool:
    """Whether a step takes `param` in one list with others."""
    # On the CPU one tensor at a time is faster: its temporaries stay in cache. On an accelerator launches count.
    return param.device.type != "cpu" if group["foreach"] is None else bool(group["foreach"])


def lr_of(group: dict[str, Any], device: torch.device) -> float | Tensor:
    """Return the learning rate of a group, for excluded groups times `excluded_lr_mult`; a tensor goes to `device`."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.detach()
        # To read a CPU tensor waits for nothing; but a number would be frozen into the graph of torch.compile or CUDA.
        may_be_read = lr.device.type == "cpu" and not torch.compiler.is_compiling() and not group["capturable"]
        lr = lr.item() if may_be_read else lr.to(device)
    return lr if group["trust_ratio"] else lr * group["excluded_lr_mult"]


def decayed_gradients(
    params: list[Tensor], grads: list[Tensor], *, group: dict[str, Any], scaling: GradScaling = UNSCALED
) -> list[Tensor]:
    """Unscale, negate (to climb) and decay gradients, at least in float32; the very `grads` if nothing changes."""
    dtype = state_dtype(params[0].dtype)
    directions = scaling.unscale(as_dtype(grads, dtype), keep=grads)
    # The sign comes before the decay, as in torch.optim.SGD: to climb does not mean to grow the weights.
    if group["maximize"]:
        directions = list(torch._foreach_neg(directions))
    if group["weight_decay"] != 0:
        directions = list(torch._foreach_add(directions, as_dtype(params, dtype), alpha=group["weight_decay"]))
    return directions
