"""Synchronization of optimizer state, loss scales and skipped-step counts after local steps.

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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.precision.optimizer_protocol import optimizers_within, parameters_of
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from lightning_hybrid.strategy.local_steps.independent_nodes import NodeAverage


class _Entry(NamedTuple):
    """Description of an optimizer-state tensor, by which ranks match their tensors to those of other ranks.

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

    def sort_key(self) -> tuple[int, int, str, tuple[int, ...], str, str]:
        """Return a key of all fields, so that sorting gives the same order on all ranks."""
        return (
            self.optimizer,
            self.parameter,
            self.name,
            self.shape,
            str(self.dtype),
            self.device_type,
        )


@dataclass(frozen=True)
class _RankState:
    """Message that a rank sends to all others before optimizer state is averaged.

    Attributes:
        digest: Digest of the descriptions of the rank's optimizer-state tensors.
        step_states: State dicts of the rank's loss scales and counts of skipped steps.
    """

    digest: str
    step_states: list[dict[str, Any]]


@torch.no_grad()
def average_momentum_(optimizers: Sequence[Optimizer], average: NodeAverage) -> None:
    """Average the optimizers' momentum buffers over nodes.

    Collective: every rank of WORLD must call it, in the same order.
    """
    state = _OptimizerTensors(optimizers)
    rank_states = state.gather_rank_states(step_states=[])
    if _have_same_tensors(rank_states):
        momenta = [tensor for name, tensor in state.moments() if name == "momentum_buffer"]
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
    step_states_here = [step_state.state_dict() for step_state in step_states]
    rank_states = state.gather_rank_states(step_states_here)
    if not _have_same_tensors(rank_states):
        state.add_missing_tensors()
    state.average_(average)

    for index, step_state in enumerate(step_states):
        states_of_ranks = [rank_state.step_states[index] for rank_state in rank_states]
        agreed_state = agreed(states_of_ranks)
        step_state.load_state_dict(agreed_state)


class _OptimizerTensors:
    """Collection of optimizer-state tensors, in the same order on all ranks."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._parameters: list[list[Tensor]] = []
        self._states: list[Any] = []
        for outer_optimizer in optimizers:
            for optimizer in optimizers_within(outer_optimizer):
                parameters = list(parameters_of(optimizer))
                self._parameters.append(parameters)
                self._states.append(optimizer.state)
        self._entries = sorted(self._entries_here(), key=_Entry.sort_key)

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

    def _tensor_of(self, entry: _Entry) -> Tensor:
        parameter = self._parameter_of(entry)
        state = self._states[entry.optimizer]
        tensor: Tensor = state[parameter][entry.name]
        return tensor

    def gather_rank_states(self, step_states: list[dict[str, Any]]) -> list[_RankState]:
        """Gather the messages of all ranks, with which they compare their state tensors.

        Collective: every rank of WORLD must call it, in the same order.

        Args:
            step_states: State dicts of loss scales and counts of skipped steps to send. Empty: none are needed.
        """
        description = repr(self._entries)
        digest = hashlib.sha256(description.encode()).hexdigest()
        rank_states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rank_states, _RankState(digest, step_states))
        return rank_states

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
        self._entries = sorted(all_entries, key=_Entry.sort_key)
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
            tensor = torch.zeros_like(
                parameter, dtype=entry.dtype, device=device, requires_grad=False
            )
        else:
            tensor = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
        state[entry.name] = tensor

    def average_(self, average: NodeAverage) -> None:
        """Average the moments over nodes, and replace step counts by their maximum.

        Collective: every rank of WORLD must call it, in the same order.
        """
        moments = [tensor for _, tensor in self.moments()]
        average.average_(moments)
        step_counts = list(self._step_counts())
        _take_largest_(step_counts, average.device)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each moment, such as momentum or mean squared gradients."""
        for entry in self._entries:
            if self._is_moment(entry):
                yield entry.name, self._tensor_of(entry)

    def _step_counts(self) -> Iterator[Tensor]:
        for entry in self._entries:
            if not self._is_moment(entry):
                yield self._tensor_of(entry)

    def _is_moment(self, entry: _Entry) -> bool:
        """Return whether a state tensor is a moment, which is averaged. All others are step counts."""
        if entry.name == "step":
            return False
        # Optimizers may give a step count any name. A scalar is a moment only if the parameter is a scalar too.
        is_scalar = len(entry.shape) == 0
        if is_scalar and entry.shape != tuple(self._parameter_of(entry).shape):
            return False
        return entry.dtype.is_floating_point or entry.dtype.is_complex


def _have_same_tensors(rank_states: Sequence[_RankState]) -> bool:
    digests = {rank_state.digest for rank_state in rank_states}
    return len(digests) == 1


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
        values = [loss_scale[key] for loss_scale in loss_scales]
        agreed_loss_scale[key] = _smallest(values)
    return agreed_loss_scale


def _smallest(values: Sequence[Any]) -> Any:
    """Return the minimum of the values, or rank zero's value if they are not all numbers.

    The loss scale of a user may have values of other types.
    """
    if all(isinstance(value, int | float) for value in values):
        return min(values)
    return values[0]


def _take_largest_(counts: Sequence[Tensor], device: torch.device) -> None:
    """Replace each tensor in place by its elementwise maximum over all ranks.

    Collective: every rank of WORLD must call it, in the same order.

    Args:
        counts: Tensors of any dtypes on any devices.
        device: Device on which the ranks' values are compared.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for count in counts:
        key = (count.dtype, count.device)
        groups.setdefault(key, []).append(count)
    for group in groups.values():
        _take_largest_of_group_(group, device)


def _take_largest_of_group_(counts: Sequence[Tensor], device: torch.device) -> None:
    """Replace tensors of one dtype on one device by their maxima, with a single all-reduce."""
    dtype = counts[0].dtype
    wire_dtype = torch.int64
    if dtype.is_floating_point:
        wire_dtype = torch.float64
    flat = torch.cat([count.reshape(-1) for count in counts])
    largest = flat.to(device, wire_dtype)
    dist.all_reduce(largest, dist.ReduceOp.MAX)

    largest = largest.to(counts[0].device, dtype)
    numels = [count.numel() for count in counts]
    for count, value in zip(counts, largest.split(numels), strict=True):
        count.copy_(value.view(count.shape))
