"""One optimizer state, loss scale and count of skipped steps for all nodes, after steps that each took on its own.

momentum                at each period's end its average over nodes, as narrow between them as weights are; not Adam's,
                        which a node divides by its own second moment: where that is zero, nothing would bound a step
moments, momentum too   in a checkpoint their average; of a node that has none yet, as its steps were skipped, zeros
counts of steps         the largest
loss scale              the smallest, with the fewest clean steps
counts of skipped       the largest
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.precision.optimizer_protocol import optimizers_within, parameters_of
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from lightning_hybrid.strategy.local_steps.independent_nodes import NodeAverage

# Optimizer, parameter and name of a tensor of state, its shape and dtype, and the kind of device that it is on.
_Entry = tuple[int, int, str, tuple[int, ...], torch.dtype, str]
_PLACE = itemgetter(slice(3))


@torch.no_grad()
def average_momentum_(optimizers: Sequence[Optimizer], average: NodeAverage) -> None:
    """Give all ranks one momentum. Collective: every rank of WORLD must call it."""
    state = _State(optimizers)
    has_same_entries, _ = state.compare(None)
    if has_same_entries:
        average.average_(
            [value for name, value in state.moments() if name == "momentum_buffer"], is_narrow=True
        )
    else:  # rare; a momentum alone is not what an optimizer would begin with
        state.fill_up()
        state.average_(average)


@torch.no_grad()
def agree_on_state_(
    optimizers: Sequence[Optimizer], step_states: Sequence[OptimizerStepState], average: NodeAverage
) -> None:
    """Give all ranks one state of optimizers and loss scales. Collective: every rank of WORLD must call it."""
    state = _State(optimizers)
    has_same_entries, found = state.compare([one.state_dict() for one in step_states])
    if not has_same_entries:
        state.fill_up()
    state.average_(average)
    for index, step_state in enumerate(step_states):
        step_state.load_state_dict(agreed([of_rank[index] for of_rank in found]))


class _State:
    """Tensors of optimizer state in one order."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        within = [one for optimizer in optimizers for one in optimizers_within(optimizer)]
        self._params = [list(parameters_of(one)) for one in within]
        self._states = [one.state for one in within]
        self._entries = sorted(_entries(self._params, self._states), key=_PLACE)

    def compare(self, own: Any) -> tuple[bool, list[Any]]:
        """Return whether all ranks have the same tensors, and what each gave. Collective."""
        digest = hashlib.sha256(repr(self._entries).encode()).hexdigest()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (digest, own))
        return all(other == digest for other, _ in found), [given for _, given in found]

    def fill_up(self) -> None:
        """Make what other nodes have: a node whose steps were all skipped has no state yet. Collective."""
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, self._entries)
        self._entries = sorted({entry for of_rank in of_ranks for entry in of_rank}, key=_PLACE)
        for entry in self._entries:
            _make_if_missing(entry, self._params, self._states)

    def average_(self, average: NodeAverage) -> None:
        """Average the moments, and take the largest of counts. Collective."""
        average.average_([value for _, value in self.moments()])
        _take_largest_(
            [value for _, value, is_moment in self._tensors() if not is_moment], average.device
        )

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of moments."""
        return ((name, value) for name, value, is_moment in self._tensors() if is_moment)

    def _tensors(self) -> Iterator[tuple[str, Tensor, bool]]:
        for optimizer, index, name, shape, dtype, _ in self._entries:
            param = self._params[optimizer][index]
            is_moment = (len(shape) > 0 or shape == tuple(param.shape)) and name != "step"
            is_real = dtype.is_floating_point or dtype.is_complex
            yield name, self._states[optimizer][param][name], is_moment and is_real


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
            {key: _smallest([one[key] for one in each]) for key in value}
            if name == "loss_scale"
            else max(each)
        )
    return found


def _smallest(values: Sequence[Any]) -> Any:
    return min(values) if all(isinstance(value, int | float) for value in values) else values[0]


def _entries(params: Sequence[list[Tensor]], states: Sequence[Any]) -> Iterator[_Entry]:
    for optimizer, (of_optimizer, state) in enumerate(zip(params, states, strict=True)):
        for index, param in enumerate(of_optimizer):
            for name, value in state.get(param, {}).items():
                if isinstance(value, Tensor):
                    yield (
                        optimizer,
                        index,
                        str(name),
                        tuple(value.shape),
                        value.dtype,
                        value.device.type,
                    )


def _make_if_missing(entry: _Entry, params: Sequence[list[Tensor]], states: Sequence[Any]) -> None:
    optimizer, index, name, shape, dtype, device = entry
    param = params[optimizer][index]
    if states[optimizer][param].get(name) is not None:
        return
    on = param.device if device == param.device.type else torch.device(device)
    if shape == tuple(param.shape):  # in the same order of memory, as optimizers make it
        states[optimizer][param][name] = torch.zeros_like(
            param, dtype=dtype, device=on, requires_grad=False
        )
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
