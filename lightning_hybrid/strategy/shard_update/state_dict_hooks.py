"""State-dict hooks with which modules save and load full fp32 values of sharded master weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.precision.module_hooks import ModuleHook
from lightning_hybrid.strategy.shard_update.shard_pairs import MasterShard


class StateDictHooks:
    """State-dict hooks for modules whose parameters have sharded master weights.

    A state dict then holds fp32 values in place of the half-precision copies. Loading one updates this rank's shards.

    Args:
        module: The full model.
        shards: Shards of master weights, by `id` of the parameter.
    """

    def __init__(self, module: nn.Module, shards: Mapping[int, MasterShard]) -> None:
        self._shards = shards
        self._handles: list[Any] = []
        for child in module.modules():
            has_shards = any(self._shards_in(child))
            if has_shards:
                self._add_hooks(child)

    def _shards_in(self, module: nn.Module) -> Iterator[tuple[str, MasterShard]]:
        """Yield the name and the shard of each parameter that the module holds directly."""
        for name, parameter in module._parameters.items():
            shard = self._shards.get(id(parameter))
            if shard is not None:
                yield name, shard

    def _add_hooks(self, module: nn.Module) -> None:
        save_hook = ModuleHook(self._save_fp32)
        save_handle = module.register_state_dict_post_hook(save_hook)
        self._handles.append(save_handle)
        load_hook = ModuleHook(self._load_fp32)
        load_handle = module.register_load_state_dict_pre_hook(load_hook)
        self._handles.append(load_handle)

    def _save_fp32(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for name, shard in self._shards_in(module):
            key = prefix + name
            # With `keep_vars=True` the state dict holds the parameter itself.
            parameter = shard.parameter
            saved_value = state.get(key, parameter)
            if saved_value is not parameter:
                state[key] = shard.fp32_values()

    def _load_fp32(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, shard in self._shards_in(module):
            key = prefix + name
            value = state.get(key)
            if not isinstance(value, Tensor):
                continue
            # torch itself reports a tensor of another shape.
            if value.shape == shard.whole.shape:
                shard.load_(value)

    def remove(self) -> None:
        """Remove the state-dict hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
