"""Checkpoints and weights of the complete network, collected from all stages of a pipeline."""

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

EntryPath = tuple[Any, ...]
"""Keys and indices that lead to an entry of a checkpoint."""

_NOT_WHOLE = (
    "`state_dict()` and `torch.save` of a module cannot be used while a pipeline runs, because each rank has only its "
    "own stages. Call `trainer.save_checkpoint(path)` on every rank, which saves the full `state_dict`, or save after "
    "the run, when every rank has the full module."
)


@torch.no_grad()
def share_(
    tensors: Iterable[Tensor],
    *,
    owner: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Broadcast tensors in place from rank `owner` to all ranks of `group`.

    A `group` of None means WORLD.

    Collective: every rank of the group must call it with the same tensors, in the same order.
    """
    for tensor in tensors:
        # Tensors go through the device one at a time. The backend may support only its memory, and
        # the whole model may not fit there.
        on_device = tensor.detach().to(device).contiguous()
        dist.broadcast(on_device, src=owner, group=group)
        if on_device.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(on_device)


def local_entries(checkpoint: Mapping[str, Any]) -> dict[EntryPath, Any]:
    """Return the checkpoint entries that this rank holds, keyed by their path in the checkpoint.

    Paths lead to tensors of module states and to entries of optimizer states.
    """
    entries: dict[EntryPath, Any] = {}
    for key in _module_state_keys(checkpoint):
        for name, value in checkpoint[key].items():
            if not _is_elsewhere(value):
                entries[key, name] = value
    for index, state in enumerate(checkpoint.get("optimizer_states", ())):
        for parameter_index, value in _local_optimizer_state(state).items():
            entries["optimizer_states", index, parameter_index] = value
    return entries


def fill_(checkpoint: dict[str, Any], entries: Mapping[EntryPath, Any]) -> None:
    """Insert another rank's entries into this rank's checkpoint wherever an entry is missing.

    >>> checkpoint = {"state_dict": {"a": torch.zeros(1), "b": torch.empty(1, device="meta")}}
    >>> stage_state = {"a": torch.empty(1, device="meta"), "b": torch.ones(1)}
    >>> fill_(checkpoint, local_entries({"state_dict": stage_state}))
    >>> checkpoint["state_dict"]
    {'a': tensor([0.]), 'b': tensor([1.])}
    """
    for path, value in entries.items():
        if path[0] == "optimizer_states":
            key, optimizer_index, parameter_index = path
            optimizer_state = checkpoint[key][optimizer_index]
            optimizer_state["state"].setdefault(parameter_index, value)
        else:
            key, name = path
            if _is_elsewhere(checkpoint[key][name]):
                checkpoint[key][name] = value


def gather_checkpoint(
    checkpoint: dict[str, Any], ranks: PipelineRanks, *, group: dist.ProcessGroup | None = None
) -> None:
    """Add the checkpoint entries of all ranks of the first pipeline to rank 0's checkpoint.

    The checkpoints of other ranks stay unchanged, because only rank 0 writes a file.

    Collective: every rank of the first pipeline must call it, in the same order.

    Args:
        checkpoint: Lightning's checkpoint of this rank.
        ranks: Position of this rank.
        group: Process group of the pipeline over host memory. NCCL would need a second copy of a
            stage's state on the device. None: WORLD.
    """
    if ranks.data_rank > 0:  # other pipelines hold the same values
        return
    if ranks.position > 0:
        dist.send_object_list([local_entries(_on_host(checkpoint))], dst=0, group=group)
        return

    for rank in ranks.pipelines[0][1:]:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=rank, group=group)
        fill_(checkpoint, received[0])
    # The order of entries must not depend on which rank held them.
    for state in checkpoint.get("optimizer_states", ()):
        state["state"] = dict(sorted(_local_optimizer_state(state).items()))


def without_others(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with only the entries of this rank's parameters."""

    def keep_local(parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any] | None:
        return None if parameter.is_meta else entry

    return with_entries(state, optimizer, keep_local)


class StateDictGuard:
    """State-dict hook on the blocks of other stages, which raises an error unless `allowed` is active."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._num_allowed = 0
        self._handles = [module.register_state_dict_pre_hook(self) for module in modules]

    def __call__(self, *_: Any) -> None:
        """Raise `RuntimeError` unless the call is made within the `allowed` context."""
        if not self._num_allowed:
            raise RuntimeError(_NOT_WHOLE)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictGuard:
        return self  # a copy of the module holds the same stages as the module

    def __reduce__(self) -> Any:
        raise RuntimeError(_NOT_WHOLE)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Temporarily allow state dicts that contain only this rank's stages."""
        self._num_allowed += 1
        try:
            yield
        finally:
            self._num_allowed -= 1

    def remove(self) -> None:
        """Remove the hook from all blocks."""
        for handle in self._handles:
            handle.remove()


def _module_state_keys(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the checkpoint keys under which the module's state or an averaged copy of it is saved.

    Callbacks save averages of the module under their own keys.
    """
    if "state_dict" not in checkpoint:
        return []
    names = set(checkpoint["state_dict"])
    if not names:
        return ["state_dict"]

    keys = []
    for key, value in checkpoint.items():
        if isinstance(value, Mapping) and set(value) == names:
            keys.append(key)
    return keys or ["state_dict"]


def _local_optimizer_state(state: Mapping[str, Any]) -> dict[int, Any]:
    """Return the optimizer state entries that have no tensor on the meta device."""
    local_state = {}
    for parameter_index, entry in state["state"].items():
        values = entry.values() if isinstance(entry, Mapping) else ()
        if not any(_is_elsewhere(value) for value in values):
            local_state[parameter_index] = entry
    return local_state


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _on_host(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the module and optimizer states of a checkpoint to host memory."""

    def to_host(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.cpu()

    on_host = {}
    for key in {*_module_state_keys(checkpoint), "optimizer_states"}:
        if key in checkpoint:
            on_host[key] = tree_map_only(Tensor, to_host, checkpoint[key])
    return on_host
