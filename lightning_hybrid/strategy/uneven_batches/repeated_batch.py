"""Undoing of the effects of a repeated batch, which counts for nothing: gradients, statistics, logs and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric


@contextmanager
def zero_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let every backward inside add exactly zero to the gradients of these tensors, also for inf and nan."""
    handles = []
    for tensor in tensors:
        if tensor.requires_grad:
            handles.append(tensor.register_hook(torch.zeros_like))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class RunningStatistics:
    """Running statistics of normalisation layers, such as BatchNorm, as they were when this object was made.

    Args:
        module: The module with the layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._saved: list[tuple[Tensor, Tensor]] = []
        for layer in module.modules():
            if isinstance(layer, _NormBase):
                for buffer in layer.buffers(recurse=False):
                    self._saved.append((buffer, buffer.clone()))

    def restore(self) -> None:
        """Write the values back. A graph that waits for its backward stays valid."""
        for buffer, value in self._saved:
            buffer.data.copy_(value)


class EpochSums:
    """Sums that `self.log` and torchmetrics of the module collect over an epoch, as they were at the beginning.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: Any) -> None:
        self._results: dict[str, Any] = module.trainer._results
        self._logged: dict[str, dict[str, Any]] = {}
        for key, result in self._results.items():
            if result.is_tensor:
                self._logged[key] = _sums_of(result)
        self._metrics: list[_MetricState] = []
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._metrics.append(_MetricState(metric))

    def restore(self) -> None:
        """Take the sums back. Values of the step alone stay, and so do the names that were logged first in it."""
        # Ranks must have the same names at the end of the epoch, when values with `sync_dist` are reduced.
        for key, result in self._results.items():
            if not result.is_tensor:
                continue
            sums = self._logged.get(key)
            if sums is None:
                sums = _initial_sums(result)
            for name, value in sums.items():
                setattr(result, name, value)
            result._computed = None
        for state in self._metrics:
            state.restore()


class _MetricState:
    """State of a torchmetric, as it was when this object was made."""

    def __init__(self, metric: Metric) -> None:
        self._metric: Any = metric
        self._update_count: int = metric._update_count
        self._values: dict[str, Any] = {}
        for name in metric._defaults:
            self._values[name] = _copied(getattr(metric, name))

    def restore(self) -> None:
        """Write the state back."""
        for name, value in self._values.items():
            setattr(self._metric, name, value)
        self._metric._update_count = self._update_count
        self._metric._computed = None


def _sums_of(result: Any) -> dict[str, Any]:
    # The states of a logged value are replaced and never written, so no copy is needed.
    return {name: getattr(result, name) for name in result._defaults}


def _initial_sums(result: Any) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for name, default in result._defaults.items():
        sums[name] = default.detach().clone().to(getattr(result, name).device)
    return sums


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    return list(state)  # of what a metric appends to
