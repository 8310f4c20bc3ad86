"""Fused steps of LARS and LAMB, which update groups of tensors in a few passes over memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_hybrid.optim.fused.availability import FUSED_DEVICES, has_kernels
from lightning_hybrid.optim.fused.block_sums import BlockSums, add_up
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
    """Group of tensors that are updated together, with equal device, dtypes and compiled options.

    Attributes:
        options: Option table of the tensors.
        flags: Options that are compiled into the kernels (see `FusedStep.flags`).
        grad_dtype: Dtype of all gradients.
        indices: Index of each tensor among all parameters of the optimizer.
        params: Tensors.
        groups: Parameter group of each tensor.
        parts: Shard of each tensor, if ranks share the update. Empty otherwise.
        engine: `Engine` that runs the step.
    """

    options: OptionTable
    flags: tuple[bool, ...]
    grad_dtype: torch.dtype
    indices: list[int] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    parts: list[Part | None] = field(default_factory=list)
    engine: Any = None

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.params[0].device


class FusedStep:
    """Base class of the fused steps of LARS and LAMB, with one engine for each tensor group.

    Attributes:
        devices: Device types for which the optimizer has engines.
        options: Function that creates the option table of a tensor group.
    """

    devices: ClassVar[tuple[str, ...]] = FUSED_DEVICES
    options: Callable[[], OptionTable]

    def __init__(self) -> None:
        # Engines and tables are kept until tensors or parameter groups change, so that a step takes little host time.
        self._signature: list[Any] = []
        self._owned: list[Any] = []
        self._tensor_groups: list[TensorGroup] = []
        self._tables: list[OptionTables] = []  # one per device

    def flags(self, group: dict[str, Any]) -> tuple[bool, ...]:
        """Return the options of a parameter group that are compiled into its kernels.

        The base class has no such options.
        """
        return ()

    def engine_of(self, tensors: TensorGroup, optimizer: Any) -> Engine:
        """Create the engine that runs the fused step of a tensor group, and initialize missing optimizer state."""
        raise NotImplementedError

    def is_needed(self, group: dict[str, Any]) -> bool:
        """Return whether the update rule needs the norms of the group's gradients.

        A check for inf and nan needs them in any case.
        """
        raise NotImplementedError

    @classmethod
    def has_engines(cls, params: Iterable[Tensor]) -> bool:
        """Return whether fused steps are available on the devices of all parameters.

        If an engine cannot be built, a warning is raised once.
        """
        for device_type in {param.device.type for param in params}:
            if device_type not in cls.devices or not has_kernels(device_type):
                return False
        return True

    def before_update(self, optimizer: Any, scaling: GradScaling) -> GradScaling:
        """Prepare the update once all norms are known, and return the gradient scaling to use."""
        return scaling

    def step(self, optimizer: Any, scaling: GradScaling, *, is_checked: bool) -> GradScaling | None:
        """Run one fused step on all parameters.

        Gradients are not changed.

        Args:
            optimizer: Optimizer to step.
            scaling: Loss scale of the gradients, and whether to skip the step.
            is_checked: Whether the step checks for inf and nan itself, before anything is written. It checks sums of
                squares, so a scaled float32 gradient above 1e18 counts as inf.

        Returns:
            The scaling with the `found_inf` of this step, or None if a device has no kernels and nothing was done.
        """
        params = _params_of(optimizer)
        grads = [param.grad for param in params]
        _refuse_sparse(optimizer, grads)
        is_current = self._is_current(optimizer, params, grads)
        if not is_current and not self._rebuild(optimizer, params, grads):
            return None
        # Refreshed before the norms, because the norms of the joint denominator use the weight decay.
        for tables in self._tables:
            tables.refresh()

        # All norms are computed before the first update, because an inf in any tensor skips the whole step.
        flags = self._compute_norms(grads, scaling, is_checked)
        if flags:
            scaling = self._combine_over_ranks(optimizer, scaling, flags, is_checked)

        update_scaling = self.before_update(optimizer, scaling)
        for tensors in self._tensor_groups:
            device_scaling = update_scaling.to(tensors.device)
            tensors.engine.write_update(tensors.options, device_scaling)
        return scaling

    def _compute_norms(
        self, grads: Sequence[Any], scaling: GradScaling, is_checked: bool
    ) -> list[Tensor]:
        """Compute the norms of all tensor groups, and return one flag per group that signals inf or nan."""
        # The tensor groups of a device share one flag, so that the host need not read it.
        flag_of_device: dict[torch.device, Tensor] = {}
        if scaling.found_inf_out is not None:
            flag_of_device[scaling.found_inf_out.device] = scaling.found_inf_out

        flags = []
        for tensors in self._tensor_groups:
            device = tensors.device
            device_scaling = scaling.to(device)
            if is_checked:
                if device not in flag_of_device:
                    flag_of_device[device] = torch.zeros((), device=device)
                device_scaling = replace(device_scaling, found_inf_out=flag_of_device[device])

            group_grads = [grads[index] for index in tensors.indices]
            needed = [is_checked or self.is_needed(group) for group in tensors.groups]
            flag = tensors.engine.compute_norms(
                group_grads, tensors.options, device_scaling, needed
            )
            flags.append(flag)
        return flags

    def _combine_over_ranks(
        self, optimizer: Any, scaling: GradScaling, flags: Sequence[Tensor], is_checked: bool
    ) -> GradScaling:
        """Combine the flags of all tensor groups, and the flags and block sums of all ranks that hold shards.

        Collective: every rank that holds shards must call it, in the same order.

        Returns:
            The scaling with the combined flag as `found_inf`.
        """
        found_inf = scaling.found_inf
        if is_checked:
            found_inf = _combine_flags(flags)
            if optimizer.shard_sums is not None:
                found_inf = optimizer.shard_sums.largest(found_inf)
        if optimizer.parts:
            found_inf = self.add_block_sums(optimizer, found_inf)

        if found_inf is scaling.found_inf:
            return scaling
        return GradScaling(inverse_scale=scaling.inverse_scale, found_inf=found_inf)

    def add_block_sums(self, optimizer: Any, found_inf: Tensor | None) -> Tensor | None:
        """All-reduce the sums of squares of parameter shards.

        Collective: every rank that holds shards must call it, in the same order.

        Returns:
            The maximum of `found_inf` over these ranks. None if `found_inf` is None.
        """
        block_sums: list[BlockSums] = []
        for tensors in self._tensor_groups:
            if tensors.engine.block_sums is not None:
                block_sums.append(tensors.engine.block_sums)

        if found_inf is None:
            first_device = self._tensor_groups[0].device
            no_flag = torch.zeros((), device=first_device)
            add_up(block_sums, no_flag, optimizer.add_up_)
            return None
        return add_up(block_sums, found_inf, optimizer.add_up_)

    def _is_current(self, optimizer: Any, params: list[Tensor], grads: list[Any]) -> bool:
        """Return whether the engines are still valid, that is, no tensor has been replaced or moved.

        Engines hold the addresses of tensors.
        """
        owned = [*params, *_state_values(optimizer)]
        if len(owned) != len(self._owned):
            return False
        # Tensors are compared by identity, because `==` would compare elements.
        if not all(map(operator.is_, owned, self._owned)):
            return False
        if self._signature != self._signature_of(optimizer, grads):
            return False
        return not any(tensors.engine.has_moved() for tensors in self._tensor_groups)

    def _signature_of(self, optimizer: Any, grads: list[Any]) -> list[Any]:
        """Return the settings that determine the tensor groups, apart from the tensors themselves."""
        signature: list[Any] = []
        if optimizer.parts:
            for param, part in optimizer.parts.items():
                signature.append((id(param), part))
        for group in optimizer.param_groups:
            num_params = len(group["params"])
            signature.append((id(group), num_params, self.flags(group)))
        for grad in grads:
            grad_dtype = None
            if grad is not None:
                grad_dtype = grad.dtype
            signature.append(grad_dtype)
        return signature

    def _rebuild(self, optimizer: Any, params: list[Tensor], grads: list[Any]) -> bool:
        """Rebuild the tensor groups and their engines, and return False if a device has no engines."""
        if not self.has_engines(params):
            return False
        tensor_groups = self._tensor_groups_of(optimizer, grads)
        for tensors in tensor_groups:
            # This also creates missing optimizer state.
            tensors.engine = self.engine_of(tensors, optimizer)
            if optimizer.shard_sums is not None:
                add_up_ = partial(optimizer.shard_sums.add_up_, tensors.params)
                tensors.engine.add_shards_with(add_up_)

        self._tables = _option_tables(tensor_groups)
        self._tensor_groups = tensor_groups
        self._owned = [*params, *_state_values(optimizer)]
        self._signature = self._signature_of(optimizer, grads)
        return True

    def _tensor_groups_of(self, optimizer: Any, grads: list[Any]) -> list[TensorGroup]:
        """Divide all parameters that have a gradient into tensor groups, without creating engines."""
        tensor_groups: dict[Any, TensorGroup] = {}
        first_index = 0
        for group in optimizer.param_groups:
            params = group["params"]
            flags = self.flags(group)
            for index, param in enumerate(params, start=first_index):
                grad = grads[index]
                if grad is None:
                    continue

                # These must be equal for all tensors of a launch.
                key = (param.device, param.dtype, grad.dtype, flags)
                if key not in tensor_groups:
                    tensor_groups[key] = TensorGroup(self.options(), flags, grad.dtype)
                tensors = tensor_groups[key]
                tensors.indices.append(index)
                tensors.params.append(param)
                tensors.groups.append(group)
                if optimizer.parts is not None:
                    tensors.parts.append(optimizer.parts.get(param))
            first_index += len(params)
        return list(tensor_groups.values())


def _params_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params.extend(group["params"])
    return params


def _state_values(optimizer: Any) -> list[Any]:
    """Return the state of all parameters, such as their moments."""
    values: list[Any] = []
    for state in optimizer.state.values():
        values.extend(state.values())
    return values


def _refuse_sparse(optimizer: Any, grads: Sequence[Any]) -> None:
    """Raise `ValueError` if a gradient is sparse."""
    layouts = {grad.layout for grad in grads if grad is not None}
    if not layouts - {torch.strided}:
        return
    for group in optimizer.param_groups:
        list(dense_gradients(group))  # This call raises the error, which names the parameter.


def _option_tables(tensor_groups: Sequence[TensorGroup]) -> list[OptionTables]:
    """Create the option tables of all tensor groups, one for each device."""
    options_of_devices: dict[torch.device, list[Any]] = {}
    for tensors in tensor_groups:
        options_of_device = options_of_devices.setdefault(tensors.device, [])
        options_of_device.append((tensors.options, tensors.groups))

    tables = []
    for device, options_and_groups in options_of_devices.items():
        tables.append(OptionTables(options_and_groups, device))
    return tables


def _combine_flags(flags: Sequence[Tensor]) -> Tensor:
    """Return the maximum of several flags, on the device of the first flag."""
    distinct_flags = list({id(flag): flag for flag in flags}.values())
    first_flag = distinct_flags[0]
    if len(distinct_flags) == 1:
        return first_flag
    moved_flags = [flag.to(first_flag.device, non_blocking=True) for flag in distinct_flags]
    return torch.stack(moved_flags).amax()


class FusedLars(FusedStep):
    """Fused step of LARS on the CPU and CUDA.

    Its only state is the momentum buffer, if there is momentum.
    """

    options = staticmethod(lars_options)

    def flags(self, group: dict[str, Any]) -> tuple[bool, ...]:
        """Return whether the group has momentum, and whether its denominator is "joint"."""
        return group["momentum"] != 0, group["denominator"] == "joint"

    def is_needed(self, group: dict[str, Any]) -> bool:
        """Return whether the parameter group uses trust ratios."""
        return group["trust_ratio"]

    def engine_of(self, tensors: TensorGroup, optimizer: Any) -> Engine:
        """Create the engine for the tensors' device, and initialize missing momentum buffers."""
        has_momentum, is_joint = tensors.flags
        moments: list[list[Tensor]] = []
        if has_momentum:
            moments = optimizer.state_lists(tensors.params, "momentum_buffer")
        if tensors.device.type == "cpu":
            return NativeLars(
                tensors.params, moments, tensors.grad_dtype, is_joint=is_joint, parts=tensors.parts
            )
        # Imported here, because it needs triton.
        from lightning_hybrid.optim.fused.cuda.lars import KernelLars

        return KernelLars(
            tensors.params, moments, tensors.grad_dtype, is_joint=is_joint, parts=tensors.parts
        )


class FusedLamb(FusedStep):
    """Fused step of LAMB on the CPU.

    Its state consists of both moments and the step counts.
    """

    devices = ("cpu", "meta")
    options = staticmethod(lamb_options)

    def is_needed(self, group: dict[str, Any]) -> bool:
        """Return whether the group clips gradients by `max_grad_norm`."""
        return group["max_grad_norm"] is not None

    def engine_of(self, tensors: TensorGroup, optimizer: Any) -> Engine:
        """Create the CPU engine, and initialize missing optimizer state."""
        for param in tensors.params:
            state = optimizer.state[param]
            # The step on lists may have left the count on a GPU.
            step_count = state.get("step", torch.zeros(()))
            state["step"] = step_count.to("cpu", torch.float32)
        *moments, steps = optimizer.state_lists(tensors.params, "exp_avg", "exp_avg_sq", "step")
        return NativeLamb(tensors.params, moments, steps, tensors.grad_dtype, parts=tensors.parts)

    def before_update(self, optimizer: Any, scaling: GradScaling) -> GradScaling:
        """Update both moments, and return the gradient scaling including the factor of `max_grad_norm`."""
        bounded_scaling = self._bound_gradients(scaling)
        for tensors in self._tensor_groups:
            cpu_scaling = bounded_scaling.to(torch.device("cpu"))
            tensors.engine.update_moments(tensors.options, cpu_scaling)
        # |u| is known now. If parameters are sharded, it needs another all-reduce.
        if optimizer.parts and self._tensor_groups:
            self.add_block_sums(optimizer, None)
        return bounded_scaling

    def _bound_gradients(self, scaling: GradScaling) -> GradScaling:
        """Return the scaling multiplied by the gradient-clipping factor of `max_grad_norm`.

        factor = min(1, max_grad_norm / |g|),   |g| = |scaled g| * inverse_scale
        """
        if not self._tensor_groups:
            return scaling
        first_group = self._tensor_groups[0].groups[0]
        max_grad_norm = first_group["max_grad_norm"]
        if max_grad_norm is None:
            return scaling

        squares = [tensors.engine.sum_grad_squares() for tensors in self._tensor_groups]
        scaled_norm = torch.stack(squares).sum().sqrt()
        inverse_scale = torch.ones_like(scaled_norm)
        if scaling.inverse_scale is not None:
            inverse_scale = scaling.inverse_scale.to(scaled_norm)

        # The clipping factor is multiplied into the inverse scale, so that it needs no additional pass.
        norm = scaled_norm * inverse_scale
        factor = (max_grad_norm / norm).clamp(max=1.0)
        return GradScaling(inverse_scale=inverse_scale * factor, found_inf=scaling.found_inf)
