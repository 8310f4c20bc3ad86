"""The fused step of LARS: few passes over memory for all tensors of a kind, whatever the number of tensors."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_hybrid.optim.coefficients import Options
from lightning_hybrid.optim.rows import RowEngine
from lightning_hybrid.optim.scaling import Scaling

# Types of device; a parameter on "meta" has yet to be moved to one.
FUSED_DEVICES = ("cpu", "cuda", "meta")


class Engine(Protocol):
    """Norms and step of tensors of one kind: `RowEngine` on the CPU, `kernel_engine.KernelEngine` on CUDA."""

    def is_of(self, params: Sequence[Tensor], buffers: Sequence[Tensor], copies: Sequence[Tensor]) -> bool:
        """Whether it was made for these tensors."""

    def measure(self, grads: Sequence[Tensor], options: Options, scaling: Scaling, needed: Sequence[bool]) -> Tensor:
        """Take the norms; 1.0 if a gradient that is `needed` is inf or nan, else 0.0: float32, 0-dim, on the device."""

    def move(self, options: Options, scaling: Scaling) -> None:
        """The step, with the gradients and the norms of `measure`."""


@dataclass
class Kind:
    """Tensors that one kernel takes: alike in device, dtypes and all that is compiled in."""

    is_joint: bool
    has_momentum: bool
    places: list[int] = field(default_factory=list)  # among all parameters with a gradient
    params: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)  # of each tensor
    engine: Engine | None = None

    def __post_init__(self) -> None:
        self.options = Options()


class FusedLars:
    """What an optimizer keeps between fused steps: its tensors by kind, each kind with an engine.

    `members`: group, parameter and gradient of all that is to be stepped. `buffer_of` gives a parameter's momentum.
    """

    def __init__(self) -> None:
        self._signature: list[Any] = []
        self._kinds: list[Kind] = []

    def step(
        self,
        members: Sequence[tuple[dict[str, Any], Tensor, Tensor]],
        copies: Mapping[Tensor, Tensor],
        buffer_of: Callable[[Tensor], Tensor],
        scaling: Scaling,
        *,
        is_checked: bool,
    ) -> Scaling:
        """Move the parameters; gradients are read, never written. Returns the scaling with the verdict.

        `is_checked`: find out here whether a gradient is inf or nan, before anything is written. The sums of squares
        tell: inf and nan survive them. So a gradient past 1e18, scaled and in float32, counts as inf.
        """
        self._sort(members, copies)
        verdicts = []
        for kind in self._kinds:
            grads = [members[place][2] for place in kind.places]
            buffers = [buffer_of(param) for param in kind.params] if kind.has_momentum else []
            if kind.engine is None or not kind.engine.is_of(kind.params, buffers, kind.copies):
                kind.engine = engine_of(kind, buffers, grads[0].dtype)
            device = kind.params[0].device
            kind.options.take(kind.groups, device)
            needed = [is_checked or group["trust_ratio"] for group in kind.groups]
            verdicts.append(kind.engine.measure(grads, kind.options, scaling.to(device), needed))
        if is_checked and verdicts:
            first = verdicts[0].device
            found_inf = verdicts[0]
            if len(verdicts) > 1:
                found_inf = torch.stack([one.to(first, non_blocking=True) for one in verdicts]).amax()
            scaling = Scaling(inverse_scale=scaling.inverse_scale, found_inf=found_inf)
        for kind in self._kinds:
            assert kind.engine is not None
            kind.engine.move(kind.options, scaling.to(kind.params[0].device))
        return scaling

    def _sort(self, members: Sequence[tuple[dict[str, Any], Tensor, Tensor]], copies: Mapping[Tensor, Tensor]) -> None:
        """Sort the tensors by kind, unless they are those of the last step."""
        signature: list[Any] = []
        for group, param, grad in members:
            copy = copies.get(param) if copies else None
            flags = (group["momentum"] != 0, group["denominator"] == "joint")
            signature.append((id(param), id(copy), grad.dtype, param.dtype, param.device, *flags, id(group)))
        if signature == self._signature:
            return
        kinds: dict[Any, Kind] = {}
        for place, ((group, param, _), about) in enumerate(zip(members, signature, strict=True)):
            copy = copies.get(param)
            has_momentum, is_joint = about[5:7]
            key = (copy is None or copy.dtype, *about[2:7])
            made = Kind(is_joint=is_joint, has_momentum=has_momentum)
            kind = kinds.setdefault(key, made)
            kind.places.append(place)
            kind.params.append(param)
            kind.groups.append(group)
            if copy is not None:
                kind.copies.append(copy)
        self._signature, self._kinds = signature, list(kinds.values())


def engine_of(kind: Kind, buffers: Sequence[Tensor], grad_dtype: torch.dtype) -> Engine:
    """The engine for a kind of tensors, by their device."""
    tensors = (kind.params, buffers, kind.copies)
    if kind.params[0].device.type == "cpu":
        return RowEngine(*tensors, grad_dtype, is_joint=kind.is_joint)
    from lightning_hybrid.optim.kernel_engine import KernelEngine  # needs triton

    return KernelEngine(*tensors, grad_dtype, is_joint=kind.is_joint)


@functools.cache
def has_kernels(device_type: str) -> bool:
    """Whether fused steps are possible on this type of device; warns, once, of a missing triton.

    >>> has_kernels("cpu"), has_kernels("mps")
    (True, False)
    """
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        warnings.warn(
            "`fused` (=True) on CUDA needs triton, which cannot be imported here: the lists are used instead, the same "
            "rule in more passes over memory. Install it with `pip install triton`, or set fused=False.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return device_type in FUSED_DEVICES
