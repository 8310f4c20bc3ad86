"""The trust ratios of LARS and LAMB, computed on request: a step does not store them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.optim.dtensor import has_dtensors, local_shards
from lightning_hybrid.optim.gradients import GradScaling, dense_gradients
from lightning_hybrid.optim.lamb import LAMB, lamb_updates, lamb_vectors
from lightning_hybrid.optim.lars import LARS, lars_ratios, lars_vectors
from lightning_hybrid.optim.layerwise import LayerwiseOptimizer
from lightning_hybrid.optim.trust_ratio import (
    ShardedVector,
    norms_over_ranks,
    tensor_norms,
    trust_ratio,
)


@torch.no_grad()
def trust_ratios(
    optimizer: Optimizer, *, grad_scale: Tensor | None = None
) -> list[dict[Tensor, Tensor]]:
    """Compute the trust ratio q of every tensor that has one, for each parameter group: `{parameter: q}`, q 0-dim.

    q is that of the optimizer's docstring, before any bound on it, for weights, gradients and moments as they are now:
    before a step of LARS the step's own; after a step it differs by about the relative size of the step. Excluded
    groups, tensors without gradient or state (LAMB before its first step) and other optimizers have none. Nothing is
    written, nothing waits for the device. Where ranks share an update (`LayerwiseOptimizer.parts`, DTensors) q is that
    of the whole tensor, and every rank that holds parts must call it, in the same order.

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
    if isinstance(optimizer, LayerwiseOptimizer) and has_dtensors(optimizer.param_groups):
        with local_shards(optimizer) as local:
            found = _ratios(local, grad_scale)
            return [{local.wholes[param]: ratio for param, ratio in some.items()} for some in found]
    return _ratios(optimizer, grad_scale)


def _ratios(optimizer: Optimizer, grad_scale: Tensor | None) -> list[dict[Tensor, Tensor]]:
    inverse_scale = None if grad_scale is None else grad_scale.detach().float().reciprocal()
    scaling = GradScaling(inverse_scale=inverse_scale)
    of_parts = _norms_of_parts(optimizer, scaling)
    has_rule = type(optimizer) in (LARS, LAMB)
    found = []
    for group in optimizer.param_groups:
        ratios = dict[Tensor, Tensor]()
        for _, (param, grad) in dense_gradients(group) if has_rule and group["trust_ratio"] else ():
            norms = of_parts.get(param)
            if type(optimizer) is LARS:
                # The clip bounds the step and is no property of the layer; without it the ratio does not depend on lr.
                options = {**group, "trust_clip": None}
                here = scaling.to(param.device)
                of_one = None if norms is None else [norm.view(1) for norm in norms]
                sums = optimizer.shard_sums
                ratios[param] = lars_ratios(
                    [param],
                    [grad],
                    group=options,
                    lr=1.0,
                    scaling=here,
                    norms=of_one,
                    shard_sums=sums,
                )[0]
            elif type(optimizer) is LAMB and "step" in optimizer.state.get(param, {}):
                ratios[param] = (
                    _lamb_ratio(optimizer, group, param) if norms is None else trust_ratio(*norms)
                )
        found.append(ratios)
    return found


def _norms_of_parts(optimizer: Optimizer, scaling: GradScaling) -> dict[Tensor, list[Tensor]]:
    if not isinstance(optimizer, LayerwiseOptimizer) or not optimizer.parts:
        return {}
    vectors = dict[Tensor, list[ShardedVector]]()
    for group in optimizer.param_groups:
        for _, (param, grad) in dense_gradients(group):
            if (part := optimizer.parts.get(param)) is None:
                continue
            if isinstance(optimizer, LARS):
                vectors[param] = lars_vectors(
                    param, grad, part, group=group, scaling=scaling.to(param.device)
                )
            elif "step" in (state := optimizer.state.get(param, {})):
                moments = state["exp_avg"], state["exp_avg_sq"]
                vectors[param] = lamb_vectors(
                    param, moments, part, group=group, step=_step_of(state)
                )
    device = next(iter(optimizer.parts)).device
    return norms_over_ranks(vectors, torch.zeros((), device=device), optimizer.add_up_)[0]


def _lamb_ratio(optimizer: LAMB, group: dict[str, Any], param: Tensor) -> Tensor:
    state = optimizer.state[param]
    moments = [state["exp_avg"]], [state["exp_avg_sq"]]
    updates = lamb_updates([param], *moments, [_step_of(state)], group=group)
    norms = [tensor_norms([param]), tensor_norms(updates)]
    if optimizer.shard_sums is not None:
        norms = optimizer.shard_sums.norms([param], *norms)
    return trust_ratio(*norms)[0]


def _step_of(state: dict[str, Any]) -> float | Tensor:
    # As in `LAMB`: a number where the count is on the CPU, else float64.
    step: Tensor = state["step"]
    return step.item() if step.device.type == "cpu" else step.to(torch.float64)
