"""Optimizer state in parts: cut where a whole one is loaded, brought together where one is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.placement import with_entries
from lightning_hybrid.strategy.shard_update.shard_exchange import ShardExchange
from lightning_hybrid.strategy.shard_update.shard_pairs import ParameterShard

ShardOf = Callable[[Tensor], ParameterShard | None]


def cut(entry: Mapping[str, Any], shard: ParameterShard | None) -> dict[str, Any]:
    """Return a parameter's state with this rank's part in place of each tensor that is as large as the parameter."""
    return {
        name: shard.part_of(value).clone()
        if shard and isinstance(value, Tensor) and value.shape == shard.whole.shape
        else value
        for name, value in entry.items()
    }


def collected_state_dict(
    state: Mapping[str, Any], optimizer: Optimizer, shard_of: ShardOf, exchange: ShardExchange
) -> dict[str, Any]:
    """Return a state dict of parts with whole tensors, on rank zero; elsewhere as it is. Collective."""
    found: list[tuple[ParameterShard, Tensor]] = []

    def note(parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        shard = shard_of(parameter)
        found.extend((shard, value) for value in entry.values() if shard and _is_part(value, shard))
        return entry

    with_entries(state, optimizer, note)
    wholes = exchange.collect([shard for shard, _ in found], [value for _, value in found])
    if wholes is None:
        return dict(state)
    waiting = iter(wholes)

    def whole(parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        shard = shard_of(parameter)
        return {name: next(waiting) if shard and _is_part(value, shard) else value for name, value in entry.items()}

    return with_entries(state, optimizer, whole)


def _is_part(value: Any, shard: ParameterShard) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.values.shape
