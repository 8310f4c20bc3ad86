"""The agreed list of members: who may be in the next, and who takes state from whom."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class IsolatedError(RuntimeError):
    """Raised where this host may not go on: the others do without it, or none may. Save, and end."""


class RefusedError(RuntimeError):
    """Raised where the running hosts do not take this one: what must be equal on all hosts differs."""


@dataclass(frozen=True)
class Member:
    """One rank. `id` is of this process alone, `local` its rank on its host, `address` the "ip:port" of its host."""

    id: str
    host: str
    local: int
    address: str


@dataclass(frozen=True)
class View:
    """The members between two changes, the same on all of them.

    Attributes:
        number: grows; some may be left out.
        members: hosts in order of entry, the ranks of a host in order of their local rank.
        store: "ip:port" of a fresh store, opened for this view alone.
        target: number of committed steps that all have after the change.
        donors: by local rank, the id of a member that has committed `target`: one of that local rank where there is
            one, else any. The state of data-parallel ranks is the same on all; where ranks of a host share the update,
            they must commit a step all or none, and then there always is one.
        behind: ids of members that take state from the donor of their local rank.
        reasons: why the former view ended.
    """

    number: int
    members: tuple[Member, ...]
    store: str
    target: int
    donors: tuple[str, ...]
    behind: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, in order of entry."""
        return tuple(dict.fromkeys(member.host for member in self.members))

    def rank_of(self, member_id: str) -> int:
        """Return the rank of a member in this view."""
        return [member.id for member in self.members].index(member_id)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one rank's membership.

    Attributes:
        host: name of this host, of no other of the run.
        local, ranks_per_host: this rank on its host.
        meet: "ip:port" of where starting hosts ask for the run, in the same order on all. The holder of the first is
            the arbiter where a cut link leaves two halves.
        min_hosts, max_hosts: fewer do not go on; more wait.
        token: of what must be equal on all hosts.
        silent_s: after how long without a sign of life a host is lost; a rank of this one, with which all of it ends,
            after twice as long.
        wait_s: how long the first meeting waits for more hosts than `min_hosts`.
    """

    host: str
    local: int
    ranks_per_host: int
    meet: Sequence[str]
    min_hosts: int
    max_hosts: int
    token: str
    silent_s: float = 2.0
    wait_s: float = 10.0

    @property
    def tick_s(self) -> float:
        """Time between two signs of life."""
        return self.silent_s / 8

    @property
    def path(self) -> str:
        """The address at which the ranks of a host meet: an abstract Unix socket, which ends with its process."""
        words = "\n".join([str(os.getuid()), self.host, self.token, *self.meet])
        return "\0lightning-hybrid-" + hashlib.sha256(words.encode()).hexdigest()[:32]


def host_key(name: str, address: str, place: int | None, nonce: str) -> str:
    """Write what others must know of a host in one word. `place`: which address of `meet` it holds.

    >>> key = host_key("node7", "10.0.0.7:41233", 0, "3fa9")
    >>> key, name_of(key), address_of(key), is_arbiter(key)
    ('node7@10.0.0.7:41233#0.3fa9', 'node7', '10.0.0.7:41233', True)
    """
    return f"{name}@{address}#{'-' if place is None else place}.{nonce}"


def name_of(host: str) -> str:
    """Return the name in the key of a host."""
    return host.rpartition("@")[0]


def address_of(host: str) -> str:
    """Return the "ip:port" in the key of a host."""
    return host.rpartition("@")[2].partition("#")[0]


def differing_parts(token: str, other: str) -> tuple[str, str]:
    """Return what differs between two tokens, of parts "name=value" with semicolons. All if they have other parts.

    >>> differing_parts("devices=1; data=64 images", "devices=1; data=48 images")
    ('data=64 images', 'data=48 images')
    """
    parts = token.split("; ")
    other_parts = other.split("; ")
    if len(parts) != len(other_parts):
        return token, other
    differing = [pair for pair in zip(parts, other_parts, strict=True) if pair[0] != pair[1]]
    return "; ".join(part for part, _ in differing), "; ".join(part for _, part in differing)


def is_arbiter(host: str) -> bool:
    """Return whether the host holds the first address of `meet`."""
    return host.rpartition("#")[2].startswith("0.")


def names_of(hosts: Sequence[str]) -> str:
    """Write the names of hosts, for errors."""
    return ("host " if len(hosts) == 1 else "hosts ") + ", ".join(map(name_of, hosts))


def members_of(hosts: Sequence[str], ranks_per_host: int) -> tuple[Member, ...]:
    """Return the ranks of the hosts, in the order of a view."""
    return tuple(
        Member(f"{host}/{local}", name_of(host), local, address_of(host))
        for host in hosts
        for local in range(ranks_per_host)
    )


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
        if not any(
            host in lost.get(kept_host, ()) or kept_host in lost.get(host, ()) for kept_host in kept
        ):
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
    """Return `target`, `donors` and `behind` of a view. `committed`: steps of the ranks of each host, in its order.

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
