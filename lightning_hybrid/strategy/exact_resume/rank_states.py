"""Gathering of data-loader states from all ranks for a checkpoint."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def states_of_all_ranks(
    states: list[dict[str, Any]], rank: int, *, is_alone: bool
) -> list[dict[str, Any] | None]:
    """Gather the rank-specific entries of data-loader states from all ranks for a checkpoint.

    The result has None for each loader that saves its own state through Lightning.

    Collective, unless `is_alone`: every rank must call it, with the same number of states.

    Args:
        states: The states of this rank's loaders. `own` is the entry of this rank alone.
        rank: The index of this rank among the ranks that read different data.
        is_alone: Whether other ranks do not call this function.
    """
    rank_entries = (rank, [state.get("own") for state in states])
    gathered: list[Any] = [rank_entries]
    if not is_alone and dist.is_initialized() and dist.get_world_size() > 1:
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rank_entries)

    states_to_save: list[dict[str, Any] | None] = []
    for index, state in enumerate(states):
        if "own" not in state:
            states_to_save.append(None)
            continue
        of_ranks = {gathered_rank: entries[index] for gathered_rank, entries in gathered}
        states_to_save.append({**state, "own": None, "of_ranks": of_ranks})
    return states_to_save
