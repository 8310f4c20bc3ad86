"""Membership views, the quorum rule, and the selection of ranks that send or receive state."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class IsolatedError(RuntimeError):
    """Error raised on a host that must stop, because it cannot reach a quorum of hosts.

    The other hosts continue without this host, or no host may continue. Save the state and end the run.
    """


class RefusedError(RuntimeError):
    """Error raised on a host that cannot join an existing run, because the host's settings differ."""


@dataclass(frozen=True)
class Member:
    """One rank in a membership view.

    Attributes:
        id: Unique identifier of the process.
        host: Name of its host.
        local: Its rank on the host.
        address: "ip:port" of its host.
    """

    id: str
    host: str
    local: int
    address: str


@dataclass(frozen=True)
class View:
    """Numbered list of the ranks that train together until a host joins or is lost.

    All members have the same view.

    Attributes:
        number: Number of the view, which increases from view to view. Some numbers may be skipped.
        members: Ranks, with hosts in the order in which they joined, and the ranks of a host by local rank.
        store: "ip:port" of a new TCP store that only this view uses.
        target: Number of completed steps that all ranks have after the change.
        donors: For each local rank, the ID of a member that has completed `target` steps. If possible, this member has
            the same local rank. Otherwise it may have any local rank, because data-parallel ranks all have the same
            state. If the ranks of a host share the update, a member with the same local rank always exists, because
            either all of them complete a step or none of them does.
        behind: IDs of members that receive the state from the donor of their local rank.
        reasons: Reasons for the end of the previous view.
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
        """Names of the hosts, in the order in which they joined the run."""
        distinct_hosts = dict.fromkeys(member.host for member in self.members)
        return tuple(distinct_hosts)

    def rank_of(self, member_id: str) -> int:
        """Return the rank of a member in this view."""
        member_ids = [member.id for member in self.members]
        return member_ids.index(member_id)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Membership settings of one rank.

    Attributes:
        host: Name of this host, which is unique in the run.
        local: Rank on this host.
        ranks_per_host: Number of ranks on each host.
        meet: Addresses "ip:port" at which starting hosts ask for the run, in the same order on all hosts. If a broken
            link splits the hosts into two halves, the host at the first address is the arbiter.
        min_hosts: Minimum number of hosts. With fewer hosts, a run does not continue.
        max_hosts: Maximum number of hosts. Additional hosts wait.
        token: Description of the run's settings that must be equal on all hosts.
        silent_s: Seconds without a heartbeat after which a host is considered lost. A rank of this host is considered
            lost after twice this time, which ends the whole host.
        wait_s: Seconds that the hosts wait, when they first meet, for more hosts than `min_hosts`.
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
        """Time between two heartbeats, in seconds."""
        return self.silent_s / 8

    @property
    def path(self) -> str:
        """Address of the abstract Unix socket at which the ranks of this host connect.

        The socket is closed when its process exits.
        """
        user_id = str(os.getuid())
        identity = "\n".join([user_id, self.host, self.token, *self.meet])
        digest = hashlib.sha256(identity.encode()).hexdigest()
        return "\0lightning-hybrid-" + digest[:32]


def host_key(name: str, address: str, place: int | None, nonce: str) -> str:
    """Create the key that identifies a host, from its name, address, index in `meet` and a random suffix.

    Args:
        name: Name of the host.
        address: "ip:port" of the host.
        place: Index of the address in `meet` at which the host listens, or None.
        nonce: Random text, so that a restarted host has a different key.

    >>> key = host_key("node7", "10.0.0.7:41233", 0, "3fa9")
    >>> key, name_of(key), address_of(key), is_arbiter(key)
    ('node7@10.0.0.7:41233#0.3fa9', 'node7', '10.0.0.7:41233', True)
    """
    meet_index = "-"
    if place is not None:
        meet_index = str(place)
    return f"{name}@{address}#{meet_index}.{nonce}"


def name_of(host: str) -> str:
    """Extract the host name from a host's key."""
    name, _, _ = host.rpartition("@")
    return name


def address_of(host: str) -> str:
    """Extract the address "ip:port" from a host's key."""
    _, _, address_and_suffix = host.rpartition("@")
    address, _, _ = address_and_suffix.partition("#")
    return address


def differing_parts(token: str, other: str) -> tuple[str, str]:
    """Return the "name=value" entries in which two tokens differ, separately for each token.

    A token is a list of "name=value" entries, separated by semicolons. Both tokens are returned in full if they have
    different numbers of entries.

    >>> differing_parts("devices=1; data=64 images", "devices=1; data=48 images")
    ('data=64 images', 'data=48 images')
    """
    parts = token.split("; ")
    other_parts = other.split("; ")
    if len(parts) != len(other_parts):
        return token, other
    differing = []
    other_differing = []
    for part, other_part in zip(parts, other_parts, strict=True):
        if part != other_part:
            differing.append(part)
            other_differing.append(other_part)
    return "; ".join(differing), "; ".join(other_differing)


def is_arbiter(host: str) -> bool:
    """Return whether a host is the arbiter, which listens at the first address and breaks ties in votes."""
    _, _, index_and_nonce = host.rpartition("#")
    return index_and_nonce.startswith("0.")


def names_of(hosts: Sequence[str]) -> str:
    """Format the names of several hosts for error messages."""
    noun = "hosts"
    if len(hosts) == 1:
        noun = "host"
    names = ", ".join(map(name_of, hosts))
    return f"{noun} {names}"


def members_of(hosts: Sequence[str], ranks_per_host: int) -> tuple[Member, ...]:
    """Create a `Member` for each rank of the given hosts, in the order used by membership views."""
    members = []
    for host in hosts:
        for local in range(ranks_per_host):
            member_id = f"{host}/{local}"
            members.append(Member(member_id, name_of(host), local, address_of(host)))
    return tuple(members)


# Kinds of loss after which a host certainly does not vote: its process has died, or it has sent a goodbye. A host that
# is "silent" may still be alive.
FOR_SURE = ("closed", "left")


def who_hear_each_other(
    first: Sequence[str], others: Sequence[str], lost: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Select hosts that can all reach each other, beginning with the hosts in `first`.

    A host from `others` is added if it and every host before it in the list can reach each other. Of two hosts that
    cannot reach each other, the later host is left out.

    Args:
        first: Hosts that are always selected.
        others: Hosts that may be added, in order of precedence.
        lost: For each host, the hosts that it has lost, with the kind of loss.

    >>> who_hear_each_other([], ["a", "b", "c"], {"b": {"c": "silent"}})
    ['a', 'b']
    """
    selected = list(first)
    for host in others:
        lost_by_host = lost.get(host, {})
        can_reach_all = True
        for selected_host in selected:
            lost_by_selected = lost.get(selected_host, {})
            if host in lost_by_selected or selected_host in lost_by_host:
                can_reach_all = False
        if can_reach_all:
            selected.append(host)
    return selected


def have_the_votes(kept: Sequence[str], hosts: Sequence[str], lost: Mapping[str, str]) -> bool:
    """Return whether `kept` is a quorum of `hosts`, so that no disjoint subset can continue.

    If all other hosts are certainly gone, `kept` is a quorum. If some of them are silent, they may continue elsewhere.
    In this case, `kept` needs more than half of `hosts`, or half including the arbiter. `hosts` includes hosts that
    have died, because the silent hosts may have received their votes before.

    >>> a, b, c = "a@x:1#0.1", "b@x:2#-.2", "c@x:3#-.3"
    >>> have_the_votes([b], [a, b], {a: "closed"}), have_the_votes([b], [a, b], {a: "silent"})
    (True, False)
    >>> have_the_votes([a], [a, b], {b: "silent"}), have_the_votes([a], [a, b, c], {b: "closed", c: "silent"})
    (True, False)
    """
    missing = [host for host in hosts if host not in kept]
    if all(lost.get(host) in FOR_SURE for host in missing):
        return True

    voters = [host for host in hosts if host in kept]
    if 2 * len(voters) == len(hosts):
        return any(is_arbiter(host) for host in voters)
    return 2 * len(voters) > len(hosts)


def who_takes_from_whom(committed: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Choose the ranks that need to receive the training state, and the ranks that send it.

    Args:
        committed: Number of steps that each rank has completed, by host, in the order of the view.

    Returns:
        A dictionary with `target`, `donors` and `behind` of a `View`.

    >>> found = who_takes_from_whom({"a@x:1#0.1": [3, 4], "b@x:2#-.2": [3, 3]})
    >>> found["target"], found["donors"], len(found["behind"])
    (4, ['a@x:1#0.1/1', 'a@x:1#0.1/1'], 3)
    """
    first_steps = next(iter(committed.values()))
    ranks_per_host = len(first_steps)
    members = members_of(list(committed), ranks_per_host)
    steps: list[int] = []
    for steps_of_host in committed.values():
        steps.extend(steps_of_host)

    target = max(steps)
    ahead = []
    behind = []
    for member, step in zip(members, steps, strict=True):
        if step == target:
            ahead.append(member)
        else:
            behind.append(member.id)

    donors = []
    for local in range(ranks_per_host):
        # Any member with the state of the target can send it if there is none with the same local rank.
        of_same_local_rank = [member for member in ahead if member.local == local]
        candidates = of_same_local_rank or ahead
        donors.append(candidates[0].id)
    return {"target": target, "donors": donors, "behind": behind}
