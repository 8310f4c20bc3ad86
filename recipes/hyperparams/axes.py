"""Axes of a hyper-parameter search, each of which is a configuration key with a range of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from optuna.distributions import FloatDistribution

MAX_VALUES = 1000
"""Maximum number of grid values of an axis (our choice). Every value is a training run."""

Point = dict[str, float]
"""Value of each searched key."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Search range of one configuration key, with evenly spaced values on a logarithmic or linear scale.

    Raises:
        ValueError: The range is empty or contains a single value, or a logarithmic range reaches zero.

    >>> Axis(key="optim.lr", low=0.01, high=100.0, num=5).values()
    [0.01, 0.1, 1.0, 10.0, 100.0]
    """

    key: str
    low: float
    high: float
    num: int
    scale: Literal["log", "linear"] = "log"

    def __post_init__(self) -> None:
        if self.scale not in ("log", "linear"):
            raise ValueError(
                f"`axes.{self.key}.scale` (={self.scale!r}) must be log or linear. Set "
                f"axes.{self.key}.scale=log, for example."
            )
        if not self.low < self.high:
            raise ValueError(
                f"`axes.{self.key}.low` (={self.low}) must be below `high` (={self.high}). To use a "
                f"single value instead, add it to the trials: trial=[...,{self.key}={self.low}]."
            )
        if not isinstance(self.num, int) or not 2 <= self.num <= MAX_VALUES:
            raise ValueError(
                f"`axes.{self.key}.num` (={self.num}) must be an integer from 2 to {MAX_VALUES}, "
                f"because each value is a training run. Set axes.{self.key}.num=4."
            )
        if self.scale == "log" and self.low <= 0:
            raise ValueError(
                f"`axes.{self.key}.low` (={self.low}) must be above zero on a logarithmic scale. "
                f"Increase it, or set axes.{self.key}.scale=linear."
            )

    @property
    def spacing(self) -> float:
        """Ratio between neighboring grid values on a logarithmic scale, or their difference on a linear scale."""
        if self.scale == "log":
            return float((self.high / self.low) ** (1 / (self.num - 1)))
        return (self.high - self.low) / (self.num - 1)

    def shifted(self, value: float, num_steps: float) -> float:
        """Return the value that is `num_steps` grid steps above `value`, rounded to six digits.

        >>> Axis(key="lr", low=0.01, high=100.0, num=3).shifted(1.0, -0.5)
        0.1
        """
        shifted = value + self.spacing * num_steps
        if self.scale == "log":
            shifted = value * self.spacing**num_steps
        return float(f"{shifted:.6g}")

    def values(self) -> list[float]:
        """Return all grid values from `low` to `high`."""
        return [self.shifted(self.low, index) for index in range(self.num)]

    def is_edge(self, value: float) -> bool:
        """Return whether a value is at an end of the range or outside of it."""
        return value <= self.low or value >= self.high

    def distribution(self) -> FloatDistribution:
        """Convert the range from `low` to `high` to an Optuna distribution."""
        return FloatDistribution(self.low, self.high, log=self.scale == "log")

    def widened(self) -> Axis:
        """Return a copy of the axis, extended by one grid value at each end."""
        low = self.shifted(self.low, -1)
        high = self.shifted(self.high, 1)
        return replace(self, low=low, high=high, num=self.num + 2)


def axes_from(config: Mapping[str, Any], *, parent: str = "") -> list[Axis]:
    """Create search axes from nested mappings of the configuration.

    A mapping with `low` or `high` is an axis.

    Raises:
        ValueError: There is no axis, or a value is not an axis.

    >>> axes_from({"optim": {"lr": {"low": 0.1, "high": 10.0, "num": 3}}})
    [Axis(key='optim.lr', low=0.1, high=10.0, num=3, scale='log')]
    """
    axes: list[Axis] = []
    for name, value in config.items():
        key = f"{parent}{name}"
        if not isinstance(value, Mapping):
            raise ValueError(
                f"`axes.{key}` (={value}) is not an axis. Set it to a mapping such as {{low: 0.1, high: 10.0, num: 3}}."
            )
        if "low" in value or "high" in value:
            axes.append(_axis(key, value))
        else:
            axes.extend(axes_from(value, parent=f"{key}."))
    if not axes and not parent:
        raise ValueError(
            "`axes` (={}) must contain at least one axis. Add one, such as "
            "+axes.optim.lr={low:0.1,high:10.0,num:3}."
        )
    return axes


def _axis(key: str, options: Mapping[str, Any]) -> Axis:
    missing = {"low", "high", "num"} - set(options)
    unknown = set(options) - {"low", "high", "num", "scale"}
    wrong = sorted(missing) + sorted(unknown)
    if wrong:
        raise ValueError(
            f"`axes.{key}` (={options}) must have the keys low, high and num, and may have the key "
            f"scale. Add or correct the key {wrong[0]}."
        )
    return Axis(key=key, **options)


def overrides_of(point: Mapping[str, float]) -> tuple[str, ...]:
    """Format hyper-parameter values as command-line overrides.

    >>> overrides_of({"optim.lr": 0.5, "optim.weight_decay": 1e-4})
    ('optim.lr=0.5', 'optim.weight_decay=0.0001')
    """
    return tuple(f"{key}={value:.6g}" for key, value in point.items())
