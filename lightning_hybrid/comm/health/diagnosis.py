"""Which rank is the cause where a sum does not end: judged by the status that every rank gives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from lightning_hybrid.comm.health.tcp_info import Liveness, describe_liveness, most_telling

Key = TypeVar("Key")

# How the place of a rank begins that has nothing in its engine; what its caller does follows.
IDLE = "with no bucket in flight"

# That of one whose device waits, or is busy for long, outside of any bucket.
BEHIND_DEVICE = "waiting for its device, with no bucket in flight"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Where a rank stands."""

    num_submitted: int  # buckets since the engine was made
    order: str  # hash of them and of their order
    place: str  # what it does now, in words
    recent: tuple[str, ...] = ()  # the latest of them, oldest first
    has_left: bool = False  # it closed its engine
    is_inside: bool = False  # its oldest bucket in flight is in a collective, or it is in another: it waits, or works
    liveness: Mapping[str, Liveness] = field(
        default_factory=dict
    )  # what it knows of the hosts at other addresses

    def to_json(self) -> str:
        """Write the status as JSON, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankStatus:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        liveness = {
            address: (word, heard_s) for address, (word, heard_s) in values["liveness"].items()
        }
        return cls(**{**values, "recent": tuple(values["recent"]), "liveness": liveness})


def diagnose(
    noticed: str,
    statuses: Sequence[RankStatus | None],
    hosts: Sequence[str] = (),
    addresses: Sequence[Sequence[str]] = (),
) -> str:
    """Write the error for all ranks: which is the cause, by the status of each (None: no answer), and who noticed what.

    `hosts`: of every rank, where they are known; those of the ranks to blame, or of all, are named. `addresses`:
    under which others know each rank's host.
    """
    silent = [rank for rank, each in enumerate(statuses) if each is None]
    left = [rank for rank, each in enumerate(statuses) if each is not None and each.has_left]
    here = {
        rank: each for rank, each in enumerate(statuses) if each is not None and not each.has_left
    }
    most = max((each.num_submitted for each in here.values()), default=0)
    different = _other_buckets(here)
    behind = [rank for rank, each in here.items() if each.num_submitted < most]
    # Of ranks that came less far, those that wait inside a collective wait for those that do not come to it.
    behind = [rank for rank in behind if not here[rank].is_inside] or behind
    # Of these, one whose bucket waits for its turn is in the step to which one without a bucket does not come.
    behind = [rank for rank in behind if here[rank].place.startswith(IDLE)] or behind
    # One that has no bucket in flight has done its part of those that others wait for.
    busy = [rank for rank, each in here.items() if not each.place.startswith(IDLE)]
    absent = [rank for rank in busy or here if not here[rank].is_inside]
    # The order matters: a rank that is gone makes others look late, and a rank that is late makes others wait.
    if silent:
        blame = _no_answer(silent, statuses, hosts, addresses)
    elif left:
        has = "has" if len(left) == 1 else "have"
        blame = f"{name_ranks(left)} {has} left: closed the engine while others still averaged"
    elif different:  # before "behind": a rank in another order also has other counts
        blame = different
    elif behind:
        stands = "stands" if len(behind) == 1 else "stand"
        blame = (
            f"{name_ranks(behind)} {stands} behind: {here[behind[0]].num_submitted} buckets handed over where others "
            f"have {most}; now {here[behind[0]].place}. Look there for a hang, an error or a batch less"
        )
    elif absent and len(absent) < len(here):  # all outside: none waits for another
        does = "does" if len(absent) == 1 else "do"
        blame = (
            f"{name_ranks(absent)} {does} not come to the collective in which others wait; now "
            f"{here[absent[0]].place}. Look there for a hang"
        )
    elif absent:  # the network is no cause while a rank is outside
        blame = f"every rank answers, and none is in a collective: {_by_place(here)}. Look for the one that hangs"
    elif (
        all(", called by " in each.place for each in here.values())
        and len({one.place for one in here.values()}) > 1
    ):
        blame = (
            f"ranks wait in different collectives: {_by_place(here)}. Look for one behind a condition that ranks see "
            "differently"
        )
    else:
        blame = f"every rank answers, so the network between them is the cause ({_by_place(here)})"
    if not different:
        late = behind or absent
    else:
        late = []
    return f"comm: {blame}. {noticed}.{places_of(silent or left or late, hosts)}"


def is_lost(statuses: Sequence[RankStatus | None]) -> bool:
    """Return whether what is in flight cannot end: a rank does not answer, has left, or submitted other buckets.

    >>> here = RankStatus(num_submitted=1, order="a", place=IDLE, recent=("x",))
    >>> is_lost([here, here]), is_lost([here, None])
    (False, True)
    """
    here = {rank: each for rank, each in enumerate(statuses) if each is not None}
    return (
        len(here) < len(statuses)
        or any(each.has_left for each in here.values())
        or _other_buckets(here) is not None
    )


def _no_answer(
    silent: Sequence[int],
    statuses: Sequence[RankStatus | None],
    hosts: Sequence[str],
    addresses: Sequence[Sequence[str]],
) -> str:
    # Of a host all of whose ranks are silent, those that answer may know more; it must not be called dead if it lives.
    # Where others of its host answer, or no rank knows anything, a silent rank may be dead, stopped or unreachable.
    states = []
    for rank in silent:
        host = hosts[rank] if rank < len(hosts) else None
        is_whole = host is not None and all(
            each is None for of, each in zip(hosts, statuses, strict=True) if of == host
        )
        found = [
            each.liveness.get(address)
            for address in (addresses[rank] if is_whole and rank < len(addresses) else ())
            for each in statuses
            if each is not None
        ]
        liveness = most_telling(found)
        states.append(
            "" if liveness is None or host is None else describe_liveness(liveness, host=host)
        )
    parts = []
    for state, ranks in grouped(zip(states, silent, strict=True)).items():
        its = "its process is" if len(ranks) == 1 else "their processes are"
        does = "does" if len(ranks) == 1 else "do"
        parts.append(
            f"{name_ranks(ranks)} {does} not answer: {state or f'{its} dead, stopped or unreachable'}"
        )
    return "; ".join(parts)


def places_of(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Say in a sentence on which host each of these ranks is, of no ranks all; empty where hosts are not known."""
    by_host = grouped(
        (hosts[rank], rank) for rank in ranks or range(len(hosts)) if rank < len(hosts)
    )
    places = [
        f"{name_ranks(few)} {'is' if len(few) == 1 else 'are'} on host {host}"
        for host, few in by_host.items()
    ]
    more = f" and {len(places) - 4} hosts more" if len(places) > 4 else ""
    words = ", ".join(places[:4]) + more
    return f" {words[0].upper()}{words[1:]}." if places else ""


def _other_buckets(here: dict[int, RankStatus]) -> str | None:
    """Name the ranks that submitted something else than the others, at the first place where they differ."""
    # Each rank remembers only its latest records, so they are compared by their place in the order of all submits.
    # Where the difference is older than that, the hashes of the whole order show it.
    first = {rank: each.num_submitted - len(each.recent) for rank, each in here.items()}
    for place in range(
        max(first.values(), default=0),
        max((each.num_submitted for each in here.values()), default=0),
    ):
        # A rank that has not come so far says nothing of this place.
        came = {rank: each for rank, each in here.items() if place < each.num_submitted}
        by_record = grouped((each.recent[place - first[rank]], rank) for rank, each in came.items())
        if len(by_record) > 1:
            return _other_order(
                sorted(by_record.items(), key=lambda item: (-len(item[1]), item[1]))
            )
    by_order = grouped(((each.num_submitted, each.order), rank) for rank, each in here.items())
    # Equal counts must have equal hashes.
    if len(by_order) > len({num_submitted for num_submitted, _ in by_order}):
        ranks = sorted(by_order.values(), key=lambda ranks: (-len(ranks), ranks))
        return _other_order(
            [("something else, longer ago than is remembered,", each) for each in ranks]
        )
    return None


def _other_order(by_record: list[tuple[str, list[int]]]) -> str:
    (usual, most), (other, few) = by_record[:2]
    return (
        f"{name_ranks(few)} handed over {other} where {name_ranks(most)} handed over {usual}: sums of these would mix "
        "gradients. Every rank must run the same backward passes of the same model in the same order"
    )


def _by_place(here: Mapping[int, RankStatus]) -> str:
    ranks = grouped((each.place, rank) for rank, each in here.items())
    return "; ".join(f"{name_ranks(some)}: {place}" for place, some in list(ranks.items())[:8])


def grouped(pairs: Iterable[tuple[Key, int]]) -> dict[Key, list[int]]:
    """Collect the ranks of each key, in the order in which they come."""
    found: dict[Key, list[int]] = {}
    for key, rank in pairs:
        found.setdefault(key, []).append(rank)
    return found


def name_ranks(ranks: Sequence[int]) -> str:
    """Write `rank 3`, `ranks 3, 5` or `ranks 0, 1, 2, 3 and 12 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 4} more" if len(ranks) > 5 else ""
    return "ranks " + ", ".join(map(str, ranks[: 4 if more else 5])) + more


def differing(values: Sequence[dict[str, Any]]) -> str:
    """Say what differs between ranks that should have given equal dictionaries; empty where nothing does.

    >>> differing([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}])
    '`b` is 2 on ranks 0, 2 and 3 on rank 1'
    """
    found = []
    for key in dict.fromkeys(key for each in values for key in each):
        by_value = grouped(
            (repr(each.get(key)), rank) for rank, each in enumerate(values)
        )  # values may have no hash
        if len(by_value) > 1:
            found.append(
                f"`{key}` is "
                + " and ".join(f"{v} on {name_ranks(r)}" for v, r in by_value.items())
            )
    return "; ".join(found)
