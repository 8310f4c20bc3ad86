"""One optimizer state, loss scale and count of skipped steps for all nodes, after steps that each took on its own.

moments                 their average over nodes; of a node that has none yet, as its steps were skipped, zeros
counts of steps         the largest
loss scale              the smallest, with the fewest clean steps
counts of skipped       the largest
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.precision.optimizer_protocol import optimizers_within
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from lightning_hybrid.strategy.local_sgd.node_average import NodeAverage

# Optimizer, parameter and name of a tensor of state, its shape and dtype, and the kind of device that it is on.
_Entry = tuple[int, int, str, tuple[int, ...], torch.dtype, str]


@torch.no_grad()
def agree_on_state_(
    optimizers: Sequence[Optimizer], step_states: Sequence[OptimizerStepState], average: NodeAverage
) -> None:
    """Give all ranks one state of optimizers and loss scales. Collective: every rank of WORLD must call it."""
    params = [_params_of(one) for optimizer in optimizers for one in optimizers_within(optimizer)]
    states = [one.state for optimizer in optimizers for one in optimizers_within(optimizer)]
    entries = sorted(_entries(params, states), key=_place)
    own = hashlib.sha256(repr(entries).encode()).hexdigest(), [one.state_dict() for one in step_states]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    if len({digest for digest, _ in found}) > 1:  # rare: a node whose steps were all skipped has no state yet
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, entries)
        union = sorted({entry for of_rank in of_ranks for entry in of_rank}, key=_place)
        for entry in union:
            _make_if_missing(entry, params, states)
        entries = union
    moments: list[Tensor] = []
    counts: list[Tensor] = []
    for optimizer, index, name, shape, dtype, _ in entries:
        param = params[optimizer][index]
        value = states[optimizer][param][name]
        is_moment = (len(shape) > 0 or shape == tuple(param.shape)) and name != "step"
        is_real = dtype.is_floating_point or dtype.is_complex
        (moments if is_moment and is_real else counts).append(value)
    average.average_(moments)
    _take_largest_(counts, average.device)
    for index, state in enumerate(step_states):
        state.load_state_dict(agreed([of_rank[index] for _, of_rank in found]))


def _place(entry: _Entry) -> tuple[int, int, str]:
    return entry[:3]


def agreed(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one state of loss scale and skipped steps for those of several nodes.

    >>> states = [{"loss_scale": {"scale": scale}, "num_skipped_steps": skipped} for scale, skipped in ((8, 0), (4, 1))]
    >>> agreed(states)
    {'loss_scale': {'scale': 4}, 'num_skipped_steps': 1}
    """
    found: dict[str, Any] = {}
    for name, value in states[0].items():
        each = [state[name] for state in states]
        # What a loss scale of the user's has besides numbers is rank zero's.
        found[name] = (
            {key: _smallest([one[key] for one in each]) for key in value} if name == "loss_scale" else max(each)
        )
    return found


def _smallest(values: Sequence[Any]) -> Any:
    return min(values) if all(isinstance(value, int | float) for value in values) else values[0]


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _entries(params: Sequence[list[Tensor]], states: Sequence[Any]) -> Iterator[_Entry]:
    for optimizer, (of_optimizer, state) in enumerate(zip(params, states, strict=True)):
        for index, param in enumerate(of_optimizer):
            for name, value in state.get(param, {}).items():
                if isinstance(value, Tensor):
                    yield optimizer, index, str(name), tuple(value.shape), value.dtype, value.device.type


def _make_if_missing(entry: _Entry, params: Sequence[list[Tensor]], states: Sequence[Any]) -> None:
    optimizer, index, name, shape, dtype, device = entry
    param = params[optimizer][index]
    if states[optimizer][param].get(name) is not None:
        return
    on = param.device if device == param.device.type else torch.device(device)
    if shape == tuple(param.shape):  # in the same order of memory, as optimizers make it
        states[optimizer][param][name] = torch.zeros_like(param, dtype=dtype, device=on, requires_grad=False)
    else:
        states[optimizer][param][name] = torch.zeros(shape, dtype=dtype, device=on)


def _take_largest_(counts: Sequence[Tensor], device: torch.device) -> None:
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for count in counts:
        by_kind.setdefault((count.dtype, count.device), []).append(count)
    for (dtype, own), some in by_kind.items():
        flat = torch.cat([count.reshape(-1) for count in some])
        largest = flat.to(device, torch.float64 if dtype.is_floating_point else torch.int64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        numels = [count.numel() for count in some]
        for count, value in zip(some, largest.to(own, dtype).split(numels), strict=True):
            count.copy_(value.view(count.shape))
