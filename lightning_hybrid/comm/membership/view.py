"""The agreed list of members, and how one host leaves it in words."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass


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
    """What `Membership` was given; its docstring says what each is."""

    host: str
    local: int
    ranks_per_host: int
    meet: tuple[str, ...]
    min_hosts: int
    max_hosts: int
    token: str
    silent_s: float
    wait_s: float

    @property
    def tick_s(self) -> float:
        """Time between two signs of life."""
        return self.silent_s / 4

    @property
    def path(self) -> str:
        """Where the ranks of a host meet: an abstract Unix socket, which ends with its process."""
        words = "\n".join([str(os.getuid()), self.host, self.token, *self.meet])
        return "\0lightning-hybrid-" + hashlib.sha256(words.encode()).hexdigest()[:32]


def host_key(name: str, address: str, place: int | None, nonce: str) -> str:
    """Write what others must know of a host in one word; `place`: which address of `meet` it holds.

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
