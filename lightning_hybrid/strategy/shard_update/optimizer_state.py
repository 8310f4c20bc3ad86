"""Optimizer state in parts: cut where a whole one is loaded, brought together where one is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.placement import with_entries
from lightning_hybrid.strategy.shard_update.shard_exchange import ShardExchange
from lightning_hybrid.strategy.shard_update.shard_pairs import MasterShard, WeightShard

PairOf = Callable[[Tensor], MasterShard | WeightShard | None]


def cut(entry: Mapping[str, Any], pair: MasterShard | WeightShard | None) -> dict[str, Any]:
    """Return a parameter's state with this rank's part in place of each tensor that is as large as the parameter."""
    return {
        name: pair.part_of(value).clone()
        if pair and isinstance(value, Tensor) and value.shape == pair.low.shape
        else value
        for name, value in entry.items()
    }


def collected_state_dict(
    state: Mapping[str, Any], optimizer: Optimizer, pair_of: PairOf, exchange: ShardExchange
) -> dict[str, Any]:
    """Return a state dict of parts with whole tensors, on rank zero; elsewhere as it is. Collective."""
    found: list[tuple[MasterShard | WeightShard, Tensor]] = []

    def note(parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        pair = pair_of(parameter)
        found.extend((pair, value) for value in entry.values() if pair and _is_part(value, pair))
        return entry

    with_entries(state, optimizer, note)
    wholes = exchange.collect([pair for pair, _ in found], [value for _, value in found])
    if wholes is None:
        return dict(state)
    waiting = iter(wholes)

    def whole(parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        pair = pair_of(parameter)
        return {name: next(waiting) if pair and _is_part(value, pair) else value for name, value in entry.items()}

    return with_entries(state, optimizer, whole)


def _is_part(value: Any, pair: MasterShard | WeightShard) -> bool:
    return isinstance(value, Tensor) and value.shape == pair.master.shape
