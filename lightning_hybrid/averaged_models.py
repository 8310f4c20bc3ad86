"""Lookup of the averaged models of Lightning's EMA, SWA and similar callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_hybrid.lightning_names import lightning_types


def averaged_models_of(callbacks: Iterable[object], *names: str) -> list[Any]:
    """Return the averaged models of Lightning's weight-averaging callbacks.

    The models may be wrapped in `AveragedModel`. `unwrapped_averages_of` returns them without the wrapper.

    Args:
        callbacks: Callbacks of the trainer.
        *names: Class names of Lightning callbacks to search in addition to `WeightAveraging`.
    """
    types: list[Any] = []
    for name in ("WeightAveraging", *names):
        types.extend(lightning_types(f"pytorch.callbacks.{name}"))
    averages = []
    for callback in callbacks:
        average = getattr(callback, "_average_model", None)
        if isinstance(callback, tuple(types)) and average is not None:
            averages.append(average)
    return averages


def unwrapped_averages_of(callbacks: Iterable[object]) -> list[nn.Module]:
    """Return the averaged models of EMA, SWA and similar callbacks, unwrapped from `AveragedModel`."""
    modules = []
    for average in averaged_models_of(callbacks, "StochasticWeightAveraging"):
        if isinstance(average, AveragedModel):
            modules.append(average.module)
        else:
            modules.append(average)
    return modules
