"""States of loaders with the entries of all ranks, as a checkpoint holds them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def states_of_all_ranks(
    states: list[dict[str, Any]], rank: int, *, is_alone: bool
) -> list[dict[str, Any] | None]:
    """Return these states with `own` of all ranks, None for a loader that keeps its state by itself.

    Collective, unless `is_alone`: every rank must call it, with as many states.
    """
    own = (rank, [state.get("own") for state in states])
    gathered: list[Any] = [own]
    if not is_alone and dist.is_initialized() and dist.get_world_size() > 1:
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)

    states_to_save: list[dict[str, Any] | None] = []
    for index, state in enumerate(states):
        if "own" not in state:
            states_to_save.append(None)
            continue
        of_ranks = {other_rank: own_states[index] for other_rank, own_states in gathered}
        states_to_save.append({**state, "own": None, "of_ranks": of_ranks})
    return states_to_save
