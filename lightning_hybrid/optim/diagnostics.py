"""Computation of the trust ratios of LARS and LAMB, for logging."""

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
    """Compute the trust ratio of each parameter, and return one dictionary per parameter group.

    Each dictionary maps parameters to their ratios, which are 0-dim tensors. A ratio is the value q in the
    docstring of the optimizer, before any bound is applied, for the current weights, gradients and moments.
    If you call the function before a step of LARS, you get the ratios that the step will use. After the step
    they differ by about the relative size of the step. There is no ratio for excluded groups, for groups with
    `direction="orthogonal"`, whose step does not use q, for tensors without gradient or state (LAMB before its
    first step), or for other optimizers. The function changes nothing, and the host does not wait for the device.

    If ranks share an update (`LayerwiseOptimizer.parts`, DTensors), ratios are computed from the full
    tensors. Collective in this case: every rank that holds shards must call it, in the same order.

    Args:
        optimizer: Optimizer of any type.
        grad_scale: Loss scale by which the gradients are still multiplied, as a 0-dim tensor. None means that the
            gradients are not scaled. The ratios of LAMB do not depend on it.

    >>> weight, bias = torch.nn.Parameter(torch.tensor([3.0, 4.0])), torch.nn.Parameter(torch.ones(1))
    >>> groups = [{"params": [weight]}, {"params": [bias], "trust_ratio": False}]
    >>> optimizer = LARS(groups, lr=1.0, trust_coefficient=0.01)
    >>> weight.grad, bias.grad = torch.tensor([0.0, 0.5]), torch.ones(1)
    >>> [list(group.values()) for group in trust_ratios(optimizer)]          # 0.01 * 5 / 0.5
    [[tensor(0.1000, dtype=torch.float64)], []]
    >>> trust_ratios(torch.optim.SGD([weight], lr=1.0))
    [{}]
    """
    if not isinstance(optimizer, LayerwiseOptimizer) or not has_dtensors(optimizer.param_groups):
        return _ratios(optimizer, grad_scale)
    ratios_of_params = []
    with local_shards(optimizer) as local:
        for ratios_of_shards in _ratios(local, grad_scale):
            ratios = {local.wholes[shard]: ratio for shard, ratio in ratios_of_shards.items()}
            ratios_of_params.append(ratios)
    return ratios_of_params


def _ratios(optimizer: Optimizer, grad_scale: Tensor | None) -> list[dict[Tensor, Tensor]]:
    """Compute the trust ratios of each parameter group for parameters that are not DTensors."""
    inverse_scale = None
    if grad_scale is not None:
        inverse_scale = grad_scale.detach().float().reciprocal()
    scaling = GradScaling(inverse_scale=inverse_scale)
    norms_of_parts = _norms_of_parts(optimizer, scaling)

    ratios_of_groups = []
    for group in optimizer.param_groups:
        ratios: dict[Tensor, Tensor] = {}
        ratios_of_groups.append(ratios)
        if type(optimizer) not in (LARS, LAMB) or not group["trust_ratio"]:
            continue
        if group.get("direction") == "orthogonal":
            continue
        for _, (param, grad) in dense_gradients(group):
            norms = norms_of_parts.get(param)
            if type(optimizer) is LARS:
                ratios[param] = _lars_ratio(optimizer, group, param, grad, scaling, norms)
            elif type(optimizer) is LAMB and "step" in optimizer.state.get(param, {}):
                ratios[param] = _lamb_ratio(optimizer, group, param, norms)
    return ratios_of_groups


def _norms_of_parts(optimizer: Optimizer, scaling: GradScaling) -> dict[Tensor, list[Tensor]]:
    """Compute the norms of the full tensors of all sharded parameters.

    Collective: every rank that holds shards must call it, in the same order.
    """
    if not isinstance(optimizer, LayerwiseOptimizer) or not optimizer.parts:
        return {}
    vectors: dict[Tensor, list[ShardedVector]] = {}
    for group in optimizer.param_groups:
        for _, (param, grad) in dense_gradients(group):
            part = optimizer.parts.get(param)
            if part is None:
                continue
            state = optimizer.state.get(param, {})
            if isinstance(optimizer, LARS):
                vectors[param] = lars_vectors(
                    param, grad, part, group=group, scaling=scaling.to(param.device)
                )
            elif "step" in state:
                moments = (state["exp_avg"], state["exp_avg_sq"])
                vectors[param] = lamb_vectors(
                    param, moments, part, group=group, step=_step_of(state)
                )
    no_flag = torch.zeros((), device=next(iter(optimizer.parts)).device)
    norms, _ = norms_over_ranks(vectors, no_flag, optimizer.add_up_)
    return norms


def _lars_ratio(
    optimizer: LARS,
    group: dict[str, Any],
    param: Tensor,
    grad: Tensor,
    scaling: GradScaling,
    norms: list[Tensor] | None,
) -> Tensor:
    """Compute the LARS trust ratio of one parameter.

    If the parameter is a shard, `norms` are the norms of the full tensors.
    """
    if norms is not None:
        norms = [norm.view(1) for norm in norms]
    ratios = lars_ratios(
        [param],
        [grad],
        # The ratio is computed without the clip, which depends on lr and is not a property of the layer.
        group={**group, "trust_clip": None},
        lr=1.0,
        scaling=scaling.to(param.device),
        norms=norms,
        shard_sums=optimizer.shard_sums,
    )
    return ratios[0]


def _lamb_ratio(
    optimizer: LAMB, group: dict[str, Any], param: Tensor, norms: list[Tensor] | None
) -> Tensor:
    """Compute the LAMB trust ratio of one parameter.

    If the parameter is a shard, `norms` are the norms of the full tensors.
    """
    if norms is not None:
        return trust_ratio(*norms)
    state = optimizer.state[param]
    updates = lamb_updates(
        [param], [state["exp_avg"]], [state["exp_avg_sq"]], [_step_of(state)], group=group
    )
    norms = [tensor_norms([param]), tensor_norms(updates)]
    if optimizer.shard_sums is not None:
        norms = optimizer.shard_sums.norms([param], *norms)
    return trust_ratio(*norms)[0]


def _step_of(state: dict[str, Any]) -> float | Tensor:
    """Return a step count of LAMB as a Python number, or as a float64 tensor if it is not on the CPU."""
    step: Tensor = state["step"]
    if step.device.type == "cpu":
        return step.item()
    return step.to(torch.float64)
