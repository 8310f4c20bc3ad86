"""The trust ratios of LARS and LAMB, computed on request: a step does not store them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.optim.dtensor import has_dtensors, local_shards
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
    written, nothing waits for the device. *Of DTensors every rank must call it.*

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
    rules: dict[type, Callable[..., Tensor | None]] = {LARS: _lars_ratio, LAMB: _lamb_ratio}
    of_one = rules.get(type(optimizer))
    if of_one is not None and has_dtensors(optimizer.param_groups):
        with local_shards(optimizer) as local:
            ratios_of_groups = _ratios(local, of_one, grad_scale)
            return [{local.wholes[param]: ratio for param, ratio in some.items()} for some in ratios_of_groups]
    return _ratios(optimizer, of_one, grad_scale)


def _ratios(
    optimizer: Any, of_one: Callable[..., Tensor | None] | None, grad_scale: Tensor | None
) -> list[dict[Tensor, Tensor]]:
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
    optimizer: LARS, group: dict[str, Any], param: Tensor, grad: Tensor, grad_scale: Tensor | None
) -> Tensor:
    inverse_scale = None if grad_scale is None else grad_scale.detach().float().reciprocal().to(param.device)
    scaling = GradScaling(inverse_scale=inverse_scale, found_inf=None)
    return lars_ratios([param], [grad], group=group, lr=1.0, scaling=scaling, shard_sums=optimizer.shard_sums)[0]


def _lamb_ratio(
    optimizer: LAMB, group: dict[str, Any], param: Tensor, grad: Tensor, grad_scale: Tensor | None
) -> Tensor | None:
    state = optimizer.state.get(param, {})
    if "step" not in state:
        return None
    # As in `LAMB`: a number where the count is on the CPU, else float64.
    step = state["step"].item() if state["step"].device.type == "cpu" else state["step"].to(torch.float64)
    updates = lamb_updates([param], [state["exp_avg"]], [state["exp_avg_sq"]], [step], group=group)
    norms = [tensor_norms([param]), tensor_norms(updates)]
    if optimizer.shard_sums is not None:
        norms = optimizer.shard_sums.norms([param], *norms)
    return trust_ratio(*norms)[0]
