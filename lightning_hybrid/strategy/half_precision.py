"""Half precision on fp32 masters: its plugin in the place of Lightning's, and optimizer state that loads as fp32."""

from __future__ import annotations

from typing import Any, TypeVar

from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.plugin import MasterWeightMixin

Masters = TypeVar("Masters", bound=MasterWeightMixin)


def with_masters(plugin: Any, kind: type[Masters], loss_scale: str | float | LossScale | None) -> Any:
    """Return a plugin of this `kind` in the place of Lightning's plain half precision, and any other as it is."""
    plain = ("pytorch.plugins.precision.HalfPrecision", "fabric.plugins.precision.HalfPrecision")
    if not any(isinstance(plugin, lightning_types(name)) for name in plain):
        return plugin
    return kind(plugin.precision, loss_scale=loss_scale if plugin.precision == "16-true" else None)
