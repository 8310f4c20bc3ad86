"""DTensor parameters (FSDP2, tensor parallelism): a step on this rank's shards, with norms of the whole tensors.

A step of LARS or LAMB is elementwise but for the norms. So each rank moves its own shards, as plain tensors, and only
sums of squares are added up over the ranks that hold the other shards: a few float64 per tensor, all tensors at once.

    placement on a dimension of the mesh      sums of squares
    Shard, _StridedShard                      added over that dimension's ranks: shards are disjoint
    Replicate                                 not added: every rank has the whole
    Partial                                   refused: the parameter itself is a sum yet to be made

All ranks of a mesh must step together. Afterwards ranks with equal shards hold the same bits.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.optim.gradients import param_name

_Group = tuple[dist.ProcessGroup, str]  # and the type of device that it adds up on


def is_dtensor(value: Any) -> bool:
    """Return whether `value` is a DTensor."""
    # Where there is a DTensor its module has been imported; to import it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_shard(tensor: Any) -> Tensor:
    """Return what this rank holds of a DTensor, there at last if it was still on its way; of others the very tensor."""
    if not is_dtensor(tensor):
        return tensor
    local = tensor._local_tensor  # `to_local` makes another object each time
    return local.wait() if hasattr(local, "wait") else local


def has_dtensors(groups: Iterable[dict[str, Any]]) -> bool:
    """Return whether a parameter of the groups is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    # By distinct types, as every step of every optimizer asks.
    types = set[type]().union(*(map(type, group["params"]) for group in groups))
    return any(issubclass(kind, module.DTensor) for kind in types)


def check_placements(group: dict[str, Any]) -> None:
    """Check that a group's parameters can move as shards.

    Raises:
        ValueError: A parameter is Partial on a dimension of its mesh, or sharded where the rule needs whole matrices.
    """
    for index, param in enumerate(group["params"]):
        if not is_dtensor(param):
            continue
        name = f"`{param_name(group, index)}.placements` (={param.placements})"
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(
                f"{name} must be Shard or Replicate: a Partial parameter is a sum that has yet to be made, and no rank "
                "can take its norm or move it. Make it a parameter after `redistribute(placements=[Replicate()])`."
            )
        is_sharded = any(not placement.is_replicate() for placement in param.placements)
        if is_sharded and group.get("direction") == "orthogonal":
            raise ValueError(
                f'{name} and `direction` (="orthogonal") exclude each other: singular values are of whole matrices, '
                'and a rank holds a shard. Set direction="momentum", or train on whole weights: '
                'strategy="hybrid_allreduce" or "ddp".'
            )


class ShardSums:
    """Sums over ranks of what each rank computes of its shards.

    Args:
        params: The parameters by their local tensors, both as in `local_shards`.
    """

    def __init__(self, params: dict[Tensor, Any]) -> None:
        self._groups: dict[Tensor, list[_Group]] = {}
        for local, param in params.items():
            if is_dtensor(param):
                mesh = param.device_mesh
                sharding = [
                    dim
                    for dim, placement in enumerate(param.placements)
                    if not placement.is_replicate()
                ]
                # The type of device too: the mesh of parameters that are offloaded to the host is the accelerator's.
                self._groups[local] = [(mesh.get_group(dim), mesh.device_type) for dim in sharding]
        self._columns: dict[Any, list[tuple[_Group, Tensor | None]]] = {}

    def add_up_(self, locals_: Sequence[Tensor], table: Tensor) -> None:
        """Add the columns of `table`, one for each local tensor, over the ranks that hold the tensor's other shards.

        Collective: one all-reduce for each process group that shards one of them. Columns of replicated tensors keep
        their bits. `table` is float64, (any, tensors), changed in place.
        """
        for (group, device_type), columns in self._columns_of(locals_, table.device):
            part = (
                (table if columns is None else table.index_select(1, columns))
                .to(device_type)
                .contiguous()
            )
            dist.all_reduce(part, group=group)
            if columns is not None:
                table.index_copy_(1, columns, part.to(table.device))
            elif part is not table:
                table.copy_(part)

    def norms(self, locals_: Sequence[Tensor], *norms: Tensor) -> list[Tensor]:
        """Return the norms of whole tensors, from one or several norms of each local tensor; see `add_up_`."""
        squares = torch.stack([one.double().square() for one in norms])
        self.add_up_(locals_, squares)
        return list(squares.sqrt().to(norms[0].dtype))

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest `value` (0-dim) of all ranks that hold shards of any tensor; collective, as `add_up_`."""
        for group, device_type in dict.fromkeys(
            pair for some in self._groups.values() for pair in some
        ):
            there = value.to(device_type, copy=True)
            dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
            value = there.to(value.device)
        return value

    def _columns_of(
        self, locals_: Sequence[Tensor], device: torch.device
    ) -> list[tuple[_Group, Tensor | None]]:
        # For each group the columns to add up, None for all. Kept: to send indices to a GPU makes the host wait.
        key = (tuple(map(id, locals_)), device)
        if key not in self._columns:
            found: dict[_Group, list[int]] = {}
            for column, local in enumerate(locals_):
                for group in self._groups.get(local, ()):
                    found.setdefault(group, []).append(column)
            self._columns[key] = [
                (
                    group,
                    None if len(columns) == len(locals_) else torch.tensor(columns, device=device),
                )
                for group, columns in found.items()
            ]
        return self._columns[key]


@contextmanager
def local_shards(optimizer: Any) -> Iterator[Any]:
    """Yield `optimizer` as it is on this rank: parameters, gradients and state are plain local tensors.

    What a step writes there is written to the DTensors, as they share memory; new state becomes state of `optimizer`.
    Lists take all tensors at once, unless `foreach` says otherwise: else there would be a collective for each.

    Raises:
        ValueError: See `check_placements`.
    """
    view = optimizer.__dict__.get("_local_view")
    if view is None:
        # Kept from step to step, since the fused step holds addresses. Never saved: torch saves groups and state only.
        view = optimizer._local_view = object.__new__(type(optimizer))
        view.__dict__.update(
            defaults=optimizer.defaults,
            param_groups=[],
            state=defaultdict(dict),
            wholes={},
            shard_sums=None,
        )
        view.state_lists = lambda params, *keys: _state_lists(optimizer, view, params, *keys)
    _refresh(optimizer, view)
    sharded = {local: param for local, param in view.wholes.items() if local is not param}
    versions = [local._version for local in sharded]
    try:
        for local, param in sharded.items():
            local.grad = _local_grad(param)
        yield view
    finally:
        for local in sharded:
            local.grad = None
        for local, param in view.wholes.items():
            # "step" of LAMB, which has no shards; all else is in memory of the state itself.
            if "step" in view.state[local]:
                optimizer.state[param]["step"] = view.state[local]["step"]
    # A DTensor does not see what is written to its shard: without this, backward would use a changed weight.
    written = [
        param
        for (local, param), old in zip(sharded.items(), versions, strict=True)
        if local._version != old
    ]
    torch.autograd.graph.increment_version(written)


def _refresh(optimizer: Any, view: Any) -> None:
    """Bring the groups, parameters and state of the view up to date; what has not changed stays as it is."""
    known = {id(param): local for local, param in view.wholes.items()}
    locals_ = [
        [_known_or_new(known, param) for param in group["params"]]
        for group in optimizer.param_groups
    ]
    wholes = {
        local: param
        for some, group in zip(locals_, optimizer.param_groups, strict=True)
        for local, param in zip(some, group["params"], strict=True)
    }
    if list(map(id, wholes)) != list(map(id, view.wholes)):
        for group in optimizer.param_groups:
            check_placements(group)
        view.wholes = wholes
        view.shard_sums = ShardSums(wholes)
        view.state = defaultdict(dict)
    del view.param_groups[len(locals_) :]
    view.param_groups += ({} for _ in range(len(locals_) - len(view.param_groups)))
    for mine, group, some in zip(view.param_groups, optimizer.param_groups, locals_, strict=True):
        foreach = True if group["foreach"] is None else group["foreach"]
        mine.update(group | {"params": some, "foreach": foreach, "fused": bool(group["fused"])})
    view.work_group = getattr(optimizer, "work_group", None)
    for local, param in wholes.items():
        view.state[local] = {
            key: local_shard(value) for key, value in optimizer.state.get(param, {}).items()
        }


def _known_or_new(known: dict[int, Tensor], param: Tensor) -> Tensor:
    if not is_dtensor(param):
        return param
    shard = local_shard(param)
    local = known.get(id(param))
    is_same = (
        local is not None and local.data_ptr() == shard.data_ptr() and local.dtype == shard.dtype
    )
    if (
        local is not None
        and is_same
        and local.shape == shard.shape
        and local.stride() == shard.stride()
    ):
        return local
    local = shard.detach()
    local.grad_dtype = None  # gradients may have another dtype than their parameter
    return local


def _state_lists(optimizer: Any, view: Any, params: list[Tensor], *keys: str) -> list[list[Tensor]]:
    for local in params:
        for key in keys:
            # What the rule has put there by itself, as the count of LAMB, is the same on all ranks.
            if key not in view.state[local]:
                ((state,),) = optimizer.state_lists([view.wholes[local]], key)
                view.state[local][key] = local_shard(state)
    return [[view.state[local][key] for local in params] for key in keys]


def _local_grad(param: Any) -> Tensor | None:
    grad: Any = param.grad
    if is_dtensor(grad) and grad.placements != param.placements:
        # Of a replicated parameter on sharded activations autograd leaves the sum over ranks to who reads the gradient.
        grad = grad.redistribute(placements=param.placements)
    return None if grad is None else local_shard(grad)
