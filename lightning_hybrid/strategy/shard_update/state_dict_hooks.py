"""State dicts of modules whose parameters are in parts: they hold fp32 values, and loading one reaches the masters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.precision.module_hooks import ModuleHook
from lightning_hybrid.strategy.shard_update.shard_pairs import MasterShard


class StateDictHooks:
    """Hooks on the modules that own parameters with a part of a master.

    Args:
        module: the whole model.
        shards: by `id` of the parameter.
    """

    def __init__(self, module: nn.Module, shards: Mapping[int, MasterShard]) -> None:
        self._shards = shards
        self._handles: list[Any] = []
        for child in module.modules():
            if any(id(parameter) in shards for parameter in child.parameters(recurse=False)):
                self._handles += [
                    child.register_state_dict_post_hook(ModuleHook(self._give_fp32)),
                    child.register_load_state_dict_pre_hook(ModuleHook(self._take_fp32)),
                ]

    def _give_fp32(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for name, parameter in module._parameters.items():
            shard = self._shards.get(id(parameter))
            # With `keep_vars=True` the parameter is itself there.
            if shard is not None and state.get(prefix + name, parameter) is not parameter:
                state[prefix + name] = shard.fp32_values()

    def _take_fp32(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module._parameters.items():
            shard = self._shards.get(id(parameter))
            value = state.get(prefix + name)
            if shard is not None and isinstance(value, Tensor) and value.shape == shard.whole.shape:
                shard.load_(value)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
