"""Which tensor differs between ranks that should hold the same, and on whom."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.comm.health.diagnosis import grouped, name_ranks

PART = "elements"
"""How names of tensors begin that some ranks alone have, where the ranks of a node share the update."""


class ReplicaDriftError(RuntimeError):
    """Different weights, masters or optimizer state on ranks of one model."""


def first_difference(values_of: Sequence[dict[str, int]], hosts: Sequence[str]) -> str:
    """Describe the first name whose values are not the same on all ranks, and who holds which."""
    differing = names_that_differ(values_of)
    names = {name for values in values_of for name in values}
    held = {
        rank: of
        for rank, of in enumerate(values_of)
        if differing[0] in of or not differing[0].startswith(PART)
    }
    by_value = grouped((values.get(differing[0]), rank) for rank, values in held.items())
    # The value that most ranks hold is taken for the right one; of equally many, that of the lowest rank.
    (_, most), *others = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    few = [f"{name_ranks(ranks)} ({_hosts_of(ranks, hosts)})" for _, ranks in others]
    absent = ", which some do not have," if None in by_value else ""
    return (
        f"{differing[0]}{absent} on {' and on '.join(few[:4])} is not that of {name_ranks(most)} "
        f"({_hosts_of(most, hosts)}); {len(differing)} of {len(names)} tensors differ, the last is {differing[-1]}"
    )


def names_that_differ(values_of: Sequence[dict[str, int]]) -> list[str]:
    """Return the names whose values are not the same on all ranks, or on all that have the part.

    >>> names_that_differ([{"`a`": 1, "elements 0 to 4 of `b`": 2}, {"`a`": 1, "elements 4 to 8 of `b`": 3}])
    []
    """
    names = list(dict.fromkeys(name for values in values_of for name in values))
    holders = {
        name: [values for values in values_of if name in values or not name.startswith(PART)]
        for name in names
    }
    return [name for name in names if len({values.get(name) for values in holders[name]}) > 1]


def _hosts_of(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ("host " if len(names) == 1 else "hosts ") + ", ".join(names[:3]) + more
