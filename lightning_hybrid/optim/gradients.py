"""What a step reads of a parameter group, and of a loss scaler: the protocol of `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import as_dtype, copied


@dataclass(frozen=True, kw_only=True)
class GradScaling:
    """The factor on gradients for one step, and whether the step is skipped. All tensors are 0-dim, on a device.

    Attributes:
        inverse_scale: Factor on gradients; None: they are not scaled.
        found_inf: float32; above 0, the step writes nothing. None: the step is never skipped.
        found_inf_out: 0 so far; passes over gradients may write 1.0 here if one is inf or nan.
    """

    inverse_scale: Tensor | None = None
    found_inf: Tensor | None = None
    found_inf_out: Tensor | None = None

    def to(self, device: torch.device) -> GradScaling:
        """Copy to another device, without `found_inf_out`: each device has its own."""
        inverse_scale = (
            None if self.inverse_scale is None else self.inverse_scale.to(device, non_blocking=True)
        )
        found_inf = None if self.found_inf is None else self.found_inf.to(device, non_blocking=True)
        return GradScaling(inverse_scale=inverse_scale, found_inf=found_inf)

    def unscale(self, tensors: list[Tensor], *, keep: list[Tensor]) -> list[Tensor]:
        """Unscale `tensors`; in place unless they are the very list to `keep`."""
        if self.inverse_scale is None:
            return tensors
        if tensors is keep:
            return list(torch._foreach_mul(tensors, self.inverse_scale))
        torch._foreach_mul_(tensors, self.inverse_scale)
        return tensors

    def scratch(self, tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return where to compute the next `tensors`: copies in another `dtype` or where the step may be skipped."""
        wide = tensors if dtype is None else as_dtype(tensors, dtype)
        return copied(tensors) if wide is tensors and self.found_inf is not None else wide

    def commit_(self, tensors: list[Tensor], news: list[Tensor]) -> None:
        """Write `news`, rounded, to `tensors`, unless the step is skipped: then every bit stays."""
        if self.found_inf is None:
            if tensors is not news:
                torch._foreach_copy_(tensors, news)
            return
        # A selection and not a product with 0 or 1: 0 * inf is nan.
        skip = self.found_inf > 0
        for tensor, new in zip(tensors, news, strict=True):
            torch.where(skip, tensor, new.to(tensor.dtype), out=tensor)


UNSCALED = GradScaling()


def any_not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if an element of `tensors` is inf or nan, else 0.0: 0-dim float32, on the device of all of them."""
    extremes: list[Tensor]
    if tensors[0].device.type == "cpu":
        # One pass: torch's norm by inf takes 20 times as long there. nan survives both minimum and maximum.
        extremes = [
            extreme for tensor in tensors if tensor.numel() for extreme in torch.aminmax(tensor)
        ]
    else:
        extremes = list(
            torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], torch.inf)
        )
    # Stacked, so that there is one test and one result on the device for all of them.
    if not extremes:
        return torch.zeros((), device=tensors[0].device)
    return (~torch.isfinite(torch.stack(extremes)).all()).float()


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of optimizer state and arithmetic for a parameter of `dtype`: at least float32."""
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
        may_be_read = (
            lr.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not group["capturable"]
        )
        lr = lr.item() if may_be_read else lr.to(device)
    return lr if group["trust_ratio"] else lr * group["excluded_lr_mult"]


def decayed_gradients(
    params: list[Tensor],
    grads: list[Tensor],
    *,
    group: dict[str, Any],
    scaling: GradScaling = UNSCALED,
) -> list[Tensor]:
    """Unscale, negate (to climb) and decay gradients, at least in float32; the very `grads` if nothing changes."""
    dtype = state_dtype(params[0].dtype)
    directions = scaling.unscale(as_dtype(grads, dtype), keep=grads)
    # The sign comes before the decay, as in torch.optim.SGD: to climb does not mean to grow the weights.
    if group["maximize"]:
        directions = list(torch._foreach_neg(directions))
    if group["weight_decay"] != 0:
        directions = list(
            torch._foreach_add(directions, as_dtype(params, dtype), alpha=group["weight_decay"])
        )
    return directions
