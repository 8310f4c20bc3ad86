"""Helpers of LARS and LAMB for the gradients, loss scaling and learning rate of a parameter group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import as_dtype, copied


@dataclass(frozen=True, kw_only=True)
class GradScaling:
    """Scaling factor for the gradients of one step, with a flag that makes the optimizer skip the step.

    All tensors are 0-dim, as `torch.amp.GradScaler` passes them.

    Attributes:
        inverse_scale: Factor by which gradients are multiplied. None: gradients are not scaled.
        found_inf: float32 flag. If it is above 0, the step writes nothing. None: the step is never skipped.
        found_inf_out: Flag that is initially 0. Passes over gradients may set it to 1.0 if a gradient is inf or nan.
    """

    inverse_scale: Tensor | None = None
    found_inf: Tensor | None = None
    found_inf_out: Tensor | None = None

    def to(self, device: torch.device) -> GradScaling:
        """Return a copy on another device, without `found_inf_out`.

        Each device has its own `found_inf_out`.
        """
        inverse_scale = self.inverse_scale
        if inverse_scale is not None:
            inverse_scale = inverse_scale.to(device, non_blocking=True)
        found_inf = self.found_inf
        if found_inf is not None:
            found_inf = found_inf.to(device, non_blocking=True)
        return GradScaling(inverse_scale=inverse_scale, found_inf=found_inf)

    def unscale(self, tensors: list[Tensor], *, keep: list[Tensor]) -> list[Tensor]:
        """Return the tensors divided by the loss scale.

        They are changed in place unless `tensors` is the list `keep`.
        """
        if self.inverse_scale is None:
            return tensors
        if tensors is keep:
            return list(torch._foreach_mul(tensors, self.inverse_scale))
        torch._foreach_mul_(tensors, self.inverse_scale)
        return tensors

    def scratch(self, tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return tensors in which a step can compute the new values of `tensors`.

        They are copies if `dtype` is a different dtype or if the step may be skipped, else the tensors themselves.
        """
        wide = tensors
        if dtype is not None:
            wide = as_dtype(tensors, dtype)
        if wide is tensors and self.found_inf is not None:
            return copied(tensors)
        return wide

    def commit_(self, tensors: list[Tensor], new_values: list[Tensor]) -> None:
        """Write new values to `tensors`, rounded to their dtype, unless the step is skipped."""
        if self.found_inf is None:
            if tensors is not new_values:
                torch._foreach_copy_(tensors, new_values)
            return
        # `where` is used instead of a product with 0 or 1, because 0 * inf is nan.
        skip = self.found_inf > 0
        for tensor, new_value in zip(tensors, new_values, strict=True):
            torch.where(skip, tensor, new_value.to(tensor.dtype), out=tensor)


UNSCALED = GradScaling()


def any_not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a flag that is 1.0 if any element of the tensors is inf or nan, else 0.0.

    It is a 0-dim float32 tensor on their device.
    """
    non_empty = [tensor for tensor in tensors if tensor.numel()]
    if not non_empty:
        return torch.zeros((), device=tensors[0].device)
    extremes: list[Tensor] = []
    if tensors[0].device.type == "cpu":
        # This takes one pass, while torch's inf-norm takes 20 times as long on a CPU. Minimum and maximum propagate
        # nan.
        for tensor in non_empty:
            extremes.extend(torch.aminmax(tensor))
    else:
        extremes.extend(torch._foreach_norm(non_empty, torch.inf))
    # The results are stacked, so that one test is enough for all tensors.
    return (~torch.isfinite(torch.stack(extremes)).all()).float()


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of optimizer state and arithmetic for parameters of `dtype`, at least float32."""
    return torch.promote_types(dtype, torch.float32)


def param_name(group: dict[str, Any], index: int) -> str:
    """Return the name of a group's parameter for error messages."""
    if "param_names" in group:
        return group["param_names"][index]
    return f"params[{index}]"


def dense_gradients(group: dict[str, Any]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield the index, parameter and gradient of each parameter in a group that has a gradient.

    The items have the form `(index in the group, (parameter, gradient))`.

    Raises:
        ValueError: A gradient is sparse.
    """
    for index, param in enumerate(group["params"]):
        grad = param.grad
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise ValueError(
                f"`{param_name(group, index)}.grad.layout` (={grad.layout}) must be torch.strided, because a sparse "
                "gradient covers only some rows, but the trust ratio needs the full layer. Set `sparse=False` in the "
                "layer, or use `torch.optim.SparseAdam` for it."
            )
        yield index, (param, grad)


def is_together(group: dict[str, Any], param: Tensor) -> bool:
    """Return whether a step updates a parameter together with other parameters in multi-tensor operations."""
    # On the CPU one tensor at a time is faster, because its temporaries stay in the cache. On an
    # accelerator fewer launches are faster.
    if group["foreach"] is None:
        return param.device.type != "cpu"
    return bool(group["foreach"])


def lr_of(group: dict[str, Any], device: torch.device) -> float | Tensor:
    """Return the learning rate of a group, multiplied by `excluded_lr_mult` if the group is excluded.

    If the learning rate is a tensor, the result is a number or a tensor on `device`.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.detach()
        # A CPU tensor can be read without a wait. But a number would be a constant in a compiled or captured graph.
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
    """Return the unscaled gradients, negated for `maximize`, with weight decay added.

    The arithmetic is at least float32. If nothing changes, `grads` itself is returned.
    """
    dtype = state_dtype(params[0].dtype)
    directions = scaling.unscale(as_dtype(grads, dtype), keep=grads)
    # As in torch.optim.SGD, gradients are negated before the decay, which must not make the weights grow.
    if group["maximize"]:
        directions = list(torch._foreach_neg(directions))
    if group["weight_decay"] != 0:
        weights = as_dtype(params, dtype)
        directions = list(torch._foreach_add(directions, weights, alpha=group["weight_decay"]))
    return directions
