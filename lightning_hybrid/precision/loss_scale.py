"""Loss scales, which keep small fp16 gradients above the underflow threshold.

    scaled_loss = scale * loss        =>  every gradient is `scale` times too large, and is divided in fp32

The scale is always a power of two, so scaling and unscaling are exact in fp16 and fp32 if nothing overflows
(Micikevicius et al. 2017, arXiv:1710.03740). The state is kept in 0-dim device tensors, so that the host never waits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.checks import plain_value, require_number, require_whole

NUM_LOOKS = 24
"""Number of first steps in which the largest gradient is measured: the number of halvings from 2^24 to 1."""


class LossScale(ABC):
    """Base class of loss scales. A loss scale is a power of two that may change after each step.

    Args:
        scale: Initial scale.
    """

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(float(scale), dtype=torch.float32)

    @property
    def value(self) -> float:
        """Current scale as a Python float, for logging.

        Reading it waits for the device.
        """
        return float(self.scale)

    def to(self, device: torch.device) -> None:
        """Move the state of the loss scale to a device."""
        self.scale = self.scale.to(device)

    @property
    def wants_largest(self) -> bool:
        """True if the next call of `update` needs the magnitude of the largest gradient."""
        return False

    @abstractmethod
    def update(self, found_inf: Tensor, largest: Tensor | None = None) -> None:
        """Update the scale after one training step, depending on whether gradients overflowed.

        Args:
            found_inf: Whether any gradient of the step was inf or nan, a 0-dim bool tensor on the scale's device.
            largest: Largest magnitude of an unscaled gradient, a 0-dim fp32 tensor on that device. None: unknown.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers, so that a checkpoint loads with `weights_only=True`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


class StaticLossScale(LossScale):
    """Constant loss scale.

    Steps whose gradients overflow are skipped.

    Args:
        loss_scale: A power of two.

    Raises:
        ValueError: The scale is not a power of two.

    >>> StaticLossScale(1024.0).value
    1024.0
    """

    def __init__(self, loss_scale: float) -> None:
        loss_scale = plain_value(loss_scale)
        _check_power_of_two("loss_scale", loss_scale)
        super().__init__(loss_scale)

    def update(self, found_inf: Tensor, largest: Tensor | None = None) -> None:
        """Do nothing, because the scale is fixed."""

    def state_dict(self) -> dict[str, float]:
        """Return a dictionary with the constant scale."""
        return {"scale": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the checkpoint's scale, because the configured scale takes precedence."""


class DynamicLossScale(LossScale):
    """Dynamic loss scale that halves after an overflow and doubles after `growth_interval` steps without overflow.

        overflow:                        clean <- 0;  left <- max(left - 1, 0)
            if then left = 0:            scale <- max(scale * backoff_factor, min_scale)
        `growth_interval` clean steps:   scale <- min(scale * growth_factor, max_scale);  clean, left <- 0, hysteresis

    This is the rule of `torch.amp.GradScaler`, with the same defaults and additional bounds. `hysteresis` is the rule
    of Megatron and DeepSpeed: between two growths, the first `hysteresis - 1` overflows do not change the scale.

    An initial scale that is far too high would cost a step for each halving. Therefore, if the first steps overflow and
    the largest gradient g is known, the scale falls to `min_scale`. After a clean step it jumps to a scale at which g
    does not overflow:

        scale <- min(2^12 / g rounded down to a power of two, init_scale * backoff_factor)       2^12 = fp16's 2^16 / 16

    Args:
        init_scale: Initial scale, a power of two.
        growth_factor: Factor by which the scale grows, a power of two of at least 1.
        backoff_factor: Factor by which the scale falls, a power of two below 1.
        growth_interval: Number of clean steps before the scale grows.
        min_scale: Lower bound of the scale, a power of two.
        max_scale: Upper bound of the scale, a power of two.
        hysteresis: Number of overflows since the last growth after which the scale falls. 1: every overflow lowers the
            scale.

    Raises:
        ValueError: A value is not a power of two or is out of its range, or `init_scale` is not between the bounds.

    >>> scale = DynamicLossScale(init_scale=8.0, growth_interval=2)
    >>> scale.update(torch.tensor(True)); scale.value
    4.0
    >>> for _ in range(2): scale.update(torch.tensor(False))
    >>> scale.value
    8.0
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        init_scale = plain_value(init_scale)
        growth_factor = plain_value(growth_factor)
        backoff_factor = plain_value(backoff_factor)
        growth_interval = plain_value(growth_interval)
        min_scale = plain_value(min_scale)
        max_scale = plain_value(max_scale)
        hysteresis = plain_value(hysteresis)
        _check_power_of_two("init_scale", init_scale)
        _check_power_of_two("min_scale", min_scale)
        _check_power_of_two("max_scale", max_scale)
        _check_power_of_two("growth_factor", growth_factor)
        _check_power_of_two("backoff_factor", backoff_factor)
        super().__init__(init_scale)
        _check_rule(growth_factor, backoff_factor, growth_interval, hysteresis)
        if not min_scale <= init_scale <= max_scale:
            raise ValueError(
                f"`init_scale` (={init_scale}) must be between `min_scale` (={min_scale}) and `max_scale` "
                f"(={max_scale}). Change `init_scale` or the bounds."
            )
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.hysteresis = hysteresis
        self.num_clean_steps = torch.tensor(0, dtype=torch.int32)
        self.hysteresis_left = torch.tensor(hysteresis, dtype=torch.int32)
        self._num_looks = NUM_LOOKS
        self._highest_at_start = init_scale * backoff_factor
        self._is_starting = torch.tensor(True)
        self._has_fallen = torch.tensor(False)

    @property
    def wants_largest(self) -> bool:
        """True during the first steps, when the scale may jump to fit the largest gradient."""
        return self._num_looks > 0

    def to(self, device: torch.device) -> None:
        """Move the state of the loss scale to a device."""
        super().to(device)
        for name in ("num_clean_steps", "hysteresis_left", "_is_starting", "_has_fallen"):
            setattr(self, name, getattr(self, name).to(device))

    def update(self, found_inf: Tensor, largest: Tensor | None = None) -> None:
        """Lower the scale after an overflow, or raise it after enough steps without overflow.

        The update runs on the device.
        """
        scale = self.scale.clone()  # Gradients that wait for a step still contain the old scale.
        if self.hysteresis == 1:
            # torch's kernel applies this rule in one launch.
            torch._amp_update_scale_(
                scale,
                self.num_clean_steps,
                found_inf.float(),
                self.growth_factor,
                self.backoff_factor,
                self.growth_interval,
            )
        else:
            # This is the same rule with a count of tolerated overflows, without a branch on the host, which does not
            # know `found_inf`. (apex tolerates all overflows that are not in a row, so its scale may stay too high
            # forever.)
            self.num_clean_steps.add_(1).masked_fill_(found_inf, 0)
            grows = self.num_clean_steps >= self.growth_interval
            self.hysteresis_left.sub_(found_inf.int()).clamp_(min=0)
            falls = found_inf & (self.hysteresis_left == 0)
            factor = torch.ones_like(scale)
            factor.masked_fill_(falls, self.backoff_factor)
            factor.masked_fill_(grows, self.growth_factor)
            scale.mul_(factor)
            self.num_clean_steps.masked_fill_(grows, 0)
            self.hysteresis_left.masked_fill_(grows, self.hysteresis)
        if largest is not None:
            scale = self._adjust_at_start(scale, found_inf, largest)
        # Without bounds the scale could reach inf in a long run, or 0 after many overflows, and would stay there.
        self.scale = scale.clamp_(self.min_scale, self.max_scale)

    def _adjust_at_start(self, scale: Tensor, found_inf: Tensor, largest: Tensor) -> Tensor:
        """Return the scale after one of the first training steps, adjusted to the largest gradient.

        The class docstring describes the rule.
        """
        falls = found_inf & self._is_starting
        leaps = self._has_fallen & ~found_inf
        # 2^(12 - exponent) is assembled from the bits of a float, because other functions may not be exact.
        exponent = (127 + 12 - torch.frexp(largest).exponent).clamp(1, 254)
        fits = (
            (exponent.to(torch.int32) << 23).view(torch.float32).clamp(max=self._highest_at_start)
        )
        self._is_starting = self._is_starting & found_inf
        self._has_fallen = falls
        # On a CPU the host can check without waiting whether the first steps are over.
        if scale.device.type == "cpu" and not self._is_starting:
            self._num_looks = 0
        else:
            self._num_looks -= 1
        return torch.where(leaps, fits, scale.masked_fill(falls, self.min_scale))

    def state_dict(self) -> dict[str, float]:
        """Return the scale, the number of steps without overflow and the remaining hysteresis as plain numbers.

        The state also records whether the run is still in its first steps.
        """
        state: dict[str, float] = {
            "scale": self.value,
            "num_clean_steps": int(self.num_clean_steps),
            "hysteresis_left": int(self.hysteresis_left),
        }
        if self._has_fallen:
            state["has_fallen"] = 1
        elif self._is_starting:
            state["is_starting"] = 1
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, with the scale clamped to this object's bounds."""
        scale = min(max(float(state["scale"]), self.min_scale), self.max_scale)
        _check_power_of_two("scale", scale)
        self.scale = torch.full_like(self.scale, scale)
        # The count is at most one below the interval, so that the next clean step lets the scale grow.
        num_clean_steps = min(int(state.get("num_clean_steps", 0)), self.growth_interval - 1)
        self.num_clean_steps = torch.full_like(self.num_clean_steps, num_clean_steps)
        hysteresis_left = min(int(state.get("hysteresis_left", self.hysteresis)), self.hysteresis)
        self.hysteresis_left = torch.full_like(self.hysteresis_left, hysteresis_left)
        has_fallen = bool(state.get("has_fallen", 0))
        # The flag is True in states from before the first step, such as the first host's state in an elastic run.
        is_starting = has_fallen or bool(state.get("is_starting", 0))
        self._num_looks = 0
        if is_starting:
            self._num_looks = NUM_LOOKS
        self._is_starting = torch.full_like(self._is_starting, is_starting)
        self._has_fallen = torch.full_like(self._has_fallen, has_fallen)


def _check_rule(
    growth_factor: float, backoff_factor: float, growth_interval: int, hysteresis: int
) -> None:
    """Raise `ValueError` if a growth, backoff, interval or hysteresis value is out of range."""
    reason = "clean steps must not lower the scale. Use 2, for example"
    require_number("growth_factor", growth_factor, reason, low=1)
    reason = (
        "an overflow must lower the scale, or every later step overflows too. Use 0.5, for example"
    )
    require_number("backoff_factor", backoff_factor, reason, high=1, above=True)
    reason = "the scale grows after this number of clean steps. Use 2000, for example"
    require_whole("growth_interval", growth_interval, reason, unit="steps")
    reason = "the scale falls after this number of overflows. Use 1 to lower it at each overflow"
    require_whole("hysteresis", hysteresis, reason, unit="overflows")


def loss_scale_from(setting: str | float | LossScale) -> LossScale:
    """Convert a user's setting to a `LossScale` object.

    Args:
        setting: `"dynamic"`, a power of two for a fixed scale, or a `LossScale`.

    Raises:
        ValueError: `setting` has another value.

    >>> type(loss_scale_from("dynamic")).__name__, loss_scale_from(128).value, loss_scale_from("1024").value
    ('DynamicLossScale', 128.0, 1024.0)
    """
    if isinstance(setting, LossScale):
        return setting
    setting = plain_value(setting)
    if setting == "dynamic":
        return DynamicLossScale()
    if isinstance(setting, bool) or not isinstance(setting, (int, float)):
        raise ValueError(
            f'`loss_scale` (={setting!r}) must be "dynamic", a power of two such as 1024, or a LossScale object. Leave '
            'it out for "dynamic".'
        )
    return StaticLossScale(float(setting))


def unscale_(gradients: list[Tensor], scale: Tensor) -> Tensor:
    """Divide gradients by the loss scale in place, and check them for inf and nan in the same pass.

    Args:
        gradients: Gradients, at least one, all on one device, in fp32 or wider.
        scale: Loss scale, a power of two, as a 0-dim fp32 tensor on that device.

    Returns:
        A 0-dim fp32 tensor, which is 1.0 if an element was inf or nan, else 0.0.
    """
    found_inf = torch.zeros((), device=scale.device)
    inverse_scale = scale.reciprocal()
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    # This is the kernel of `GradScaler`. It needs lists of one dtype, and does not support complex numbers.
    for same_dtype in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inverse_scale)
    return found_inf


def _check_power_of_two(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(
            f"`{name}` (={value!r}) must be a positive power of two, such as 0.5 or 1024."
        )
    lower = 2.0 ** math.floor(math.log2(value))
    if value != lower:
        raise ValueError(
            f"`{name}` (={value}) must be a power of two, because scaling by other values is not exact in fp16. Use "
            f"{lower:g} or {2 * lower:g}."
        )
