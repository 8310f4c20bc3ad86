"""Optimizer steps on DTensor parameters (FSDP2, tensor parallelism), with norms of the full tensors.

Except for the norms, a step of LARS or LAMB is elementwise, so each rank updates its shards as plain
tensors. Only the sums of squares are all-reduced over the ranks that hold the other shards. They are a
few float64 numbers per tensor, and one all-reduce per process group covers all tensors.

    placement on a dimension of the mesh      sums of squares
    Shard, _StridedShard                      added over that dimension's ranks, because shards are disjoint
    Replicate                                 not added, because every rank has the full tensor
    Partial                                   error, because the parameter is a sum that is not computed yet

Collective: all ranks of a mesh must step together. Afterwards replicated shards are bitwise equal on all ranks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.optim.gradients import param_name


@dataclass(frozen=True)
class _MeshGroup:
    """Process group of one dimension of a device mesh.

    Attributes:
        process_group: Process group.
        device_type: Device type of the tensors that it all-reduces.
    """

    process_group: dist.ProcessGroup
    device_type: str


@dataclass(frozen=True)
class _ColumnSums:
    """Table columns that are all-reduced over the same process group.

    Attributes:
        group: Process group.
        indices: Indices of the columns, on the device of the table. None: all columns.
    """

    group: _MeshGroup
    indices: Tensor | None


def is_dtensor(value: Any) -> bool:
    """Return whether `value` is a DTensor."""
    # Importing the module here would take a second. If there is a DTensor, it has already been imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor unchanged.

    If a collective that computes the shard is pending, the function waits for it.
    """
    if not is_dtensor(tensor):
        return tensor
    local = tensor._local_tensor  # `to_local` would create another object in each call.
    if hasattr(local, "wait"):
        return local.wait()
    return local


def has_dtensors(groups: Iterable[dict[str, Any]]) -> bool:
    """Return whether a parameter of the groups is a DTensor, without importing `torch.distributed.tensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    # Each distinct type is checked once to save time, because every step of every optimizer calls this function.
    param_types: set[type] = set()
    for group in groups:
        param_types.update(map(type, group["params"]))
    return any(issubclass(param_type, module.DTensor) for param_type in param_types)


def check_placements(group: dict[str, Any]) -> None:
    """Raise `ValueError` if the shards of a DTensor parameter cannot be updated separately.

    Raises:
        ValueError: A parameter is Partial on a dimension of its mesh, or sharded although the rule needs full matrices.
    """
    for index, param in enumerate(group["params"]):
        if not is_dtensor(param):
            continue
        name = f"`{param_name(group, index)}.placements` (={param.placements})"
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(
                f"{name} must contain only Shard and Replicate, because a Partial parameter is a pending sum over "
                "ranks, so no rank can compute its norm or update it. Call `redistribute(placements=[Replicate()])` "
                "before you create the parameter."
            )
        is_sharded = any(not placement.is_replicate() for placement in param.placements)
        is_orthogonal = group.get("direction") == "orthogonal"
        if is_sharded and is_orthogonal:
            raise ValueError(
                f'{name} and `direction` (="orthogonal") cannot be combined, because orthogonalization needs the full '
                'matrix, but each rank has only a shard. Set direction="momentum", or use strategy="hybrid_allreduce" '
                'or "ddp", which do not shard weights.'
            )


class ShardSums:
    """Reducer that combines values that each rank has computed from its own DTensor shards.

    Args:
        params: Parameter of each local tensor, as in `local_shards`.
    """

    def __init__(self, params: dict[Tensor, Any]) -> None:
        # Process groups over which each local tensor is sharded, and all of them without duplicates.
        self._groups_of: dict[Tensor, list[_MeshGroup]] = {}
        self._distinct_groups: list[_MeshGroup] = []
        # All-reduces for each list of local tensors. They are cached, because the host would wait each time it sends
        # indices to a GPU.
        self._sums_of_lists: dict[Any, list[_ColumnSums]] = {}

        for local, param in params.items():
            if not is_dtensor(param):
                continue
            groups = _sharding_groups(param)
            self._groups_of[local] = groups
            for group in groups:
                if group not in self._distinct_groups:
                    self._distinct_groups.append(group)

    def add_up_(self, locals_: Sequence[Tensor], table: Tensor) -> None:
        """All-reduce each tensor's column of `table` over the ranks that hold shards of the tensor.

        Each local tensor has one column. There is one all-reduce for each process group that shards
        one of the tensors. Columns of replicated tensors are not changed.

        Collective: every rank of these groups must call it, in the same order.

        Args:
            locals_: Local tensors.
            table: float64 tensor of shape (any, tensors), changed in place.
        """
        for column_sums in self._column_sums(locals_, table.device):
            group = column_sums.group
            indices = column_sums.indices
            columns = table
            if indices is not None:
                columns = table.index_select(1, indices)

            sums = columns.to(group.device_type).contiguous()
            dist.all_reduce(sums, group=group.process_group)

            if indices is not None:
                table.index_copy_(1, indices, sums.to(table.device))
            elif sums is not table:
                table.copy_(sums)

    def norms(self, locals_: Sequence[Tensor], *norms: Tensor) -> list[Tensor]:
        """Compute the norms of full tensors from the norms of their local shards.

        Collective: every rank of the groups must call it, in the same order.

        Args:
            locals_: Local tensors.
            *norms: Tensors with one norm for each local tensor. Each one is combined separately.
        """
        squares = torch.stack([local_norms.double().square() for local_norms in norms])
        self.add_up_(locals_, squares)
        combined = squares.sqrt()
        return list(combined.to(norms[0].dtype))

    def largest(self, value: Tensor) -> Tensor:
        """Return the maximum of a 0-dim tensor over all ranks that hold shards of any parameter.

        Collective: every rank of the groups must call it, in the same order.
        """
        for group in self._distinct_groups:
            maximum = value.to(group.device_type, copy=True)
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group.process_group)
            value = maximum.to(value.device)
        return value

    def _column_sums(self, locals_: Sequence[Tensor], device: torch.device) -> list[_ColumnSums]:
        """Return the all-reduces needed for a table on `device` that has one column for each local tensor."""
        ids = tuple(map(id, locals_))
        key = (ids, device)
        if key not in self._sums_of_lists:
            self._sums_of_lists[key] = self._new_column_sums(locals_, device)
        return self._sums_of_lists[key]

    def _new_column_sums(
        self, locals_: Sequence[Tensor], device: torch.device
    ) -> list[_ColumnSums]:
        columns_of_groups: dict[_MeshGroup, list[int]] = {}
        for column, local in enumerate(locals_):
            for group in self._groups_of.get(local, ()):
                columns_of_groups.setdefault(group, []).append(column)

        column_sums = []
        for group, columns in columns_of_groups.items():
            indices = None
            if len(columns) != len(locals_):
                indices = torch.tensor(columns, device=device)
            column_sums.append(_ColumnSums(group, indices))
        return column_sums


def _sharding_groups(param: Any) -> list[_MeshGroup]:
    """Return the process groups over which a DTensor is sharded."""
    # If parameters are offloaded to the host, their mesh still has the device type of the accelerator.
    mesh = param.device_mesh
    groups = []
    for dim, placement in enumerate(param.placements):
        if not placement.is_replicate():
            groups.append(_MeshGroup(mesh.get_group(dim), mesh.device_type))
    return groups


@contextmanager
def local_shards(optimizer: Any) -> Iterator[Any]:
    """Yield a view of an optimizer in which all DTensors are replaced with this rank's shards.

    The local tensors share memory with the DTensors, so a step on the view updates the DTensors. New
    state becomes state of `optimizer`. By default `foreach` is True, because one tensor at a time would
    need a collective for each tensor.

    Raises:
        ValueError: A parameter cannot be updated as a shard (see `check_placements`).
    """
    view = optimizer.__dict__.get("_local_view")
    if view is None:
        view = _new_view(optimizer)
        optimizer._local_view = view
    _refresh(optimizer, view)
    sharded = {local: param for local, param in view.wholes.items() if local is not param}
    versions_before = {local: local._version for local in sharded}

    try:
        for local, param in sharded.items():
            local.grad = _local_grad(param)
        yield view
    finally:
        for local in sharded:
            local.grad = None
        for local, param in view.wholes.items():
            # The state "step" of LAMB has no shards. All other state shares memory with the optimizer's state.
            local_state = view.state[local]
            if "step" in local_state:
                optimizer.state[param]["step"] = local_state["step"]

    # A DTensor does not notice writes to its shard. Without this, backward would silently use the changed weight.
    written = []
    for local, param in sharded.items():
        if local._version != versions_before[local]:
            written.append(param)
    torch.autograd.graph.increment_version(written)


def _new_view(optimizer: Any) -> Any:
    """Create an empty instance of the optimizer's class that updates the local shards of DTensors.

    The constructor is not called. This view is kept between steps, because the fused step holds addresses. It is never
    saved, because torch saves only groups and state.
    """
    view = object.__new__(type(optimizer))
    view.__dict__.update(
        defaults=optimizer.defaults,
        param_groups=[],
        state=defaultdict(dict),
        wholes={},
        shard_sums=None,
    )
    view.state_lists = partial(_state_lists, optimizer, view)
    return view


def _refresh(optimizer: Any, view: Any) -> None:
    """Update the view's parameter groups, local tensors and state from the optimizer.

    Unchanged local tensors stay the same objects.
    """
    previous_locals = {id(param): local for local, param in view.wholes.items()}
    locals_of_groups: list[list[Tensor]] = []
    wholes: dict[Tensor, Any] = {}
    for group in optimizer.param_groups:
        locals_of_group = []
        for param in group["params"]:
            local = _current_local(previous_locals.get(id(param)), param)
            locals_of_group.append(local)
            wholes[local] = param
        locals_of_groups.append(locals_of_group)

    if list(map(id, wholes)) != list(map(id, view.wholes)):
        for group in optimizer.param_groups:
            check_placements(group)
        view.wholes = wholes
        view.shard_sums = ShardSums(wholes)
        view.state = defaultdict(dict)

    _refresh_groups(view.param_groups, optimizer.param_groups, locals_of_groups)
    view.work_group = getattr(optimizer, "work_group", None)
    for local, param in wholes.items():
        state = optimizer.state.get(param, {})
        view.state[local] = {key: local_shard(value) for key, value in state.items()}


def _refresh_groups(
    view_groups: list[dict[str, Any]],
    groups: list[dict[str, Any]],
    locals_of_groups: list[list[Tensor]],
) -> None:
    """Copy the options of all parameter groups to the groups of the view, and set their local tensors."""
    # The dicts of the view's groups stay the same objects, because the fused step identifies groups by their `id`.
    del view_groups[len(groups) :]
    while len(view_groups) < len(groups):
        view_groups.append({})

    for view_group, group, locals_ in zip(view_groups, groups, locals_of_groups, strict=True):
        view_group.update(group)
        view_group["params"] = locals_
        view_group["fused"] = bool(group["fused"])
        if group["foreach"] is None:
            view_group["foreach"] = True


def _current_local(local: Tensor | None, param: Tensor) -> Tensor:
    """Return a parameter's local shard, reusing the tensor `local` if it still refers to the same memory."""
    if not is_dtensor(param):
        return param
    shard = local_shard(param)
    if local is not None:
        is_same_memory = local.data_ptr() == shard.data_ptr()
        is_same_dtype = local.dtype == shard.dtype
        is_same_view = local.shape == shard.shape and local.stride() == shard.stride()
        if is_same_memory and is_same_dtype and is_same_view:
            return local
    local = shard.detach()
    local.grad_dtype = None  # None allows a gradient of another dtype than the parameter's.
    return local


def _state_lists(optimizer: Any, view: Any, params: list[Tensor], *keys: str) -> list[list[Tensor]]:
    """Return the optimizer state of local tensors, in the format of `LayerwiseOptimizer.state_lists`."""
    for local in params:
        local_state = view.state[local]
        param = view.wholes[local]
        for key in keys:
            # State that the rule has added to the view, such as the step count of LAMB, has no shards.
            if key not in local_state:
                (states,) = optimizer.state_lists([param], key)
                local_state[key] = local_shard(states[0])

    lists = []
    for key in keys:
        lists.append([view.state[local][key] for local in params])
    return lists


def _local_grad(param: Any) -> Tensor | None:
    """Return this rank's shard of the gradient, redistributed to the placements of the parameter."""
    grad: Any = param.grad
    if grad is None:
        return None
    if is_dtensor(grad) and grad.placements != param.placements:
        # The gradient of a replicated parameter with sharded activations is Partial, because autograd does not
        # all-reduce it.
        grad = grad.redistribute(placements=param.placements)
    return local_shard(grad)
