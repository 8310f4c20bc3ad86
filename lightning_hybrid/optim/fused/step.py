"""The fused steps: few passes over memory for all tensors of a kind, whatever the number of tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_hybrid.optim.fused.availability import has_kernels
from lightning_hybrid.optim.fused.cpu.passes import NativeLamb, NativeLars
from lightning_hybrid.optim.fused.option_table import OptionTable, OptionTables, lamb_options, lars_options
from lightning_hybrid.optim.grad_scaling import GradScaling
from lightning_hybrid.optim.layerwise import LayerwiseOptimizer, dense_gradients


class Engine(Protocol):
    """Norms and step of tensors of one kind: in `native.engine` on the CPU, in `kernel_engine` on CUDA."""

    def has_moved(self) -> bool:
        """Whether a tensor is no longer where it was when this was built."""

    def measure(
        self, grads: Sequence[Tensor], options: OptionTable, scaling: GradScaling, needed: Sequence[bool]
    ) -> Tensor:
        """Take the norms; 1.0 if a gradient that is `needed` is inf or nan, else 0.0: float32, 0-dim, on the device.

        That may be the `verdict` of `scaling`, and is meaningless without one.
        """

    def move(self, options: OptionTable, scaling: GradScaling) -> None:
        """The step, with the gradients and the norms of `measure`."""


@dataclass
class TensorGroup:
    """Tensors that one kernel takes: alike in device, dtypes and the flags that their rule compiles in."""

    options: OptionTable
    flags: tuple[bool, ...]
    places: list[int] = field(default_factory=list)  # among all parameters
    params: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)  # of each tensor
    engine: Any = None


class FusedStep:
    """What an optimizer keeps between fused steps: its tensors by kind, each kind with an engine. Abstract.

    As long as nothing changed but gradients and options, a step costs a few microseconds per tensor on the host.
    """

    def flags(self, group: dict[str, Any]) -> tuple[bool, ...]:
        """What of a group is compiled into its kernels."""
        raise NotImplementedError

    def options(self) -> OptionTable:
        """The table of options of a kind."""
        raise NotImplementedError

    def engine_of(self, kind: TensorGroup, optimizer: LayerwiseOptimizer, grad_dtype: torch.dtype) -> Engine:
        """The engine for a kind of tensors, by their device; makes the optimizer state that is missing."""
        raise NotImplementedError

    def is_needed(self, group: dict[str, Any]) -> bool:
        """Whether the norm of a gradient of the group is needed, even if nobody looks for inf and nan."""
        raise NotImplementedError

    def before_move(self, kinds: Sequence[TensorGroup], scaling: GradScaling) -> GradScaling:
        """The scaling to move with, once all norms are there."""
        return scaling

    def __init__(self) -> None:
        self._signature: list[Any] = []
        self._owned: list[Any] = []
        self._kinds: list[TensorGroup] = []
        self._tables: list[OptionTables] = []  # one per device

    def step(self, optimizer: LayerwiseOptimizer, scaling: GradScaling, *, is_checked: bool) -> GradScaling | None:
        """Move the parameters; gradients are read, never written. Returns the scaling with the verdict.

        None, and nothing was done: there are no kernels for a device. `is_checked`: find out here whether a gradient is
        inf or nan, before anything is written. The sums of squares tell: inf and nan survive them. So a gradient past
        1e18, scaled and in float32, counts as inf.
        """
        groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        grads = [param.grad for param in params]
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            for group in groups:
                list(dense_gradients(group))  # raises
        if not self._is_same(optimizer, params, grads) and not self._sort(optimizer, params, grads):
            return None
        for tables in self._tables:
            tables.take()
        given = {} if scaling.verdict is None else {scaling.verdict.device: scaling.verdict}
        verdicts = []
        for kind in self._kinds:
            device = kind.params[0].device
            here = scaling.to(device)
            if is_checked:
                if device not in given:
                    given[device] = torch.zeros((), device=device)
                here = replace(here, verdict=given[device])
            needed = [is_checked or self.is_needed(group) for group in kind.groups]
            some = [grads[place] for place in kind.places]
            verdicts.append(kind.engine.measure(some, kind.options, here, needed))
        if is_checked and verdicts:
            own = list({id(one): one for one in verdicts}.values())
            found_inf = own[0]
            if len(own) > 1:
                found_inf = torch.stack([one.to(own[0].device, non_blocking=True) for one in own]).amax()
            scaling = GradScaling(inverse_scale=scaling.inverse_scale, found_inf=found_inf)
        moving = self.before_move(self._kinds, scaling)
        for kind in self._kinds:
            kind.engine.move(kind.options, moving.to(kind.params[0].device))
        return scaling

    def _is_same(self, optimizer: LayerwiseOptimizer, params: list[Tensor], grads: list[Any]) -> bool:
        """Whether the tensors are those of the last step, where they were."""
        owned = [*params, *optimizer.copies.values(), *_state_tensors(optimizer)]
        if len(owned) != len(self._owned) or not all(map(operator.is_, owned, self._owned)):
            return False
        if self._signature != self._signature_of(optimizer, grads):
            return False
        return not any(kind.engine.has_moved() for kind in self._kinds)

    def _signature_of(self, optimizer: LayerwiseOptimizer, grads: list[Any]) -> list[Any]:
        """What, beside the tensors themselves, decides about kinds."""
        groups = [(id(group), len(group["params"]), self.flags(group)) for group in optimizer.param_groups]
        return [*groups, *(None if grad is None else grad.dtype for grad in grads)]

    def _sort(self, optimizer: LayerwiseOptimizer, params: list[Tensor], grads: list[Any]) -> bool:
        """Sort the tensors by kind and make the engines; False if there are none for a device."""
        if not all(has_kernels(device_type) for device_type in {param.device.type for param in params}):
            return False
        kinds: dict[Any, TensorGroup] = {}
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        for place, (group, param, grad) in enumerate(zip(groups, params, grads, strict=True)):
            if grad is None:
                continue
            copy, flags = optimizer.copies.get(param), self.flags(group)
            key = (copy is None or copy.dtype, grad.dtype, param.dtype, param.device, flags)
            if key not in kinds:
                kinds[key] = TensorGroup(options=self.options(), flags=flags)
            kind = kinds[key]
            kind.places.append(place)
            kind.params.append(param)
            kind.groups.append(group)
            if copy is not None:
                kind.copies.append(copy)
        for key, kind in kinds.items():
            kind.engine = self.engine_of(kind, optimizer, key[1])
        self._kinds = list(kinds.values())
        by_device: dict[torch.device, list[TensorGroup]] = {}
        for kind in self._kinds:
            by_device.setdefault(kind.params[0].device, []).append(kind)
        self._tables = [
            OptionTables([(kind.options, kind.groups) for kind in some], device) for device, some in by_device.items()
        ]
        self._owned = [*params, *optimizer.copies.values(), *_state_tensors(optimizer)]
        self._signature = self._signature_of(optimizer, grads)
        return True


def _state_tensors(optimizer: LayerwiseOptimizer) -> list[Any]:
    return [value for entry in optimizer.state.values() for value in entry.values()]


class FusedLars(FusedStep):
    """The fused step of LARS; a kind's only state are momentum buffers, or none without momentum."""

    def flags(self, group: dict[str, Any]) -> tuple[bool, ...]:
        """Whether there is momentum, and whether the denominator is joint."""
        return group["momentum"] != 0, group["denominator"] == "joint"

    def options(self) -> OptionTable:
        """Those of LARS."""
        return lars_options()

    def is_needed(self, group: dict[str, Any]) -> bool:
        """For the trust ratio."""
        return group["trust_ratio"]

    def engine_of(self, kind: TensorGroup, optimizer: LayerwiseOptimizer, grad_dtype: torch.dtype) -> Engine:
        """See the base."""
        states = optimizer.state_lists(kind.params, "momentum_buffer") if kind.flags[0] else []
        tensors = (kind.params, states, kind.copies)
        if kind.params[0].device.type == "cpu":
            return NativeLars(*tensors, grad_dtype, is_joint=kind.flags[1])
        from lightning_hybrid.optim.fused.cuda.lars import KernelLars  # needs triton

        return KernelLars(*tensors, grad_dtype, is_joint=kind.flags[1])


class FusedLamb(FusedStep):
    """The fused step of LAMB; a kind's state are both moments, and the counts of steps."""

    def flags(self, group: dict[str, Any]) -> tuple[bool, ...]:
        """None."""
        return ()

    def options(self) -> OptionTable:
        """Those of LAMB."""
        return lamb_options()

    def is_needed(self, group: dict[str, Any]) -> bool:
        """For the bound on the norm of all gradients."""
        return group["max_grad_norm"] is not None

    def engine_of(self, kind: TensorGroup, optimizer: LayerwiseOptimizer, grad_dtype: torch.dtype) -> Engine:
        """See the base."""
        device = kind.params[0].device
        for param in kind.params:
            state = optimizer.state[param]
            state["step"] = state.get("step", torch.zeros(())).to(device, torch.float32)
        states = optimizer.state_lists(kind.params, "exp_avg", "exp_avg_sq", "step")
        tensors = (kind.params, states, kind.copies)
        if device.type == "cpu":
            return NativeLamb(*tensors, grad_dtype)
        from lightning_hybrid.optim.fused.cuda.lamb import KernelLamb  # needs triton

        return KernelLamb(*tensors, grad_dtype)

    def before_move(self, kinds: Sequence[TensorGroup], scaling: GradScaling) -> GradScaling:
        """All gradients scaled by min(1, max_grad_norm / norm), if there is a bound: a part of the inverse scale."""
        bound = kinds[0].groups[0]["max_grad_norm"] if kinds else None
        if bound is None:
            return scaling
        squares = [kind.engine.grad_squares() for kind in kinds]
        norm = torch.stack([one.to(squares[0].device, non_blocking=True) for one in squares]).sum().sqrt()
        inverse_scale = torch.ones_like(norm) if scaling.inverse_scale is None else scaling.inverse_scale.to(norm)
        factor = (bound / (norm * inverse_scale)).clamp(max=1.0)
        return GradScaling(inverse_scale=inverse_scale * factor, found_inf=scaling.found_inf)
