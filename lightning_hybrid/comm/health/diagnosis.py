"""Diagnosis of hanging collectives, based on the status of every rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from lightning_hybrid.comm.health.tcp_info import Liveness, describe_liveness, most_telling

Key = TypeVar("Key")

# Prefix of the `place` of a rank whose engine is idle, followed by the current activity of the engine's caller.
IDLE = "with no bucket in flight"

# `place` of a rank without buckets in flight that waits for its device, or whose device has been busy for a long time.
BEHIND_DEVICE = "waiting for its device, with no bucket in flight"

# Maximum numbers of list entries in a message.
_MAX_RANKS = 5
_MAX_HOSTS = 4
_MAX_PLACES = 8


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Communication progress and current activity of one rank.

    Args:
        num_submitted: Number of buckets submitted since the engine was created.
        order: Hash of these buckets and of their order.
        place: Description of the current activity.
        recent: Latest of these buckets, oldest first.
        has_left: Whether the rank has closed its engine.
        is_inside: Whether the oldest bucket in flight, or the rank itself, is inside a collective. It is False while
            the bucket waits for its turn, or the rank computes.
        liveness: Liveness of the hosts at other addresses, as seen from this rank.
    """

    num_submitted: int
    order: str
    place: str
    recent: tuple[str, ...] = ()
    has_left: bool = False
    is_inside: bool = False
    liveness: Mapping[str, Liveness] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the status as a JSON string, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankStatus:
        """Create a status from a JSON string that `to_json` returned."""
        values = json.loads(text)
        liveness = {}
        for address, (word, heard_s) in values["liveness"].items():
            liveness[address] = (word, heard_s)
        values["liveness"] = liveness
        values["recent"] = tuple(values["recent"])
        return cls(**values)


def diagnose(
    noticed: str,
    statuses: Sequence[RankStatus | None],
    hosts: Sequence[str] = (),
    addresses: Sequence[Sequence[str]] = (),
) -> str:
    """Find the cause of a communication failure, and return an error message for all ranks.

    The message also contains the event that led to the diagnosis.

    Args:
        noticed: Description of the event that led to the diagnosis, and of the rank that noticed it.
        statuses: Status of every rank, or None if the rank did not answer.
        hosts: Host of every rank, if known. The message names the hosts of the ranks at fault, or all hosts.
        addresses: Addresses by which other hosts know the host of every rank.
    """
    silent = []
    left = []
    present = {}
    for rank, status in enumerate(statuses):
        if status is None:
            silent.append(rank)
        elif status.has_left:
            left.append(rank)
        else:
            present[rank] = status

    different_order = _describe_different_order(present)
    behind = _ranks_behind(present)
    absent = _ranks_outside(present)
    # The order of the checks matters, because a failed rank makes other ranks look slow, and a slow rank makes other
    # ranks wait. A rank with a different order may also have submitted a different number of buckets.
    if silent:
        blame = _describe_silent(silent, statuses, hosts, addresses)
    elif left:
        closed = _verb_for(left, "has closed its engine", "have closed their engines")
        blame = f"{name_ranks(left)} {closed} while other ranks were still averaging gradients"
    elif different_order is not None:
        blame = different_order
    elif behind:
        blame = _describe_behind(behind, present)
    else:
        blame = _describe_wait(absent, present)

    blamed = silent or left
    if not blamed and different_order is None:
        blamed = behind or absent
    return f"comm: {blame}. {noticed}.{places_of(blamed, hosts)}"


def _ranks_behind(present: Mapping[int, RankStatus]) -> list[int]:
    """Return the ranks that lag behind in submitting buckets and may have caused the failure."""
    most = _most_submitted(present)
    behind = [rank for rank, status in present.items() if status.num_submitted < most]

    # A rank inside a collective waits for other ranks to join, so it is not the cause.
    outside = [rank for rank in behind if not present[rank].is_inside]
    if outside:
        behind = outside
    # A rank with a waiting bucket has reached a step that a rank without a bucket has not reached.
    idle = [rank for rank in behind if present[rank].place.startswith(IDLE)]
    if idle:
        behind = idle
    return behind


def _ranks_outside(present: Mapping[int, RankStatus]) -> list[int]:
    """Return the ranks outside of collectives, preferably those that have a bucket in flight."""
    # A rank without a bucket in flight has finished the buckets that other ranks wait for.
    busy = [rank for rank, status in present.items() if not status.place.startswith(IDLE)]
    candidates = busy or list(present)
    return [rank for rank in candidates if not present[rank].is_inside]


def _most_submitted(present: Mapping[int, RankStatus]) -> int:
    return max((status.num_submitted for status in present.values()), default=0)


def _describe_behind(behind: Sequence[int], present: Mapping[int, RankStatus]) -> str:
    verb = _verb_for(behind, "is", "are")
    submitted = _verb_for(behind, "it has submitted", "they have submitted")
    first = present[behind[0]]
    return (
        f"{name_ranks(behind)} {verb} behind: {submitted} {first.num_submitted} of {_most_submitted(present)} buckets. "
        f"State of rank {behind[0]}: {first.place}. Look there for a hang, an error or a missing batch"
    )


def _describe_wait(absent: Sequence[int], present: Mapping[int, RankStatus]) -> str:
    """Describe a hang for which all ranks respond and have submitted the same buckets."""
    if absent and len(absent) < len(present):
        verb = _verb_for(absent, "does", "do")
        return (
            f"{name_ranks(absent)} {verb} not join the collective in which others wait. State of rank {absent[0]}: "
            f"{present[absent[0]].place}. Look there for a hang"
        )

    places = _describe_places(present)
    if absent:  # While a rank is outside of the collectives, the network is not the cause.
        return f"every rank answers, and none is in a collective: {places}. Look for the rank that hangs"

    distinct_places = {status.place for status in present.values()}
    are_in_collectives = all(", called by " in words for words in distinct_places)
    if len(distinct_places) > 1 and are_in_collectives:
        return (
            f"ranks wait in different collectives: {places}. Look for a collective that only some ranks call, because "
            "a condition differs between ranks"
        )
    return f"every rank answers, so the network between them is the cause ({places})"


def is_lost(statuses: Sequence[RankStatus | None]) -> bool:
    """Return whether the pending collectives can no longer finish.

    They cannot finish if a rank does not answer, has closed its engine, or has submitted different buckets.

    >>> here = RankStatus(num_submitted=1, order="a", place=IDLE, recent=("x",))
    >>> is_lost([here, here]), is_lost([here, None])
    (False, True)
    """
    answers = {rank: status for rank, status in enumerate(statuses) if status is not None}
    if len(answers) < len(statuses):
        return True
    if any(status.has_left for status in answers.values()):
        return True
    return _describe_different_order(answers) is not None


def _describe_silent(
    silent: Sequence[int],
    statuses: Sequence[RankStatus | None],
    hosts: Sequence[str],
    addresses: Sequence[Sequence[str]],
) -> str:
    """Describe the ranks that do not respond, and the state of their hosts as far as it is known."""
    states = [_state_of_host(rank, statuses, hosts, addresses) for rank in silent]
    descriptions = []
    for state, ranks in grouped(zip(states, silent, strict=True)).items():
        if len(ranks) == 1:
            verb = "does"
            default = "its process is dead, stopped or unreachable"
        else:
            verb = "do"
            default = "their processes are dead, stopped or unreachable"
        descriptions.append(f"{name_ranks(ranks)} {verb} not answer: {state or default}")
    return "; ".join(descriptions)


def _state_of_host(
    rank: int,
    statuses: Sequence[RankStatus | None],
    hosts: Sequence[str],
    addresses: Sequence[Sequence[str]],
) -> str:
    """Describe the state of an unresponsive rank's host, or return an empty string if it is unknown.

    If all ranks of a host are silent, other ranks may know whether the host is alive. If other ranks of the host
    answer, or if no rank knows anything, a silent rank may be dead, stopped or unreachable.
    """
    if rank >= len(hosts) or rank >= len(addresses):
        return ""
    host = hosts[rank]
    for rank_host, status in zip(hosts, statuses, strict=True):
        if rank_host == host and status is not None:
            return ""

    reports: list[Liveness | None] = []
    for address in addresses[rank]:
        for status in statuses:
            if status is not None:
                reports.append(status.liveness.get(address))
    liveness = most_telling(reports)
    if liveness is None:
        return ""
    return describe_liveness(liveness, host=host)


def places_of(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return a sentence that lists the hosts of the given ranks.

    If no ranks are given, the sentence lists the hosts of all ranks. If the hosts are not known, it is empty.
    """
    named = ranks or range(len(hosts))
    ranks_by_host = grouped((hosts[rank], rank) for rank in named if rank < len(hosts))
    if not ranks_by_host:
        return ""

    places = []
    for host, ranks_of_host in ranks_by_host.items():
        verb = _verb_for(ranks_of_host, "is", "are")
        places.append(f"{name_ranks(ranks_of_host)} {verb} on host {host}")
    words = ", ".join(places[:_MAX_HOSTS])
    num_hidden = len(places) - _MAX_HOSTS
    if num_hidden > 0:
        words += f" and {num_hidden} more hosts"
    return f" {words[0].upper()}{words[1:]}."


def _describe_different_order(statuses: Mapping[int, RankStatus]) -> str | None:
    """Describe the first bucket that differs between ranks, or return None if there is no difference.

    Each rank stores only its latest records, which are compared by their position among all submitted buckets. Earlier
    differences are revealed by the hashes of all submitted buckets.
    """
    first_position = {}  # position of the oldest record that a rank has stored
    for rank, status in statuses.items():
        first_position[rank] = status.num_submitted - len(status.recent)

    for position in range(max(first_position.values(), default=0), _most_submitted(statuses)):
        records_and_ranks = []
        for rank, status in statuses.items():
            if position < status.num_submitted:  # A rank that is behind has no record here yet.
                record = status.recent[position - first_position[rank]]
                records_and_ranks.append((record, rank))
        ranks_by_record = grouped(records_and_ranks)
        if len(ranks_by_record) > 1:
            by_frequency = sorted(
                ranks_by_record.items(), key=lambda item: (-len(item[1]), item[1])
            )
            return _describe_orders(by_frequency)

    ranks_by_order = grouped(
        ((status.num_submitted, status.order), rank) for rank, status in statuses.items()
    )
    distinct_counts = {num_submitted for num_submitted, _ in ranks_by_order}
    if len(ranks_by_order) > len(distinct_counts):  # Equal counts must have equal hashes.
        groups = sorted(ranks_by_order.values(), key=lambda ranks: (-len(ranks), ranks))
        record = "a different bucket (too long ago to be named)"
        return _describe_orders([(record, ranks) for ranks in groups])
    return None


def _describe_orders(ranks_by_record: list[tuple[str, list[int]]]) -> str:
    majority_record, majority = ranks_by_record[0]
    minority_record, minority = ranks_by_record[1]
    return (
        f"{name_ranks(minority)} submitted {minority_record} where {name_ranks(majority)} submitted "
        f"{majority_record}, so the all-reduce would add gradients of different parameters. "
        "Run the same backward passes of the same model in the same order on every rank"
    )


def _describe_places(statuses: Mapping[int, RankStatus]) -> str:
    ranks_by_place = grouped((status.place, rank) for rank, status in statuses.items())
    descriptions = [f"{name_ranks(ranks)}: {words}" for words, ranks in ranks_by_place.items()]
    return "; ".join(descriptions[:_MAX_PLACES])


def grouped(pairs: Iterable[tuple[Key, int]]) -> dict[Key, list[int]]:
    """Group (key, rank) pairs by key, in the order of the pairs."""
    ranks_by_key: dict[Key, list[int]] = {}
    for key, rank in pairs:
        ranks_by_key.setdefault(key, []).append(rank)
    return ranks_by_key


def name_ranks(ranks: Sequence[int]) -> str:
    """Format a list of ranks as text, such as `rank 3` or `ranks 0, 1, 2, 3 and 12 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= _MAX_RANKS:
        return "ranks " + ", ".join(map(str, ranks))
    shown = ranks[: _MAX_RANKS - 1]
    return f"ranks {', '.join(map(str, shown))} and {len(ranks) - len(shown)} more"


def _verb_for(ranks: Sequence[int], singular: str, plural: str) -> str:
    if len(ranks) == 1:
        return singular
    return plural


def differing(values_by_rank: Sequence[dict[str, Any]]) -> str:
    """Describe the dictionary entries that differ between ranks, or return an empty string.

    >>> differing([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}])
    '`b` is 2 on ranks 0, 2 and 3 on rank 1'
    """
    keys = dict.fromkeys(key for values in values_by_rank for key in values)
    descriptions = []
    for key in keys:
        # Values are compared as text, because they may not be hashable.
        ranks_by_text = grouped(
            (repr(values.get(key)), rank) for rank, values in enumerate(values_by_rank)
        )
        if len(ranks_by_text) > 1:
            texts = [f"{text} on {name_ranks(ranks)}" for text, ranks in ranks_by_text.items()]
            descriptions.append(f"`{key}` is {' and '.join(texts)}")
    return "; ".join(descriptions)
