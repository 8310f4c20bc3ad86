"""Functions that undo the effects of a repeated batch on gradients, statistics, logs and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lightning_hybrid.precision.living_modules import LivingModules


@contextmanager
def zero_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Return a context in which backward passes add zero to the gradients of the given tensors.

    Gradients that are inf or nan are replaced by zero as well.
    """
    handles = []
    for tensor in tensors:
        if tensor.requires_grad:
            handles.append(tensor.register_hook(torch.zeros_like))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradient_leaves(module: nn.Module | LivingModules, precision: Any) -> Iterable[Tensor]:
    """Return the tensors for which a backward pass computes gradients.

    These are the parameters, and the fp32 values of parameters that hold a half-precision copy.

    Args:
        module: Module that is trained, or several modules.
        precision: Precision plugin of the run.
    """
    tensors: dict[int, Tensor] = {}
    for parameter in module.parameters():
        tensors[id(parameter)] = parameter
    window = getattr(precision, "window", None)
    if window is not None:
        for pair in window.pairs.values():
            tensors[id(pair.fp32)] = pair.fp32
    return tensors.values()


class RunningStatistics:
    """Snapshot of the running statistics of normalization layers, such as BatchNorm.

    Args:
        module: Module with the layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._saved: list[tuple[Tensor, Tensor]] = []
        for layer in module.modules():
            if isinstance(layer, _NormBase):
                for buffer in layer.buffers(recurse=False):
                    self._saved.append((buffer, buffer.clone()))

    def restore(self) -> None:
        """Write the saved statistics back into the layers.

        An autograd graph whose backward pass has not run yet stays valid.
        """
        for buffer, value in self._saved:
            buffer.data.copy_(value)


class EpochSums:
    """Snapshot of the values that `self.log` and the module's metrics accumulate over an epoch.

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
        """Restore the accumulated values of the epoch.

        Values that were logged for the current step stay, and so do names that were first logged in it.
        """
        # Names stay, because ranks need the same names at the end of the epoch, when `sync_dist` values are reduced.
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
    """Snapshot of the state of a `torchmetrics` metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric: Any = metric
        self._update_count: int = metric._update_count
        self._values: dict[str, Any] = {}
        for name in metric._defaults:
            self._values[name] = _copied(getattr(metric, name))

    def restore(self) -> None:
        """Write the saved state back into the metric."""
        for name, value in self._values.items():
            setattr(self._metric, name, value)
        self._metric._update_count = self._update_count
        self._metric._computed = None


def _sums_of(result: Any) -> dict[str, Any]:
    # Lightning replaces the states of a logged value instead of writing into them, so no copy is needed.
    return {name: getattr(result, name) for name in result._defaults}


def _initial_sums(result: Any) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for name, default in result._defaults.items():
        sums[name] = default.detach().clone().to(getattr(result, name).device)
    return sums


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    return list(state)  # copied, because a metric appends to it
