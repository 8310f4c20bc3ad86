"""What the next view consists of: who is in it, whether they may go on, and who takes state from whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hybrid.comm.membership.view import is_arbiter, members_of

# How a host is lost that votes nowhere any more: it is dead, or said goodbye. One that is "silent" may live.
FOR_SURE = ("closed", "left")


def who_hear_each_other(
    first: Sequence[str], others: Sequence[str], lost: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return `first`, and of `others` those that hear all before them: of two that do not, the later goes.

    >>> who_hear_each_other([], ["a", "b", "c"], {"b": {"c": "silent"}})
    ['a', 'b']
    """
    kept = list(first)
    for host in others:
        if not any(host in lost.get(one, ()) or one in lost.get(host, ()) for one in kept):
            kept.append(host)
    return kept


def have_the_votes(kept: Sequence[str], hosts: Sequence[str], lost: Mapping[str, str]) -> bool:
    """Return whether `kept` may go on from a view of `hosts`: no others of these can do so elsewhere.

    They can where they are silent. Then more than half is needed, or half and the arbiter; the dead count too, as the
    others may have had their votes before.

    >>> a, b, c = "a@x:1#0.1", "b@x:2#-.2", "c@x:3#-.3"
    >>> have_the_votes([b], [a, b], {a: "closed"}), have_the_votes([b], [a, b], {a: "silent"})
    (True, False)
    >>> have_the_votes([a], [a, b], {b: "silent"}), have_the_votes([a], [a, b, c], {b: "closed", c: "silent"})
    (True, False)
    """
    if all(lost.get(host) in FOR_SURE for host in hosts if host not in kept):
        return True
    votes = [host for host in hosts if host in kept]
    is_half = 2 * len(votes) == len(hosts)
    return 2 * len(votes) > len(hosts) or (is_half and any(map(is_arbiter, votes)))


def who_takes_from_whom(committed: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return `target`, `donors` and `behind` of a view; `committed`: steps of the ranks of each host, in its order.

    >>> found = who_takes_from_whom({"a@x:1#0.1": [3, 4], "b@x:2#-.2": [3, 3]})
    >>> found["target"], found["donors"], len(found["behind"])
    (4, ['a@x:1#0.1/1', 'a@x:1#0.1/1'], 3)
    """
    num_local = len(next(iter(committed.values())))
    steps = [step for of_host in committed.values() for step in of_host]
    ranks = members_of(list(committed), num_local)
    target = max(steps)
    ahead = [rank for rank, step in zip(ranks, steps, strict=True) if step == target]
    of_local = ([rank for rank in ahead if rank.local == local] for local in range(num_local))
    return {
        "target": target,
        "donors": [(fitting or ahead)[0].id for fitting in of_local],
        "behind": [rank.id for rank, step in zip(ranks, steps, strict=True) if step < target],
    }
