"""Description of the first tensor that differs between model replicas."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.comm.health.diagnosis import grouped, name_ranks

PART = "elements"
"""Prefix of the names of tensor shards. If ranks share the update, only some ranks hold a shard."""

_MAX_GROUPS = 4
_MAX_HOSTS = 3


class ReplicaDriftError(RuntimeError):
    """Error raised when replicas of a model differ in weights, master weights or optimizer state."""


def first_difference(values_by_rank: Sequence[dict[str, int]], hosts: Sequence[str]) -> str:
    """Describe the first tensor that differs between ranks, and name the deviating ranks and hosts.

    Args:
        values_by_rank: One dictionary per rank, with the fingerprint of each tensor by name. At least one tensor must
            differ.
        hosts: Host name of every rank.
    """
    differing = names_that_differ(values_by_rank)
    all_names = {name for values in values_by_rank for name in values}
    name = differing[0]
    ranks_by_value = grouped(_values_and_ranks(values_by_rank, name))

    # The value that most ranks hold is considered correct. In a tie, it is the value of the lowest rank.
    groups = sorted(ranks_by_value.values(), key=lambda ranks: (-len(ranks), ranks))
    majority = groups[0]
    minorities = []
    for ranks in groups[1:]:
        minorities.append(f"{name_ranks(ranks)} ({_hosts_of(ranks, hosts)})")

    absent = ""
    if None in ranks_by_value:
        absent = ", which some ranks do not have,"
    return (
        f"{name}{absent} on {' and on '.join(minorities[:_MAX_GROUPS])} differs from its value on "
        f"{name_ranks(majority)} ({_hosts_of(majority, hosts)}). {len(differing)} of {len(all_names)} tensors differ, "
        f"and the last of them is {differing[-1]}"
    )


def names_that_differ(values_by_rank: Sequence[dict[str, int]]) -> list[str]:
    """Return the names of tensors that differ between ranks although they should be equal.

    A missing tensor counts as a difference. A missing shard does not, because other ranks hold it.

    >>> names_that_differ([{"`a`": 1, "elements 0 to 4 of `b`": 2}, {"`a`": 1, "elements 4 to 8 of `b`": 3}])
    []
    """
    # A dictionary keeps the order in which names appear.
    all_names = dict.fromkeys(name for values in values_by_rank for name in values)
    differing = []
    for name in all_names:
        distinct_values = {value for value, _ in _values_and_ranks(values_by_rank, name)}
        if len(distinct_values) > 1:
            differing.append(name)
    return differing


def _values_and_ranks(
    values_by_rank: Sequence[dict[str, int]], name: str
) -> list[tuple[int | None, int]]:
    """Return (value, rank) pairs for all ranks that should hold a tensor.

    The value is None if the rank lacks the tensor.
    """
    is_part = name.startswith(PART)
    pairs = []
    for rank, values in enumerate(values_by_rank):
        if name in values or not is_part:
            pairs.append((values.get(name), rank))
    return pairs


def _hosts_of(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    if len(names) == 1:
        return f"host {names[0]}"
    text = "hosts " + ", ".join(names[:_MAX_HOSTS])
    num_hidden = len(names) - _MAX_HOSTS
    if num_hidden > 0:
        text += f" and {num_hidden} more"
    return text
