"""The trust ratios of LARS and LAMB, computed on request: a step does not store them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.optim.grad_scaling import GradScaling
from lightning_hybrid.optim.gradients import dense_gradients
from lightning_hybrid.optim.lamb import LAMB, lamb_updates
from lightning_hybrid.optim.lars import LARS, lars_ratios
from lightning_hybrid.optim.trust_ratio import tensor_norms, trust_ratio


@torch.no_grad()
def trust_ratios(optimizer: Optimizer, *, grad_scale: Tensor | None = None) -> list[dict[Tensor, Tensor]]:
    """Compute the trust ratio q of every tensor that has one, for each parameter group: `{parameter: q}`, q 0-dim.

    q is that of the optimizer's docstring, before any `trust_clip`, for weights, gradients and moments as they are now:
    before a step of LARS the step's own; after a step it differs by about the relative size of the step. Excluded
    groups, tensors without gradient or state (LAMB before its first step) and other optimizers have none. Nothing is
    written, nothing waits for the device.

    Args:
        optimizer: Any optimizer.
        grad_scale: Factor that the gradients still contain (0-dim); None: 1. LAMB does not read gradients.

    >>> weight, bias = torch.nn.Parameter(torch.tensor([3.0, 4.0])), torch.nn.Parameter(torch.ones(1))
    >>> groups = [{"params": [weight]}, {"params": [bias], "trust_ratio": False}]
    >>> optimizer = LARS(groups, lr=1.0, trust_coefficient=0.01)
    >>> weight.grad, bias.grad = torch.tensor([0.0, 0.5]), torch.ones(1)
    >>> [list(group.values()) for group in trust_ratios(optimizer)]          # 0.01 * 5 / 0.5
    [[tensor(0.1000, dtype=torch.float64)], []]
    >>> trust_ratios(torch.optim.SGD([weight], lr=1.0))
    [{}]
    """
    of_one = {LARS: _lars_ratio, LAMB: _lamb_ratio}.get(type(optimizer))
    found = []
    for group in optimizer.param_groups:
        ratios = dict[Tensor, Tensor]()
        if of_one is not None and group["trust_ratio"]:
            for _, (param, grad) in dense_gradients(group):
                # The clip bounds the step and is no property of the layer; without it the ratio does not depend on lr.
                ratio = of_one(optimizer, {**group, "trust_clip": None}, param, grad, grad_scale)
                if ratio is not None:
                    ratios[param] = ratio
        found.append(ratios)
    return found


def _lars_ratio(
    optimizer: Optimizer, group: dict[str, Any], param: Tensor, grad: Tensor, grad_scale: Tensor | None
) -> Tensor:
    inverse_scale = None if grad_scale is None else grad_scale.detach().float().reciprocal().to(param.device)
    scaling = GradScaling(inverse_scale=inverse_scale, found_inf=None)
    return lars_ratios([param], [grad], group=group, lr=1.0, scaling=scaling)[0]


def _lamb_ratio(
    optimizer: Optimizer, group: dict[str, Any], param: Tensor, grad: Tensor, grad_scale: Tensor | None
) -> Tensor | None:
    state = optimizer.state.get(param, {})
    if "step" not in state:
        return None
    # As in `LAMB`: a number where the count is on the CPU, else float64.
    step = state["step"].item() if state["step"].device.type == "cpu" else state["step"].to(torch.float64)
    updates = lamb_updates([param], [state["exp_avg"]], [state["exp_avg_sq"]], [step], group=group)
    return trust_ratio(tensor_norms([param]), tensor_norms(updates))[0]
