"""How a failure on one rank becomes the same error on every rank, soon.

Gloo's waits cannot be called off, and a rank that waits for a dead one would wait for the group's timeout (30 minutes,
where nobody set it). So every rank has a thread that looks for an alarm in the store through which the ranks met:

    a stage raises by itself        the rank writes what failed; everybody else reads it and fails with the same words
    a collective raises             somebody else is the cause: the rank calls the roll, every watch answers where its
                                    rank stands, and ``verdict`` names who does not answer, left, or stands behind
    the store does not answer       the rank says so, and what the kernel knows of the store's host (links.py)
    a bucket is long under way      on CUDA, where no collective raises: all are asked whether they are there
                                    (presence.py), and after the limit the roll is called

The first verdict written is the one that all ranks report. The thread asks four times a second while a bucket has been
in flight for half a second, else once a second; with thousands of ranks less often, to spare the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lightning_hybrid.comm.health import tcp_info
from lightning_hybrid.comm.health.diagnosis import RankStatus, diagnose, is_lost, places_of
from lightning_hybrid.comm.health.presence import Presence

STALL_S = 0.5
"""From when on a bucket in flight makes its rank ask for alarms often."""

STORE_LIMIT_S = 5.0
"""How long one word with the store may take before its host counts as gone."""

PATIENCE = 4
"""How often in a row the store may leave a word unanswered: another thread of this process may be using it."""

COMPARE_LIMIT_S = 60.0
"""The same where nothing but patience depends on it."""


class Watchdog:
    """The watchdog of one rank. Started by the constructor, ended by ``leave``.

    Arguments:
        store: keys of this engine only; used from this class alone, as a store's client serves one thread at a time.
        rank, world_size: of the engine.
        standing: where this rank stands now.
        stalled_s: how long the oldest bucket has been in flight; 0 where none is.
        give_up_after_s: how long a bucket may be in flight; None: its collectives tell themselves, as Gloo's do.
        hosts, addresses: names of every rank's host, and under which addresses others know it; for errors.
        on_failure: called once, from a thread of this class, with the error of all ranks.
    """

    def __init__(
        self,
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
        standing: Callable[[], RankStatus],
        stalled_s: Callable[[], float],
        on_failure: Callable[[str], None],
        give_up_after_s: float | None = None,
        hosts: Sequence[str] = (),
        addresses: Sequence[Sequence[str]] = (),
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._standing = standing
        self._stalled_s = stalled_s
        self._on_failure = on_failure
        self._hosts, self._addresses = hosts, addresses
        self._poll_s = max(0.25, world_size / 2000)
        self._idle_poll_s = max(1.0, world_size / 500)
        self._has_failed = False
        self._lock = threading.Lock()  # one word with the store at a time
        self._ended = threading.Event()
        self._give_up_after_s = give_up_after_s
        self._presence = Presence(
            store=store,
            rank=rank,
            world_size=world_size,
            ask=self._ask,
            standing=self._standing_and_signs,
            wait=self._ended.wait,
        )
        self._thread = threading.Thread(target=self._run, name="comm-watch", daemon=True)
        self._thread.start()

    def compare(self, key: str, value: str) -> str:
        """What the first rank to come wrote under ``key``: ``value`` itself, or another rank's."""
        return self._ask(lambda: self._first(key, value), own_limit_s=COMPARE_LIMIT_S)

    def raise_alarm(self, error: str) -> str:
        """Write this rank's error for all; returns the one that holds, which is an earlier one where there is."""
        error = error.rstrip(".") + "." + places_of([self._rank], self._hosts)
        return self._told(lambda: self._settle(error), error)

    def collect_status(self, noticed: str) -> str:
        """Ask where everybody stands and write the verdict for all; returns the one that holds."""

        def settle() -> str:
            return self._settle(diagnose(noticed, self._roll(), self._hosts, self._addresses))

        return self._told(settle, f"comm: {noticed}.")

    def leave(self) -> None:
        """End the thread. Whoever calls the roll later learns that this rank has left.

        After a failure rank 0, which may keep the store, stays until the others have read of it, up to the limit of a
        word with the store.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(STORE_LIMIT_S)
        standing = self._standing()
        left = RankStatus(num_submitted=standing.num_submitted, order=standing.order, place="gone", has_left=True)
        try:
            self._ask(lambda: self._store.set(f"standing/{self._rank}", left.to_json()))
            if self._has_failed and self._rank == 0:
                self._ask(self._let_others_read)
        except Exception:  # nobody may be there any more to read it
            return

    def _let_others_read(self) -> None:
        """Until every rank that answered the roll has read the error; those that did not have as long to come."""
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < STORE_LIMIT_S:
            others = list(range(1, self._world_size))
            if waited_s > 2 * self._idle_poll_s:
                others = [rank for rank in others if self._store.check([f"standing/{rank}"])]
            if all(self._store.check([f"read/{rank}"]) for rank in others):
                return
            time.sleep(0.05)

    def _note_read(self) -> None:
        self._has_failed = True
        self._ask(lambda: self._store.set(f"read/{self._rank}", "1"))

    # ------------------------------------------------------------------------------------------------- the own thread

    def _run(self) -> None:
        since_asked_s, has_answered, num_unanswered = 0.0, False, 0
        while not self._ended.wait(self._poll_s):
            since_asked_s += self._poll_s
            stalled_s = self._stalled_s()
            is_stalled = stalled_s > STALL_S
            if not is_stalled and since_asked_s < self._idle_poll_s and not has_answered:
                continue
            since_asked_s = 0.0
            try:
                if not has_answered and self._ask(lambda: self._store.check(["alarm"])):
                    self._ask(self._answer)
                    has_answered = True
                if has_answered and self._ask(lambda: self._store.check(["error"])):
                    error_of_all = self._ask(lambda: self._store.get("error")).decode()
                    self._note_read()
                    self._on_failure(error_of_all)
                    return
                if self._give_up_after_s is not None and not has_answered and not self._ended.is_set():
                    self._presence.answer()
                    if stalled_s > self._give_up_after_s or self._presence.is_time_to_ask(stalled_s):
                        self._question(stalled_s)
                num_unanswered = 0
            except Exception as error:
                num_unanswered += 1
                if isinstance(error, TimeoutError) and num_unanswered < PATIENCE:
                    continue
                if is_stalled and not self._ended.is_set():
                    self._on_failure(
                        f"{self._of_the_store(error)}. Rank {self._rank} noticed, now {self._standing().place}: "
                        f"{short(error)}.{places_of([0, self._rank], self._hosts)}"
                    )
                    return

    def _question(self, stalled_s: float) -> None:
        """See who is there. Where somebody is not, or all have waited for too long, that is the error of all."""
        noticed = f"rank {self._rank} has waited {stalled_s:.0f} s, now {self._standing().place}"
        assert self._give_up_after_s is not None
        if stalled_s > self._give_up_after_s:
            self.collect_status(noticed)
            return
        roll = self._presence.roll()
        if is_lost(roll) and not self._ended.is_set():
            self._told(lambda: self._settle(diagnose(noticed, roll, self._hosts, self._addresses)), f"comm: {noticed}.")

    # ------------------------------------------------------------------------------------------- words with the store

    def _standing_and_signs(self) -> RankStatus:
        standing, waited_s = self._standing(), self._stalled_s()
        if waited_s:
            standing = replace(
                standing, signs=tcp_info.liveness_by_address(tcp_info.tcp_connections(), waited_s=waited_s)
            )
        return standing

    def _answer(self) -> None:
        self._store.set(f"standing/{self._rank}", self._standing_and_signs().to_json())

    def _of_the_store(self, error: Exception) -> str:
        """What is known of a store that does not answer, and of rank 0 with it."""
        waited_s, port = max(self._stalled_s(), STORE_LIMIT_S), store_port()
        lines = tcp_info.tcp_connections()
        to_host = {line.peer for line in lines if line.port == port}
        signs = tcp_info.liveness_by_address([line for line in lines if line.peer in to_host], waited_s=waited_s)
        sign = tcp_info.most_telling(list(signs.values())) if isinstance(error, TimeoutError) else None
        host = self._hosts[0] if self._hosts else "of rank 0"
        if sign is not None:
            state = f"says nothing: {tcp_info.in_words(sign, host=host)}"
        else:
            state = "is dead, stopped or unreachable" if isinstance(error, TimeoutError) else "is dead or unreachable"
        kept = "rank 0, or the launcher that keeps it,"
        return f"comm: the store through which the ranks met does not answer: {kept} {state}"

    def _first(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value).decode()

    def _settle(self, error: str) -> str:
        self._store.set("alarm", "1")
        return self._first("error", error)

    def _roll(self) -> list[RankStatus | None]:
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
        return [None if key in missing else RankStatus.from_json(self._store.get(key).decode()) for key in keys]

    def _told(self, ask: Callable[[], str], otherwise: str) -> str:
        try:
            told: str = self._ask(ask, own_limit_s=self._idle_poll_s + STORE_LIMIT_S)
        except Exception as error:
            return (
                f"{self._of_the_store(error)}; the other ranks could not be told ({short(error)}). "
                f"{otherwise.removeprefix('comm: ')}{places_of([0], self._hosts)}"
            )
        with suppress(Exception):
            self._note_read()
        return told

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


def store_port() -> int | None:
    """The TCP port of the default process group's store; None where it is no server."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "port", None)
