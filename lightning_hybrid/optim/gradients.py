"""Gradients and learning rate of a parameter group, and the loss scale, by the protocol of `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import as_dtype, copied


@dataclass(frozen=True, kw_only=True)
class GradScaling:
    """The factor on gradients for one step, and the flag that skips the step. All tensors are 0-dim, on a device.

    Attributes:
        inverse_scale: Factor on gradients. None: gradients are not scaled.
        found_inf: float32. If it is above 0, the step writes nothing. None: the step is never skipped.
        found_inf_out: Flag that is 0 at first. Passes over gradients may set it to 1.0 if a gradient is inf or nan.
    """

    inverse_scale: Tensor | None = None
    found_inf: Tensor | None = None
    found_inf_out: Tensor | None = None

    def to(self, device: torch.device) -> GradScaling:
        """Copy to another device, without `found_inf_out`, which each device has for itself."""
        inverse_scale = self.inverse_scale
        if inverse_scale is not None:
            inverse_scale = inverse_scale.to(device, non_blocking=True)
        found_inf = self.found_inf
        if found_inf is not None:
            found_inf = found_inf.to(device, non_blocking=True)
        return GradScaling(inverse_scale=inverse_scale, found_inf=found_inf)

    def unscale(self, tensors: list[Tensor], *, keep: list[Tensor]) -> list[Tensor]:
        """Unscale `tensors`. Works in place unless `tensors` is the list to `keep`."""
        if self.inverse_scale is None:
            return tensors
        if tensors is keep:
            return list(torch._foreach_mul(tensors, self.inverse_scale))
        torch._foreach_mul_(tensors, self.inverse_scale)
        return tensors

    def scratch(self, tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return memory for the next values of `tensors`.

        These are copies if `dtype` is another one, or if the step may be skipped, and else the tensors themselves.
        """
        wide = tensors
        if dtype is not None:
            wide = as_dtype(tensors, dtype)
        if wide is tensors and self.found_inf is not None:
            return copied(tensors)
        return wide

    def commit_(self, tensors: list[Tensor], new_values: list[Tensor]) -> None:
        """Write `new_values`, rounded, to `tensors`. If the step is skipped, no bit of `tensors` changes."""
        if self.found_inf is None:
            if tensors is not new_values:
                torch._foreach_copy_(tensors, new_values)
            return
        # A selection and not a product with 0 or 1, because 0 * inf is nan.
        skip = self.found_inf > 0
        for tensor, new_value in zip(tensors, new_values, strict=True):
            torch.where(skip, tensor, new_value.to(tensor.dtype), out=tensor)


UNSCALED = GradScaling()


def any_not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if an element of `tensors` is inf or nan, else 0.0: 0-dim float32, on the device of all of them."""
    extremes: list[Tensor] = []
    non_empty = [tensor for tensor in tensors if tensor.numel()]
    if tensors[0].device.type == "cpu":
        # One pass: torch's norm by inf takes 20 times as long there. nan survives both minimum and maximum.
        for tensor in non_empty:
            extremes.extend(torch.aminmax(tensor))
    else:
        extremes.extend(torch._foreach_norm(non_empty, torch.inf))
    if not extremes:
        return torch.zeros((), device=tensors[0].device)
    # Stacked, so that there is one test and one result on the device for all of them.
    return (~torch.isfinite(torch.stack(extremes)).all()).float()


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of optimizer state and arithmetic for a parameter of `dtype`: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def param_name(group: dict[str, Any], index: int) -> str:
    """Return the name of a parameter of a group for error messages."""
    if "param_names" in group:
        return group["param_names"][index]
    return f"params[{index}]"


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
    """Return True if a step updates `param` in one list with other parameters."""
    # On the CPU one tensor at a time is faster, because its temporaries stay in cache. On an
    # accelerator the number of launches counts.
    if group["foreach"] is None:
        return param.device.type != "cpu"
    return bool(group["foreach"])


def lr_of(group: dict[str, Any], device: torch.device) -> float | Tensor:
    """Return the learning rate of a group, for excluded groups times `excluded_lr_mult`. A tensor goes to `device`."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.detach()
        # Reading a CPU tensor waits for nothing. But a number would be frozen into the graph of torch.compile or CUDA.
        may_be_read = (
            lr.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not group["capturable"]
        )
        if may_be_read:
            lr = lr.item()
        else:
            lr = lr.to(device)
    if group["trust_ratio"]:
        return lr
    return lr * group["excluded_lr_mult"]


def decayed_gradients(
    params: list[Tensor],
    grads: list[Tensor],
    *,
    group: dict[str, Any],
    scaling: GradScaling = UNSCALED,
) -> list[Tensor]:
    """Unscale, negate (to climb) and decay gradients, at least in float32. Return `grads` itself if nothing changes."""
    dtype = state_dtype(params[0].dtype)
    directions = scaling.unscale(as_dtype(grads, dtype), keep=grads)
    # The sign comes before the decay, as in torch.optim.SGD: climbing the objective must not grow the weights.
    if group["maximize"]:
        directions = list(torch._foreach_neg(directions))
    if group["weight_decay"] != 0:
        weights = as_dtype(params, dtype)
        directions = list(torch._foreach_add(directions, weights, alpha=group["weight_decay"]))
    return directions
