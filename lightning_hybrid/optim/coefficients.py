"""What the fused passes multiply by: one line of numbers per tensor, made of its group's options and its norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.option_table import Options, number
from lightning_hybrid.optim.scaling import Scaling
from lightning_hybrid.optim.trust_ratio import trust_ratio

NUM_COEFFICIENTS = 6
SCALE, DECAY, MOMENTUM, INSIDE, OUTSIDE, LOOK = range(NUM_COEFFICIENTS)

_NUMBERS = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps", "trust_clip", "excluded_lr_mult")
_FORMS = ("lr_inside", "lr_outside", "ratio_outside")


def lars_options() -> Options:
    """The options of LARS: numbers; then momentum_form (0, 1, 2), trust_ratio, -1 to climb, nesterov."""
    return Options((*_NUMBERS, "momentum_form", "trust_ratio", "sign", "nesterov"), _line_of)


def _line_of(group: dict[str, Any]) -> list[float]:
    # Without momentum all forms agree; "lr_outside" multiplies as SGD does.
    form = _FORMS.index(group["momentum_form"]) if group["momentum"] != 0 else 1
    switches = (group["trust_ratio"], -1.0 if group["maximize"] else 1.0, group["nesterov"])
    return [*(number(group[name]) for name in _NUMBERS), form, *(float(switch) for switch in switches)]


def coefficients(sums: Tensor, options: Options, scaling: Scaling, *, is_joint: bool) -> Tensor:
    """The numbers of the update, (tensors, NUM_COEFFICIENTS), float64:

        d = SCALE * g + DECAY * w
        v <- MOMENTUM * v + INSIDE * d
        w <- w - OUTSIDE * v            LOOK (Nesterov): w - OUTSIDE * (MOMENTUM * v + INSIDE * d)

        INSIDE, OUTSIDE      "lr_inside"  lr * q, 1      "lr_outside"  q, lr      "ratio_outside"  1, lr * q

    `sums`: (2, tensors), of squares of weights, and of still scaled gradients or directions. On CUDA the same is one
    kernel, `kernels.finalize`.
    """  # noqa: D400, D415  an equation ends the line
    scale = 1.0 if scaling.inverse_scale is None else scaling.inverse_scale
    weight_norms, norms = sums.sqrt().unbind()
    ratios = trust_ratio(
        weight_norms,
        norms * scale,
        trust_coefficient=options["trust_coefficient"],
        weight_decay=0.0 if is_joint else options["weight_decay"],
        eps=options["eps"],
    )
    is_adapted = options["trust_ratio"] > 0
    lr = torch.where(is_adapted, options["lr"], options["lr"] * options["excluded_lr_mult"])
    clipped = torch.minimum(ratios / lr, options["trust_clip"])
    ratios = torch.where(options["trust_clip"] < torch.inf, clipped, ratios)
    ratios = torch.where(is_adapted, ratios, 1.0)
    form = options["momentum_form"]
    inside = torch.where(form == 0, lr * ratios, torch.where(form == 1, ratios, 1.0))
    outside = torch.where(form == 0, 1.0, torch.where(form == 1, lr, lr * ratios))
    scales = options["sign"] * scale
    return torch.stack([scales, options["weight_decay"], options["momentum"], inside, outside, options["nesterov"]], 1)
