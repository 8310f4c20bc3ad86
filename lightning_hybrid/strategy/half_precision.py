"""Half precision on fp32 masters: its plugin in the place of Lightning's, and optimizer state that loads as fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from lightning_hybrid.lightning_names import lightning_function, lightning_types
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.plugin import MasterWeightMixin

Masters = TypeVar("Masters", bound=MasterWeightMixin)


def with_masters(plugin: Any, kind: type[Masters], loss_scale: str | float | LossScale | None) -> Any:
    """Return a plugin of this `kind` in the place of Lightning's plain half precision, and any other as it is."""
    plain = ("pytorch.plugins.precision.HalfPrecision", "fabric.plugins.precision.HalfPrecision")
    if not any(isinstance(plugin, lightning_types(name)) for name in plain):
        return plugin
    return kind(plugin.precision, loss_scale=loss_scale if plugin.precision == "16-true" else None)


def load_on_masters(
    optimizers: Iterable[Optimizer],
    states: Iterable[dict[str, Any]],
    device: torch.device,
    swapped_in: Callable[[Optimizer], AbstractContextManager[Any]],
) -> None:
    """Load states while masters stand in `param_groups`: `load_state_dict` casts state to the parameters' dtype."""
    to_device = lightning_function("fabric.utilities.optimizer._optimizer_to_device")
    for optimizer, state in zip(optimizers, states, strict=True):
        with swapped_in(optimizer):
            optimizer.load_state_dict(state)
            to_device(optimizer, device)
