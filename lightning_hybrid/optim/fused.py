"""The fused steps: few passes over memory for all tensors of a kind, whatever the number of tensors."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_hybrid.optim.coefficients import lars_options
from lightning_hybrid.optim.native import build
from lightning_hybrid.optim.native.engine import NativeLars
from lightning_hybrid.optim.option_table import Options
from lightning_hybrid.optim.scaling import Scaling

# Types of device; a parameter on "meta" has yet to be moved to one.
FUSED_DEVICES = ("cpu", "cuda", "meta")

Lists = Sequence[Sequence[Tensor]]


class Engine(Protocol):
    """Norms and step of tensors of one kind: in `native.engine` on the CPU, in `kernel_engine` on CUDA."""

    def is_of(self, params: Sequence[Tensor], states: Lists, copies: Sequence[Tensor]) -> bool:
        """Whether it was made for these tensors."""

    def measure(self, grads: Sequence[Tensor], options: Options, scaling: Scaling, needed: Sequence[bool]) -> Tensor:
        """Take the norms; 1.0 if a gradient that is `needed` is inf or nan, else 0.0: float32, 0-dim, on the device."""

    def move(self, options: Options, scaling: Scaling) -> None:
        """The step, with the gradients and the norms of `measure`."""


@dataclass
class Kind:
    """Tensors that one kernel takes: alike in device, dtypes and the flags that their rule compiles in."""

    options: Options
    flags: tuple[bool, ...]
    places: list[int] = field(default_factory=list)  # among all parameters with a gradient
    params: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)  # of each tensor
    engine: Engine | None = None


class FusedStep:
    """What an optimizer keeps between fused steps: its tensors by kind, each kind with an engine. Abstract.

    `members`: group, parameter and gradient of all that is to be stepped. `states_of` gives a kind's optimizer state.
    """

    def flags(self, group: dict[str, Any]) -> tuple[bool, ...]:
        """What of a group is compiled into its kernels."""
        raise NotImplementedError

    def options(self) -> Options:
        """The table of options of a kind."""
        raise NotImplementedError

    def engine_of(self, kind: Kind, states: Lists, grad_dtype: torch.dtype) -> Engine:
        """The engine for a kind of tensors, by their device."""
        raise NotImplementedError

    def is_needed(self, group: dict[str, Any]) -> bool:
        """Whether the norm of a gradient of the group is needed, even if nobody looks for inf and nan."""
        raise NotImplementedError

    def before_move(self, kinds: Sequence[Kind], scaling: Scaling) -> Scaling:
        """The scaling to move with, once all norms are there."""
        return scaling

    def __init__(self) -> None:
        self._signature: list[Any] = []
        self._kinds: list[Kind] = []

    def step(
        self,
        members: Sequence[tuple[dict[str, Any], Tensor, Tensor]],
        copies: Mapping[Tensor, Tensor],
        states_of: Callable[[Kind], Lists],
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
            states = states_of(kind)
            if kind.engine is None or not kind.engine.is_of(kind.params, states, kind.copies):
                kind.engine = self.engine_of(kind, states, grads[0].dtype)
            device = kind.params[0].device
            kind.options.take(kind.groups, device)
            needed = [is_checked or self.is_needed(group) for group in kind.groups]
            verdicts.append(kind.engine.measure(grads, kind.options, scaling.to(device), needed))
        if is_checked and verdicts:
            first = verdicts[0].device
            found_inf = verdicts[0]
            if len(verdicts) > 1:
                found_inf = torch.stack([one.to(first, non_blocking=True) for one in verdicts]).amax()
            scaling = Scaling(inverse_scale=scaling.inverse_scale, found_inf=found_inf)
        moving = self.before_move(self._kinds, scaling)
        for kind in self._kinds:
            assert kind.engine is not None
            kind.engine.move(kind.options, moving.to(kind.params[0].device))
        return scaling

    def _sort(self, members: Sequence[tuple[dict[str, Any], Tensor, Tensor]], copies: Mapping[Tensor, Tensor]) -> None:
        """Sort the tensors by kind, unless they are those of the last step."""
        flags_of = {id(group): self.flags(group) for group in {id(group): group for group, _, _ in members}.values()}
        signature: list[Any] = []
        for group, param, grad in members:
            copy = copies.get(param) if copies else None
            flags = flags_of[id(group)]
            signature.append((id(param), id(copy), grad.dtype, param.dtype, param.device, flags, id(group)))
        if signature == self._signature:
            return
        kinds: dict[Any, Kind] = {}
        for place, ((group, param, _), about) in enumerate(zip(members, signature, strict=True)):
            copy = copies.get(param)
            key = (copy is None or copy.dtype, *about[2:6])
            kind = kinds.setdefault(key, Kind(options=self.options(), flags=about[5]))
            kind.places.append(place)
            kind.params.append(param)
            kind.groups.append(group)
            if copy is not None:
                kind.copies.append(copy)
        self._signature, self._kinds = signature, list(kinds.values())


class FusedLars(FusedStep):
    """The fused step of LARS; a kind's only state are momentum buffers, or none without momentum."""

    def flags(self, group: dict[str, Any]) -> tuple[bool, ...]:
        """Whether there is momentum, and whether the denominator is joint."""
        return group["momentum"] != 0, group["denominator"] == "joint"

    def options(self) -> Options:
        """Those of LARS."""
        return lars_options()

    def is_needed(self, group: dict[str, Any]) -> bool:
        """For the trust ratio."""
        return group["trust_ratio"]

    def engine_of(self, kind: Kind, states: Lists, grad_dtype: torch.dtype) -> Engine:
        """See the base."""
        tensors = (kind.params, states, kind.copies)
        if kind.params[0].device.type == "cpu":
            return NativeLars(*tensors, grad_dtype, is_joint=kind.flags[1])
        from lightning_hybrid.optim.kernel_engine import KernelLars  # needs triton

        return KernelLars(*tensors, grad_dtype, is_joint=kind.flags[1])


@functools.cache
def has_kernels(device_type: str) -> bool:
    """Whether fused steps are possible on this type of device; warns, once, of what is missing for them.

    On the CPU the first call builds the passes, unless the user's cache has them.

    >>> has_kernels("meta"), has_kernels("mps")
    (True, False)
    """
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        _warn("on CUDA needs triton, which cannot be imported here", "Install it with `pip install triton`")
        return False
    if device_type == "cpu":
        try:
            build.library()
        except build.CannotBuildError as error:
            cure = "Install one (`apt install g++`), or name it in the environment variable CXX"
            _warn(f"on a CPU needs a C++ compiler that can build its passes, and {error}", cure)
            return False
    return device_type in FUSED_DEVICES


def _warn(what: str, cure: str) -> None:
    warnings.warn(
        f"`fused` (=True) {what}: the lists are used instead, the same rule in more passes over memory. {cure}, or set "
        "fused=False.",
        RuntimeWarning,
        stacklevel=3,
    )
