"""How a failure on one rank becomes the same error on every rank, soon.

Gloo's waits cannot be called off, and a rank that waits for a dead one would wait for the group's timeout (30 minutes,
where nobody set it). So every rank has a thread that looks for an alarm in the store through which the ranks met:

    a stage raises by itself        the rank writes what failed; everybody else reads it and fails with the same words
    a collective raises             somebody else is the cause: the rank calls the roll, every watch answers where its
                                    rank stands, and ``verdict`` names who does not answer, left, or stands behind
    the store does not answer       its host is gone, and with it most likely rank 0

The first verdict written is the one that all ranks report. The thread asks four times a second while a bucket has been
in flight for half a second, else once a second; with thousands of ranks less often, to spare the store.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

STALL_S = 0.5
"""From when on a bucket in flight makes its rank ask for alarms often."""

STORE_LIMIT_S = 5.0
"""How long one word with the store may take before its host counts as gone."""

PATIENCE = 4
"""How often in a row the store may leave a word unanswered: another thread of this process may be using it."""

IDLE = "with no bucket in flight"
"""The place of a rank that waits for no other, as far as the engine knows."""

COMPARE_LIMIT_S = 60.0
"""The same where nothing but patience depends on it."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a rank stands, as it answers the roll.

    ``num_submitted``: buckets handed over since the engine was made. ``order``: hash of them and of their order.
    ``place``: in words, what it does now. ``recent``: the latest of them, oldest first. ``has_left``: engine closed.
    """

    num_submitted: int
    order: str
    place: str
    recent: tuple[str, ...] = ()
    has_left: bool = False

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Standing:
        """What ``to_json`` wrote."""
        values = json.loads(text)
        return cls(**{**values, "recent": tuple(values["recent"])})


def verdict(noticed: str, roll: Sequence[Standing | None], hosts: Sequence[str] = ()) -> str:
    """The error for all ranks: who is to blame, judged by the roll (None: no answer), and who noticed by what.

    ``hosts``: of every rank, where they are known; those of the ranks to blame, or of all, are told.

    >>> at_one = Standing(num_submitted=1, order="a", place="bucket 0 in stage `ring`")
    >>> print(verdict("Rank 0 saw a closed connection", [at_one, None], ["x", "y"]))
    comm: rank 1 does not answer: its process is dead, stopped or unreachable. Rank 0 saw a closed connection. \
Rank 1 is on host y.
    """
    silent = [rank for rank, standing in enumerate(roll) if standing is None]
    left = [rank for rank, standing in enumerate(roll) if standing is not None and standing.has_left]
    here = {rank: each for rank, each in enumerate(roll) if each is not None and not each.has_left}
    most = max((each.num_submitted for each in here.values()), default=0)
    different = _different_order(here)
    behind = [rank for rank, each in here.items() if each.num_submitted < most]
    if silent:
        does = "does" if len(silent) == 1 else "do"
        its = "its process is" if len(silent) == 1 else "their processes are"
        blame = f"{name_ranks(silent)} {does} not answer: {its} dead, stopped or unreachable"
    elif left:
        has = "has" if len(left) == 1 else "have"
        blame = f"{name_ranks(left)} {has} left: closed the engine while others still averaged"
    elif different:
        blame = different
    elif behind:
        stands = "stands" if len(behind) == 1 else "stand"
        blame = (
            f"{name_ranks(behind)} {stands} behind: {here[behind[0]].num_submitted} buckets handed over where others "
            f"have {most}; now {here[behind[0]].place}. Look there for a hang, an error or a batch less"
        )
    elif all(each.place == IDLE for each in here.values()):
        blame = (
            "every rank answers and has averaged the same buckets: one that is slow, or hangs, elsewhere in its step "
            "is the cause, or the network between them"
        )
    else:
        places = ", ".join(f"rank {rank}: {each.place}" for rank, each in list(here.items())[:8])
        blame = f"every rank answers, so the network between them is the cause ({places})"
    return f"comm: {blame}. {noticed}.{places_of(silent or left or (behind if not different else []), hosts)}"


def places_of(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """A sentence that says on which host each of these ranks is, of no ranks all; empty where hosts are not known.

    >>> places_of([1, 2], ["x", "y", "y"]), places_of([], ["x", "y", "y"])
    (' Ranks 1, 2 are on host y.', ' Rank 0 is on host x, ranks 1, 2 are on host y.')
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks or range(len(hosts)):
        if rank < len(hosts):
            by_host.setdefault(hosts[rank], []).append(rank)
    told = [f"{name_ranks(few)} {'is' if len(few) == 1 else 'are'} on host {host}" for host, few in by_host.items()]
    more = f" and {len(told) - 4} hosts more" if len(told) > 4 else ""
    words = ", ".join(told[:4]) + more
    return f" {words[0].upper()}{words[1:]}." if told else ""


def _different_order(here: dict[int, Standing]) -> str | None:
    """Which ranks handed over something else than the others, at the first place where they differ; None if none."""
    first = {rank: each.num_submitted - len(each.recent) for rank, each in here.items()}
    for place in range(max(first.values(), default=0), max((each.num_submitted for each in here.values()), default=0)):
        by_record: dict[str, list[int]] = {}
        for rank, each in here.items():
            if place < each.num_submitted:
                by_record.setdefault(each.recent[place - first[rank]], []).append(rank)
        if len(by_record) > 1:
            return _other_order(sorted(by_record.items(), key=lambda item: (-len(item[1]), item[1])))
    by_order: dict[tuple[int, str], list[int]] = {}
    for rank, each in here.items():
        by_order.setdefault((each.num_submitted, each.order), []).append(rank)
    if len(by_order) > len({num_submitted for num_submitted, _ in by_order}):
        ranks = sorted(by_order.values(), key=lambda ranks: (-len(ranks), ranks))
        return _other_order([("something else, longer ago than is remembered,", each) for each in ranks])
    return None


def _other_order(by_record: list[tuple[str, list[int]]]) -> str:
    (usual, most), (other, few) = by_record[:2]
    return (
        f"{name_ranks(few)} handed over {other} where {name_ranks(most)} handed over {usual}: sums of these would mix "
        "gradients. Every rank must run the same backward passes of the same model in the same order"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 3, 5`` or ``ranks 0, 1, 2, 3 and 12 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 4} more" if len(ranks) > 5 else ""
    return "ranks " + ", ".join(map(str, ranks[: 4 if more else 5])) + more


def differing(values: Sequence[dict[str, Any]]) -> str:
    """What differs between ranks that should have given equal dictionaries; empty where nothing does.

    >>> differing([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}])
    '`b` is 2 on ranks 0, 2 and 3 on rank 1'
    """
    found = []
    for key in dict.fromkeys(key for each in values for key in each):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(values):
            by_value.setdefault(repr(each.get(key)), []).append(rank)
        if len(by_value) > 1:
            found.append(f"`{key}` is " + " and ".join(f"{v} on {name_ranks(r)}" for v, r in by_value.items()))
    return "; ".join(found)


class Watch:
    """The watchdog of one rank. Started by the constructor, ended by ``leave``.

    Arguments:
        store: keys of this engine only; used from this class alone, as a store's client serves one thread at a time.
        rank, world_size: of the engine.
        standing: where this rank stands now.
        stalled_s: how long the oldest bucket has been in flight; 0 where none is.
        hosts: names of every rank's; for errors.
        on_failure: called once, from a thread of this class, with the error of all ranks.
    """

    def __init__(
        self,
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
        standing: Callable[[], Standing],
        stalled_s: Callable[[], float],
        on_failure: Callable[[str], None],
        hosts: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._standing = standing
        self._stalled_s = stalled_s
        self._on_failure = on_failure
        self._hosts = hosts
        self._poll_s = max(0.25, world_size / 2000)
        self._idle_poll_s = max(1.0, world_size / 500)
        self._lock = threading.Lock()  # one word with the store at a time
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="comm-watch", daemon=True)
        self._thread.start()

    def compare(self, key: str, value: str) -> str:
        """What the first rank to come wrote under ``key``: ``value`` itself, or another rank's."""
        return self._ask(lambda: self._first(key, value), own_limit_s=COMPARE_LIMIT_S)

    def raise_alarm(self, error: str) -> str:
        """Write this rank's error for all; returns the one that holds, which is an earlier one where there is."""
        error = error.rstrip(".") + "." + places_of([self._rank], self._hosts)
        return self._told(lambda: self._settle(error), error)

    def call_roll(self, noticed: str) -> str:
        """Ask where everybody stands and write the verdict for all; returns the one that holds."""
        return self._told(lambda: self._settle(verdict(noticed, self._roll(), self._hosts)), f"comm: {noticed}.")

    def leave(self) -> None:
        """End the thread. Whoever calls the roll later learns that this rank has left."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(STORE_LIMIT_S)
        standing = self._standing()
        left = Standing(num_submitted=standing.num_submitted, order=standing.order, place="gone", has_left=True)
        try:
            self._ask(lambda: self._store.set(f"standing/{self._rank}", left.to_json()))
        except Exception:  # nobody may be there any more to read it
            return

    # ------------------------------------------------------------------------------------------------- the own thread

    def _run(self) -> None:
        since_asked_s, has_answered, num_unanswered = 0.0, False, 0
        while not self._ended.wait(self._poll_s):
            since_asked_s += self._poll_s
            is_stalled = self._stalled_s() > STALL_S
            if not is_stalled and since_asked_s < self._idle_poll_s and not has_answered:
                continue
            since_asked_s = 0.0
            try:
                if not has_answered:
                    if not self._ask(lambda: self._store.check(["alarm"])):
                        continue
                    self._ask(self._answer)
                    has_answered = True
                if self._ask(lambda: self._store.check(["error"])):
                    self._on_failure(self._ask(lambda: self._store.get("error")).decode())
                    return
                num_unanswered = 0
            except Exception as error:
                num_unanswered += 1
                if isinstance(error, TimeoutError) and num_unanswered < PATIENCE:
                    continue
                if is_stalled and not self._ended.is_set():
                    self._on_failure(
                        "comm: the store through which the ranks met does not answer: rank 0, or the launcher that "
                        f"keeps it, is dead or unreachable. Rank {self._rank} noticed, now "
                        f"{self._standing().place}: {short(error)}.{places_of([0, self._rank], self._hosts)}"
                    )
                    return

    # ------------------------------------------------------------------------------------------- words with the store

    def _answer(self) -> None:
        self._store.set(f"standing/{self._rank}", self._standing().to_json())

    def _first(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value).decode()

    def _settle(self, error: str) -> str:
        self._store.set("alarm", "1")
        return self._first("error", error)

    def _roll(self) -> list[Standing | None]:
        """Every rank's answer. Waits until all have come, or for as long as the slowest watch may take to look."""
        self._store.set("alarm", "1")
        self._answer()
        keys = [f"standing/{rank}" for rank in range(self._world_size)]
        missing = set(keys)
        limit_s = self._idle_poll_s + 2 * self._poll_s + 0.5
        for _ in range(max(1, int(limit_s / 0.1))):
            missing = {key for key in missing if not self._store.check([key])}
            if not missing or self._store.check(["error"]):
                break
            threading.Event().wait(0.1)
        return [None if key in missing else Standing.from_json(self._store.get(key).decode()) for key in keys]

    def _told(self, ask: Callable[[], str], otherwise: str) -> str:
        try:
            return self._ask(ask, own_limit_s=self._idle_poll_s + STORE_LIMIT_S)
        except Exception as error:
            return (
                "comm: the store through which the ranks met does not answer: rank 0, or the launcher that keeps it, "
                f"is dead or unreachable, and the other ranks could not be told ({short(error)}). "
                f"{otherwise.removeprefix('comm: ')}{places_of([0], self._hosts)}"
            )

    def _ask(self, ask: Callable[[], Any], *, own_limit_s: float = STORE_LIMIT_S) -> Any:
        """``ask()``, or ``TimeoutError``: a store whose host vanished without a word may never come back."""
        answers: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with self._lock:
                    answers.append(ask())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="comm-ask", daemon=True)
        thread.start()
        thread.join(own_limit_s)
        if errors:
            raise errors[0]
        if not answers:
            raise TimeoutError(f"no answer within {own_limit_s:g} s")
        return answers[0]


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an error is a backend's own, of a collective or of the store: not one of the user's code.

    >>> is_of_a_collective(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_of_a_collective(RuntimeError("the database's connection timed out"))
    False
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text)


def comes_from_others(error: Exception) -> bool:
    """Whether a stage's error is how Gloo or NCCL tells that another rank did not do its part."""
    words = ("gloo", "connection", "timed out", "timeout", "nccl", "socket")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def short(error: BaseException) -> str:
    """Type and first line: torch's store errors end in a C++ stack."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def private_store(prefix: str) -> dist.Store:
    """The default process group's store, under a prefix of our own.

    Its client serves one thread at a time; a clone would not wait for others, but costs every rank a connection, and
    where names are looked up slowly the store's host stands still for seconds at each.
    """
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
