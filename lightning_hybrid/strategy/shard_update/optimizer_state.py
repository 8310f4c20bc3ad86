"""Optimizer state in parts: cut where a whole one is loaded, brought together where one is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.precision.master_weights import MasterPair
from lightning_hybrid.strategy.shard_update.shard_exchange import ShardExchange
from lightning_hybrid.strategy.shard_update.shard_pairs import MasterShard, WeightShard

PairOf = Callable[[Tensor], MasterPair | None]


def _pairs_by_index(
    groups: list[dict[str, Any]], optimizer: Optimizer, pair_of: PairOf
) -> dict[Any, MasterShard | WeightShard]:
    # By the index that a state dict, whose `groups` these are, has for the parameter.
    indices = [index for group in groups for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    pairs = {index: pair_of(parameter) for index, parameter in zip(indices, parameters, strict=False)}
    return {index: pair for index, pair in pairs.items() if isinstance(pair, MasterShard | WeightShard)}


def cut(entry: Mapping[str, Any], pair: MasterShard | WeightShard) -> dict[str, Any]:
    """Return a parameter's state with this rank's part in place of each tensor that is as large as the parameter."""
    return {
        name: pair.part_of(value).clone() if isinstance(value, Tensor) and value.shape == pair.low.shape else value
        for name, value in entry.items()
    }


def cut_state_dict(state: Mapping[str, Any], optimizer: Optimizer, pair_of: PairOf) -> dict[str, Any]:
    """Return a whole state dict with this rank's parts of the parameters that have some."""
    pairs = _pairs_by_index(state["param_groups"], optimizer, pair_of)
    entries = {index: cut(entry, pairs[index]) if index in pairs else entry for index, entry in state["state"].items()}
    return {**state, "state": entries}


def collected_state_dict(
    state: Mapping[str, Any], optimizer: Optimizer, pair_of: PairOf, exchange: ShardExchange
) -> dict[str, Any]:
    """Return a state dict of parts with whole tensors, on rank zero; elsewhere as it is. Collective."""
    pairs = _pairs_by_index(state["param_groups"], optimizer, pair_of)
    found = [
        (index, name, value)
        for index, entry in state["state"].items()
        for name, value in entry.items()
        if index in pairs and isinstance(value, Tensor) and value.shape == pairs[index].master.shape
    ]
    wholes = exchange.collect([pairs[index] for index, _, _ in found], [value for _, _, value in found])
    if wholes is None:
        return dict(state)
    entries = {index: dict(entry) for index, entry in state["state"].items()}
    for (index, name, _), whole in zip(found, wholes, strict=True):
        entries[index][name] = whole
    return {**state, "state": entries}
