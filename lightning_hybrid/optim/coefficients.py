"""What the fused passes multiply by: one line of numbers per tensor, made of its group's options and its norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.scaling import Scaling
from lightning_hybrid.optim.trust_ratio import trust_ratio

NUM_COEFFICIENTS = 7
SCALE, DECAY, MOMENTUM, INSIDE, OUTSIDE, LOOK, SKIP = range(NUM_COEFFICIENTS)

_NUMBERS = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps", "trust_clip", "excluded_lr_mult")
_FORMS = ("lr_inside", "lr_outside", "ratio_outside")
NUM_OPTIONS = len(_NUMBERS) + 4


class Options:
    """The options of the groups as a float64 table with one column per tensor, on the tensors' device.

        table (NUM_OPTIONS, tensors)    lr, momentum, weight_decay, trust_coefficient, eps, trust_clip (none: inf),
                                        excluded_lr_mult, momentum_form (0, 1, 2), trust_ratio, -1 to climb, nesterov

    The table keeps its address, so that a captured graph reads what is in it at replay. `lr` is its first row, or made
    anew each step where a group's rate is a tensor: that one is read on the device.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self.table = torch.empty(0)

    def take(self, groups_of_tensors: Sequence[dict[str, Any]], device: torch.device) -> None:
        """Read the groups again; unchanged numbers stay on the device, changed ones go there without a wait."""
        groups = list({id(group): group for group in groups_of_tensors}.values())
        lines = [
            [_number(group, name) for name in _NUMBERS]
            + [_FORMS.index(_form(group)), bool(group["trust_ratio"]), -1.0 if group["maximize"] else 1.0]
            + [bool(group["nesterov"])]
            for group in groups
        ]
        key = (lines, [id(group) for group in groups_of_tensors], device)
        if key != self._key:
            index = {id(group): i for i, group in enumerate(groups)}
            places = torch.tensor([index[id(group)] for group in groups_of_tensors])
            table = torch.tensor(lines, dtype=torch.float64).T[:, places].contiguous()
            if self.table.shape != table.shape or self.table.device != device:
                self.table = torch.empty_like(table, device=device)
                self._lr, self.momentum, self.decay, self.trust_coefficient, self.eps, self.clip = self.table[:6]
                self.mult, self.form, self.adapted, self.sign, self.nesterov = self.table[6:]
            to_device_(self.table, table)
            self._places = torch.empty_like(places, device=device)
            to_device_(self._places, places)
            self._key = key
        self.lr = self._lr
        if any(isinstance(group["lr"], Tensor) for group in groups):
            rates = torch.stack([_on_device(group["lr"], device) for group in groups])
            self.lr = rates.index_select(0, self._places)


def to_device_(target: Tensor, values: Tensor) -> None:
    """Copy CPU `values` into `target` without making the host wait."""
    target.copy_(values.pin_memory() if target.device.type == "cuda" else values, non_blocking=True)


def coefficients(sums: Tensor, options: Options, scaling: Scaling, *, is_joint: bool) -> Tensor:
    """The numbers of the update, (tensors, NUM_COEFFICIENTS), float64; see `compiled` for what they do.

        INSIDE, OUTSIDE      "lr_inside"  lr * q, 1      "lr_outside"  q, lr      "ratio_outside"  1, lr * q

    `sums`: (2, tensors), of squares of weights, and of still scaled gradients or directions. On CUDA the same is one
    kernel, `kernels.finalize`.
    """
    scale = 1.0 if scaling.inverse_scale is None else scaling.inverse_scale
    weight_norms, norms = sums.sqrt().unbind()
    ratios = trust_ratio(
        weight_norms,
        norms * scale,
        trust_coefficient=options.trust_coefficient,
        weight_decay=0.0 if is_joint else options.decay,
        eps=options.eps,
    )
    is_adapted = options.adapted > 0
    lr = torch.where(is_adapted, options.lr, options.lr * options.mult)
    clipped = torch.minimum(ratios / lr, options.clip)
    ratios = torch.where(options.clip < torch.inf, clipped, ratios)
    ratios = torch.where(is_adapted, ratios, 1.0)
    inside = torch.where(options.form == 0, lr * ratios, torch.where(options.form == 1, ratios, 1.0))
    outside = torch.where(options.form == 0, 1.0, torch.where(options.form == 1, lr, lr * ratios))
    skip = torch.zeros_like(lr) if scaling.found_inf is None else (scaling.found_inf > 0).to(lr.dtype).expand_as(lr)
    numbers = [options.sign * scale, options.decay, options.momentum, inside, outside, options.nesterov, skip]
    return torch.stack(numbers, dim=1)


def _number(group: dict[str, Any], name: str) -> float:
    value = group[name]
    if isinstance(value, Tensor):
        return 0.0  # read on the device
    return torch.inf if value is None else float(value)


def _form(group: dict[str, Any]) -> str:
    # Without momentum all forms agree; "lr_outside" multiplies as SGD does.
    return group["momentum_form"] if group["momentum"] != 0 else "lr_outside"


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)
