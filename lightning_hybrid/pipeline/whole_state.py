"""One checkpoint and one module, of what the stages hold in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_hybrid.pipeline.rank_layout import PipelineRanks
from lightning_hybrid.placement import with_entries

_NOT_WHOLE = (
    "`state_dict()`, or `torch.save` of a module, has this rank's stages alone while a pipeline runs. Call "
    "`trainer.save_checkpoint(path)` on every rank, whose `state_dict` entry is whole; or save after the run, when the "
    "module is whole on every rank."
)


@torch.no_grad()
def share_(
    tensors: Iterable[Tensor],
    *,
    owner: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give every rank of `group` (None: WORLD) the values of rank `owner`, in place.

    Collective: every rank of the group, with the same tensors in the same order.
    """
    for tensor in tensors:
        # By way of the device, one at a time: its backend may know no others, and a whole model may not fit there.
        on_device = tensor.detach().to(device).contiguous()
        dist.broadcast(on_device, src=owner, group=group)
        if on_device.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(on_device)


def parts_of(checkpoint: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """Return what a rank contributes to a checkpoint: `{path: value}` of module states and optimizer states."""
    parts: dict[tuple[Any, ...], Any] = {}
    for key in _module_states(checkpoint):
        parts |= {
            (key, name): value
            for name, value in checkpoint[key].items()
            if not _is_elsewhere(value)
        }
    for index, state in enumerate(checkpoint.get("optimizer_states", ())):
        for number, value in _own_state(state).items():
            parts["optimizer_states", index, number] = value
    return parts


def fill_(checkpoint: dict[str, Any], parts: Mapping[tuple[Any, ...], Any]) -> None:
    """Put another stage's parts where this rank has nothing.

    >>> checkpoint = {"state_dict": {"a": torch.zeros(1), "b": torch.empty(1, device="meta")}}
    >>> fill_(checkpoint, parts_of({"state_dict": {"a": torch.empty(1, device="meta"), "b": torch.ones(1)}}))
    >>> checkpoint["state_dict"]
    {'a': tensor([0.]), 'b': tensor([1.])}
    """
    for path, value in parts.items():
        if path[0] == "optimizer_states":
            checkpoint[path[0]][path[1]]["state"].setdefault(path[2], value)
        elif _is_elsewhere(checkpoint[path[0]][path[1]]):
            checkpoint[path[0]][path[1]] = value


def gather_checkpoint(
    checkpoint: dict[str, Any], ranks: PipelineRanks, *, group: dist.ProcessGroup | None = None
) -> None:
    """Fill the checkpoint of rank 0 with the parts of its pipeline. Collective: every rank of that pipeline.

    The others' tensors stay: only rank 0 writes a file. `group`: of the pipeline, over host memory, as NCCL would need
    a stage's whole state once more on the device; None: WORLD.
    """
    if ranks.data_rank > 0:  # another pipeline: it holds the same values
        return
    if ranks.position > 0:
        dist.send_object_list([parts_of(_on_host(checkpoint))], dst=0, group=group)
        return
    for rank in ranks.pipelines[0][1:]:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=rank, group=group)
        fill_(checkpoint, received[0])
    for state in checkpoint.get("optimizer_states", ()):  # a file does not tell which rank had what
        state["state"] = dict(sorted(_own_state(state).items()))


def without_others(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state for the parameters that are here."""
    return with_entries(
        state, optimizer, lambda parameter, entry: None if parameter.is_meta else entry
    )


class StateDictGuard:
    """A hook before state dicts of blocks of other stages, which refuses them outside of `allowed`."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._num_allowed = 0
        self._handles = [module.register_state_dict_pre_hook(self) for module in modules]

    def __call__(self, *_: Any) -> None:
        """Refuse, but inside of `allowed`."""
        if not self._num_allowed:
            raise RuntimeError(_NOT_WHOLE)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictGuard:
        return self  # a copy of the module has no more than the module

    def __reduce__(self) -> Any:
        raise RuntimeError(_NOT_WHOLE)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let state dicts hold what this rank has."""
        self._num_allowed += 1
        try:
            yield
        finally:
            self._num_allowed -= 1

    def remove(self) -> None:
        """Refuse no more."""
        for handle in self._handles:
            handle.remove()


def _module_states(checkpoint: Mapping[str, Any]) -> list[str]:
    # The module's, and those of averages of it, which callbacks save under keys of their own.
    names = set(checkpoint.get("state_dict", ()))
    found = [
        key
        for key, value in checkpoint.items()
        if isinstance(value, Mapping) and names and set(value) == names
    ]
    return found or [key for key in ("state_dict",) if key in checkpoint]


def _own_state(state: Mapping[str, Any]) -> dict[int, Any]:
    return {
        number: value
        for number, value in state["state"].items()
        if not any(
            _is_elsewhere(each) for each in (value.values() if isinstance(value, Mapping) else ())
        )
    }


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _on_host(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    keys = {*_module_states(checkpoint), "optimizer_states"} & set(checkpoint)
    return {
        key: tree_map_only(Tensor, lambda one: one if one.is_meta else one.cpu(), checkpoint[key])
        for key in keys
    }
