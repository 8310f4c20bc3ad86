"""The fused steps: few passes over memory for all tensors of a tensor group, whatever their number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_hybrid.optim.fused.availability import FUSED_DEVICES, has_kernels
from lightning_hybrid.optim.fused.block_sums import add_up
from lightning_hybrid.optim.fused.cpu.passes import NativeLamb, NativeLars
from lightning_hybrid.optim.fused.engine import Engine
from lightning_hybrid.optim.fused.option_table import (
    OptionTable,
    OptionTables,
    lamb_options,
    lars_options,
)
from lightning_hybrid.optim.gradients import GradScaling, dense_gradients
from lightning_hybrid.placement import Part


@dataclass
class TensorGroup:
    """Tensors that one launch takes: equal in device, dtypes and the flags that their rule compiles in."""

    options: OptionTable
    flags: tuple[bool, ...]
    grad_dtype: torch.dtype
    indices: list[int] = field(default_factory=list)  # among all parameters
    params: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)  # the parameter group of each tensor
    parts: list[Part | None] = field(default_factory=list)  # of each tensor, where ranks share them
    engine: Any = None


class FusedStep:
    """The state of a `LayerwiseOptimizer` between fused steps: its tensors by tensor group, each with an engine.

    Abstract.
    """

    devices: ClassVar[tuple[str, ...]] = FUSED_DEVICES  # types of those that have engines
    options: Callable[[], OptionTable]  # makes the table of options of a tensor group

    def flags(self, group: dict[str, Any]) -> tuple[bool, ...]:
        """Return the options of a parameter group that are compiled into its kernels: none of them."""
        return ()

    def engine_of(self, tensors: TensorGroup, optimizer: Any) -> Engine:
        """Make the engine of a tensor group, by its device, and the optimizer state that is missing."""
        raise NotImplementedError

    def is_needed(self, group: dict[str, Any]) -> bool:
        """Whether the rule needs the norms of gradients of the group, even if nothing looks for inf and nan."""
        raise NotImplementedError

    @classmethod
    def has_engines(cls, params: Iterable[Tensor]) -> bool:
        """Whether all parameters are where the rule has engines; warns once where they cannot be built."""
        return all(
            one in cls.devices and has_kernels(one)
            for one in {param.device.type for param in params}
        )

    def before_update(self, optimizer: Any, scaling: GradScaling) -> GradScaling:
        """Return the scaling of the update, once all norms are there."""
        return scaling

    def __init__(self) -> None:
        # Addresses and tables last until more than gradients and options change: a step is cheap on the host.
        self._signature: list[Any] = []
        self._owned: list[Any] = []
        self._tensor_groups: list[TensorGroup] = []
        self._tables: list[OptionTables] = []  # one per device

    def step(self, optimizer: Any, scaling: GradScaling, *, is_checked: bool) -> GradScaling | None:
        """Update the parameters; gradients are read, never written.

        With `is_checked` the step looks for inf and nan itself, before anything is written.

        Returns:
            The scaling with the `found_inf` of this step. None if a device has no kernels: then nothing was done.
        """
        # It looks at sums of squares, which inf and nan survive: so a scaled float32 gradient past 1e18 counts as inf.
        groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        grads = [param.grad for param in params]
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            for group in groups:
                list(dense_gradients(group))  # raises
        if not self._is_same(optimizer, params, grads) and not self._sort(optimizer, params, grads):
            return None
        # Before the norms: those of the joint denominator read the weight decay.
        for tables in self._tables:
            tables.take()
        # First all norms, then all updates: one inf in the last tensor must keep the first from being written. The
        # tensor groups of a device share one flag, so that the host reads nothing; those of devices are combined.
        flag_of = (
            {}
            if scaling.found_inf_out is None
            else {scaling.found_inf_out.device: scaling.found_inf_out}
        )
        flags = []
        for tensors in self._tensor_groups:
            device = tensors.params[0].device
            here = scaling.to(device)
            if is_checked:
                if device not in flag_of:
                    flag_of[device] = torch.zeros((), device=device)
                here = replace(here, found_inf_out=flag_of[device])
            needed = [is_checked or self.is_needed(group) for group in tensors.groups]
            own_grads = [grads[index] for index in tensors.indices]
            flags.append(tensors.engine.norms(own_grads, tensors.options, here, needed))
        found_inf = scaling.found_inf
        if is_checked and flags:
            distinct = list({id(flag): flag for flag in flags}.values())
            found_inf = distinct[0]
            if len(distinct) > 1:
                found_inf = torch.stack(
                    [flag.to(found_inf.device, non_blocking=True) for flag in distinct]
                ).amax()
            if optimizer.shard_sums is not None:
                found_inf = optimizer.shard_sums.largest(found_inf)
        if optimizer.parts and flags:
            found_inf = self.add_over_ranks(optimizer, found_inf)
        if found_inf is not scaling.found_inf:
            scaling = GradScaling(inverse_scale=scaling.inverse_scale, found_inf=found_inf)
        for_update = self.before_update(optimizer, scaling)
        for tensors in self._tensor_groups:
            tensors.engine.update(tensors.options, for_update.to(tensors.params[0].device))
        return scaling

    def add_over_ranks(self, optimizer: Any, found_inf: Tensor | None) -> Tensor | None:
        """Add the sums of parts over the ranks that hold them; return `found_inf` of all of them, None of None."""
        block_sums = [
            sums
            for tensors in self._tensor_groups
            if (sums := tensors.engine.block_sums) is not None
        ]
        flag = (
            torch.zeros((), device=self._tensor_groups[0].params[0].device)
            if found_inf is None
            else found_inf
        )
        found = add_up(block_sums, flag, optimizer.add_up_)
        return None if found_inf is None else found

    def _is_same(self, optimizer: Any, params: list[Tensor], grads: list[Any]) -> bool:
        # Engines hold addresses: a tensor that was replaced or moved must be noticed. `==` would compare elements.
        owned = [*params, *_state_tensors(optimizer)]
        if len(owned) != len(self._owned) or not all(map(operator.is_, owned, self._owned)):
            return False
        if self._signature != self._signature_of(optimizer, grads):
            return False
        return not any(tensors.engine.has_moved() for tensors in self._tensor_groups)

    def _signature_of(self, optimizer: Any, grads: list[Any]) -> list[Any]:
        """Return all that decides about tensor groups besides the tensors themselves."""
        groups = [
            (id(group), len(group["params"]), self.flags(group)) for group in optimizer.param_groups
        ]
        parts = optimizer.parts and [(id(param), part) for param, part in optimizer.parts.items()]
        grad_dtypes = [None if grad is None else grad.dtype for grad in grads]
        return [parts, *groups, *grad_dtypes]

    def _sort(self, optimizer: Any, params: list[Tensor], grads: list[Any]) -> bool:
        """Sort the parameters into tensor groups with engines; return False if a device has no engines."""
        if not self.has_engines(params):
            return False
        all_tensor_groups = self._tensor_groups_of(optimizer, grads)
        by_device: dict[torch.device, list[TensorGroup]] = {}
        for tensors in all_tensor_groups:
            # An engine makes the optimizer state that is missing.
            tensors.engine = self.engine_of(tensors, optimizer)
            if optimizer.shard_sums is not None:
                tensors.engine.share(partial(optimizer.shard_sums.add_up_, tensors.params))
            by_device.setdefault(tensors.params[0].device, []).append(tensors)

        self._tables = []
        for device, tensor_groups in by_device.items():
            options_and_groups = [(tensors.options, tensors.groups) for tensors in tensor_groups]
            self._tables.append(OptionTables(options_and_groups, device))
        self._tensor_groups = all_tensor_groups
        self._owned = [*params, *_state_tensors(optimizer)]
        self._signature = self._signature_of(optimizer, grads)
        return True

    def _tensor_groups_of(self, optimizer: Any, grads: list[Any]) -> list[TensorGroup]:
        """Return the tensor groups, without engines, of all parameters that have a gradient."""
        tensor_groups: dict[Any, TensorGroup] = {}
        params_and_groups = [
            (param, group) for group in optimizer.param_groups for param in group["params"]
        ]
        for index, (param, group) in enumerate(params_and_groups):
            grad = grads[index]
            if grad is None:
                continue
            flags = self.flags(group)
            # One launch needs these equal.
            key = (param.device, param.dtype, grad.dtype, flags)
            if key not in tensor_groups:
                tensor_groups[key] = TensorGroup(
                    options=self.options(), flags=flags, grad_dtype=grad.dtype
                )
            tensors = tensor_groups[key]
            tensors.indices.append(index)
            tensors.params.append(param)
            tensors.groups.append(group)
            if optimizer.parts is not None:
                tensors.parts.append(optimizer.parts.get(param))
        return list(tensor_groups.values())


def _state_tensors(optimizer: Any) -> list[Any]:
    return [value for entry in optimizer.state.values() for value in entry.values()]


class FusedLars(FusedStep):
    """The fused step of LARS; its only state is the momentum buffer, or none without momentum."""

    options = staticmethod(lars_options)

    def flags(self, group: dict[str, Any]) -> tuple[bool, ...]:
        """Return whether there is momentum, and whether the denominator is joint."""
        return group["momentum"] != 0, group["denominator"] == "joint"

    def is_needed(self, group: dict[str, Any]) -> bool:
        """Whether the group has a trust ratio."""
        return group["trust_ratio"]

    def engine_of(self, tensors: TensorGroup, optimizer: Any) -> Engine:
        """Make the engine; see `FusedStep`."""
        has_momentum, is_joint = tensors.flags
        moments = optimizer.state_lists(tensors.params, "momentum_buffer") if has_momentum else []
        if tensors.params[0].device.type == "cpu":
            return NativeLars(
                tensors.params, moments, tensors.grad_dtype, is_joint=is_joint, parts=tensors.parts
            )
        from lightning_hybrid.optim.fused.cuda.lars import KernelLars  # needs triton

        return KernelLars(
            tensors.params, moments, tensors.grad_dtype, is_joint=is_joint, parts=tensors.parts
        )


class FusedLamb(FusedStep):
    """The fused step of LAMB on the CPU; its state are both moments and the step counts."""

    devices = ("cpu", "meta")
    options = staticmethod(lamb_options)

    def is_needed(self, group: dict[str, Any]) -> bool:
        """Whether the norm of all gradients is bounded."""
        return group["max_grad_norm"] is not None

    def engine_of(self, tensors: TensorGroup, optimizer: Any) -> Engine:
        """Make the engine; see `FusedStep`."""
        for param in tensors.params:
            state = optimizer.state[param]
            # The lists may have left the count on a GPU.
            step = state.get("step", torch.zeros(()))
            state["step"] = step.to("cpu", torch.float32)
        *moments, steps = optimizer.state_lists(tensors.params, "exp_avg", "exp_avg_sq", "step")
        return NativeLamb(tensors.params, moments, steps, tensors.grad_dtype, parts=tensors.parts)

    def before_update(self, optimizer: Any, scaling: GradScaling) -> GradScaling:
        """Scale all gradients by min(1, max_grad_norm / norm), if there is a bound; take them into the moments."""
        for_moments = self._bounded(scaling)
        for tensors in self._tensor_groups:
            tensors.engine.moments(tensors.options, for_moments.to(torch.device("cpu")))
        # |u| is known from here on, of whole tensors after one more sum over ranks.
        if optimizer.parts and self._tensor_groups:
            self.add_over_ranks(optimizer, None)
        return for_moments

    def _bounded(self, scaling: GradScaling) -> GradScaling:
        bound = self._tensor_groups[0].groups[0]["max_grad_norm"] if self._tensor_groups else None
        if bound is None:
            return scaling
        norm = (
            torch.stack([tensors.engine.grad_squares() for tensors in self._tensor_groups])
            .sum()
            .sqrt()
        )
        inverse_scale = (
            torch.ones_like(norm)
            if scaling.inverse_scale is None
            else scaling.inverse_scale.to(norm)
        )
        # As a part of the inverse scale the bound costs no pass of its own.
        factor = (bound / (norm * inverse_scale)).clamp(max=1.0)
        return GradScaling(inverse_scale=inverse_scale * factor, found_inf=scaling.found_inf)
