"""Synchronisation of optimizer state, loss scales and skipped-step counts after local steps.

momentum                averaged over nodes at the end of each period, in the dtype in which weights are sent between
                        nodes. Adam's first moment is left out, because a node divides it by its own second moment. If
                        that is zero, nothing would bound the step.
all moments             averaged in a checkpoint, including momentum. A node that has none yet, because its steps were
                        skipped, contributes zeros.
counts of steps         the maximum
loss scale              the minimum, with the smallest number of clean steps
counts of skipped steps the maximum
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.precision.optimizer_protocol import optimizers_within, parameters_of
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from lightning_hybrid.strategy.local_steps.independent_nodes import NodeAverage


class _Entry(NamedTuple):
    """Description of an optimizer-state tensor, with which ranks match each other's tensors.

    Attributes:
        optimizer: Index of the optimizer.
        parameter: Index of the parameter in the optimizer.
        name: Name of the tensor in the parameter's state.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        device_type: Type of the device that holds the tensor.
    """

    optimizer: int
    parameter: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@torch.no_grad()
def average_momentum_(optimizers: Sequence[Optimizer], average: NodeAverage) -> None:
    """Average the optimizers' momentum buffers over nodes.

    Collective: every rank of WORLD must call it, in the same order.
    """
    state = _OptimizerTensors(optimizers)
    has_same_entries, _ = state.compare(None)
    if has_same_entries:
        momenta = [value for name, value in state.moments() if name == "momentum_buffer"]
        average.average_(momenta, is_narrow=True)
        return
    # This is rare. Optimizers may initialize their state only if it is empty, so all missing state tensors are created
    # and averaged, and not the momentum alone.
    state.add_missing_tensors()
    state.average_(average)


@torch.no_grad()
def agree_on_state_(
    optimizers: Sequence[Optimizer], step_states: Sequence[OptimizerStepState], average: NodeAverage
) -> None:
    """Make optimizer state, loss scales and counts of skipped steps equal on all ranks.

    Collective: every rank of WORLD must call it, in the same order.
    """
    state = _OptimizerTensors(optimizers)
    own_step_states = [step_state.state_dict() for step_state in step_states]
    has_same_entries, step_states_by_rank = state.compare(own_step_states)
    if not has_same_entries:
        state.add_missing_tensors()
    state.average_(average)
    for index, step_state in enumerate(step_states):
        states_of_ranks = [states[index] for states in step_states_by_rank]
        step_state.load_state_dict(agreed(states_of_ranks))


class _OptimizerTensors:
    """Collection of optimizer-state tensors, in the same order on all ranks."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._parameters: list[list[Tensor]] = []
        self._states: list[Any] = []
        for outer_optimizer in optimizers:
            for optimizer in optimizers_within(outer_optimizer):
                self._parameters.append(list(parameters_of(optimizer)))
                self._states.append(optimizer.state)
        self._entries = sorted(self._entries_here(), key=_sort_key)

    def _entries_here(self) -> Iterator[_Entry]:
        """Yield a description of each optimizer-state tensor of this rank."""
        for optimizer_index, parameters in enumerate(self._parameters):
            state = self._states[optimizer_index]
            for parameter_index, parameter in enumerate(parameters):
                for name, value in state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield _Entry(
                            optimizer=optimizer_index,
                            parameter=parameter_index,
                            name=str(name),
                            shape=tuple(value.shape),
                            dtype=value.dtype,
                            device_type=value.device.type,
                        )

    def _parameter_of(self, entry: _Entry) -> Tensor:
        return self._parameters[entry.optimizer][entry.parameter]

    def compare(self, value: Any) -> tuple[bool, list[Any]]:
        """Return whether all ranks have the same state tensors, and the `value` of each rank.

        Collective: every rank of WORLD must call it, in the same order.
        """
        digest = hashlib.sha256(repr(self._entries).encode()).hexdigest()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (digest, value))
        has_same_entries = all(digest_of_rank == digest for digest_of_rank, _ in gathered)
        return has_same_entries, [value_of_rank for _, value_of_rank in gathered]

    def add_missing_tensors(self) -> None:
        """Create tensors of zeros for state that exists only on other ranks.

        A node whose steps were all skipped has no state yet.

        Collective: every rank of WORLD must call it, in the same order.
        """
        entries_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(entries_by_rank, self._entries)
        all_entries: set[_Entry] = set()
        for entries in entries_by_rank:
            all_entries.update(entries)
        self._entries = sorted(all_entries, key=_sort_key)
        for entry in self._entries:
            self._add_if_missing(entry)

    def _add_if_missing(self, entry: _Entry) -> None:
        parameter = self._parameter_of(entry)
        state = self._states[entry.optimizer][parameter]
        if state.get(entry.name) is not None:
            return
        device = torch.device(entry.device_type)
        if entry.device_type == parameter.device.type:
            device = parameter.device
        if entry.shape == tuple(parameter.shape):
            # It gets the memory order of the parameter, as if the optimizer had created it.
            state[entry.name] = torch.zeros_like(
                parameter, dtype=entry.dtype, device=device, requires_grad=False
            )
        else:
            state[entry.name] = torch.zeros(entry.shape, dtype=entry.dtype, device=device)

    def average_(self, average: NodeAverage) -> None:
        """Average the moments over nodes, and replace step counts by their maximum.

        Collective: every rank of WORLD must call it, in the same order.
        """
        average.average_([value for _, value in self.moments()])
        counts = [value for _, value, is_moment in self._tensors() if not is_moment]
        _take_largest_(counts, average.device)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each moment, such as momentum or mean squared gradients."""
        for name, value, is_moment in self._tensors():
            if is_moment:
                yield name, value

    def _tensors(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the name of each tensor, the tensor, and whether it is a moment or a step count."""
        for entry in self._entries:
            parameter = self._parameter_of(entry)
            tensor = self._states[entry.optimizer][parameter][entry.name]
            has_shape_of_moment = len(entry.shape) > 0 or entry.shape == tuple(parameter.shape)
            has_dtype_of_moment = entry.dtype.is_floating_point or entry.dtype.is_complex
            is_moment = has_shape_of_moment and has_dtype_of_moment and entry.name != "step"
            yield entry.name, tensor, is_moment


def agreed(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the loss scale and number of skipped steps on which all ranks agree, given their states.

    >>> states = [{"loss_scale": {"scale": scale}, "num_skipped_steps": skipped} for scale, skipped in ((8, 0), (4, 1))]
    >>> agreed(states)
    {'loss_scale': {'scale': 4}, 'num_skipped_steps': 1}
    """
    result: dict[str, Any] = {}
    for name in states[0]:
        values = [state[name] for state in states]
        if name == "loss_scale":
            result[name] = _agreed_loss_scale(values)
        else:
            result[name] = max(values)
    return result


def _agreed_loss_scale(loss_scales: Sequence[dict[str, Any]]) -> dict[str, Any]:
    agreed_loss_scale = {}
    for key in loss_scales[0]:
        agreed_loss_scale[key] = _smallest([loss_scale[key] for loss_scale in loss_scales])
    return agreed_loss_scale


def _smallest(values: Sequence[Any]) -> Any:
    """Return the minimum of the values, or rank zero's value if they are not all numbers.

    The loss scale of a user may have values of other types.
    """
    if all(isinstance(value, int | float) for value in values):
        return min(values)
    return values[0]


def _sort_key(entry: _Entry) -> tuple[int, int, str, tuple[int, ...], str, str]:
    # All fields are compared, so that all ranks have the same order.
    key = (entry.optimizer, entry.parameter, entry.name)
    return *key, entry.shape, str(entry.dtype), entry.device_type


def _take_largest_(counts: Sequence[Tensor], device: torch.device) -> None:
    """Replace each tensor in place by its elementwise maximum over all ranks."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for count in counts:
        groups.setdefault((count.dtype, count.device), []).append(count)

    for (dtype, device_of_counts), group in groups.items():
        wire_dtype = torch.int64
        if dtype.is_floating_point:
            wire_dtype = torch.float64
        flat = torch.cat([count.reshape(-1) for count in group])
        largest = flat.to(device, wire_dtype)
        dist.all_reduce(largest, dist.ReduceOp.MAX)

        numels = [count.numel() for count in group]
        values = largest.to(device_of_counts, dtype).split(numels)
        for count, value in zip(group, values, strict=True):
            count.copy_(value.view(count.shape))
