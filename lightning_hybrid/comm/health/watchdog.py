"""How a failure on one rank becomes the same error on every rank, soon.

A wait of Gloo's ends with its group alone, and a rank that waits for a dead one would wait for the group's timeout (30
minutes by default). So every rank has a thread that looks for an alarm in the store through which the ranks met:

    a stage raises by itself        the rank writes what failed; all others read it and fail with the same words
    a collective raises             another rank is the cause: this one asks for the status of all, every watchdog
                                    answers, and `diagnose` names who does not answer, left, or is behind
    the store does not answer       the rank says so, and what the kernel knows of the store's host (tcp_info.py)
    a bucket is long in flight      on CUDA, where no collective raises: all are asked whether they are there
                                    (presence.py), and after the limit for their status

The first error written is the one that all ranks report. The thread asks four times a second while a bucket has been in
flight for half a second, else once a second; with thousands of ranks less often, to spare the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

import torch.distributed as dist

from lightning_hybrid.comm.health import tcp_info
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.health.diagnosis import RankStatus, diagnose, is_lost, places_of
from lightning_hybrid.comm.health.presence import Presence, collect

# From when on a bucket in flight makes its rank ask for alarms often.
STALL_S = 0.5

# How long one request to the store may take before its host counts as gone.
STORE_LIMIT_S = 5.0

# How many requests in a row the store may leave unanswered: another thread of this process may be using it.
PATIENCE = 4

# How long a comparison may take: no failure is noticed later for it.
COMPARE_LIMIT_S = 60.0


class Watchdog:
    """The watchdog of one rank, and its way to report errors to all ranks. Its thread runs from `start` to `leave`.

    Args:
        store: keys of this engine only; used from this class alone, as a store's client serves one thread at a time.
        rank, world_size: of the engine. A rank that is alone has nothing to watch: errors are only put into words.
        watched: such as an engine's `FailureLatch`: `status()` is where this rank stands, `stalled_s()` how long its
            oldest bucket has been in flight, and `trip(error, cause)` fails what is.
        give_up_after_s: how long a bucket may be in flight; None: collectives raise by themselves, as over Gloo.
        hosts, addresses: names of every rank's host, and under which addresses others know it; for errors.
    """

    def __init__(
        self,
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
        watched: Any,
        give_up_after_s: float | None = None,
        hosts: Sequence[str] = (),
        addresses: Sequence[Sequence[str]] = (),
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._watched = watched
        self._hosts = hosts
        self._addresses = addresses
        # All ranks ask one store: with thousands of them less often, to spare it.
        self._poll_s = max(0.25, world_size / 2000)
        self._idle_poll_s = max(1.0, world_size / 500)
        self._error_of_all = ""
        self._is_cut_off = False
        self._lock = threading.Lock()  # one request to the store at a time
        self._ended = threading.Event()
        self._give_up_after_s = give_up_after_s
        self._presence = Presence(
            store=store,
            rank=rank,
            world_size=world_size,
            ask=self._ask,
            status=self._status_and_liveness,
            wait=self._ended.wait,
        )
        self._thread = threading.Thread(target=self._run, name="comm-watch", daemon=True)

    def start(self) -> None:
        """Start the thread, unless this rank is alone."""
        if self._world_size > 1:
            self._thread.start()

    def compare(self, key: str, value: str) -> str:
        """Return what the first rank to come wrote under `key`: `value` itself, or another rank's."""
        return self._ask(lambda: self._first(key, value), own_limit_s=COMPARE_LIMIT_S)

    def report(self, noticed: str, cause: Exception) -> None:
        """Fail on every rank because a stage raised here."""
        # This rank's own error, or a diagnosis where the error is how a backend says that another rank failed.
        is_elsewhere = comes_from_others(cause)
        error = (
            self.collect_status(noticed) if is_elsewhere else self.raise_alarm(f"comm: {noticed}.")
        )
        self._watched.trip(error, cause)

    def raise_alarm(self, error: str) -> str:
        """Write this rank's error for all; returns the one that holds, which is an earlier one if there is one."""
        error = (
            error.rstrip(".") + "." + places_of([self._rank], self._hosts)
        )  # with the host of this rank
        return self._agreed(lambda: self._write_error(error), error)

    def collect_status(self, noticed: str) -> str:
        """Ask where every rank stands and write the diagnosis for all; returns the one that holds."""
        if self._world_size == 1:
            return f"comm: {noticed}."

        def diagnosis() -> str:
            return self._write_error(
                diagnose(noticed, self._all_status(), self._hosts, self._addresses)
            )

        return self._agreed(diagnosis, f"comm: {noticed}.")

    def leave(self) -> None:
        """End the thread. Ranks that ask for the status of all later learn that this one has left."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._is_cut_off:  # no rank can be reached, and each request would take its limit
            return
        if self._thread.ident is not None:  # it was started
            self._thread.join(STORE_LIMIT_S)
        status = self._watched.status()
        left = RankStatus(
            num_submitted=status.num_submitted, order=status.order, place="gone", has_left=True
        )
        try:
            self._ask(lambda: self._store.set(f"status/{self._rank}", left.to_json()))
            # The store may end with rank 0: it stays until others have read the error, for a limited time.
            if self._error_of_all and self._rank == 0:
                self._ask(self._let_others_read)
        except Exception:  # there may be no rank any more to read it
            return

    def _let_others_read(self) -> None:
        began_s = monotonic()
        while (waited_s := monotonic() - began_s) < STORE_LIMIT_S:
            others = list(range(1, self._world_size))
            if waited_s > 2 * self._idle_poll_s:  # by then every living watchdog has looked
                others = [rank for rank in others if self._store.check([f"status/{rank}"])]
            if all(self._store.check([f"read/{rank}"]) for rank in others):
                return
            time.sleep(0.05)

    def _note_read(self, error_of_all: str) -> None:
        self._error_of_all = error_of_all
        self._ask(lambda: self._store.set(f"read/{self._rank}", "1"))

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        since_asked_s = 0.0
        has_answered = False
        num_unanswered = 0
        while not self._ended.wait(self._poll_s):
            since_asked_s += self._poll_s
            stalled_s = self._watched.stalled_s()
            is_stalled = stalled_s > STALL_S
            if not is_stalled and since_asked_s < self._idle_poll_s and not has_answered:
                continue
            since_asked_s = 0.0
            try:
                if not has_answered and self._ask(lambda: self._store.check(["alarm"])):
                    self._ask(self._answer)
                    has_answered = True  # from now on only the error is waited for
                # The error comes after the alarm: the rank that raised it first collects every status, and then writes.
                if has_answered and self._ask(lambda: self._store.check(["error"])):
                    error_of_all = self._ask(lambda: self._store.get("error")).decode()
                    self._note_read(error_of_all)
                    self._watched.trip(error_of_all)
                    return
                if (
                    self._give_up_after_s is not None
                    and not has_answered
                    and not self._ended.is_set()
                ):
                    self._presence.answer()
                    if stalled_s > self._give_up_after_s or self._presence.is_time_to_ask(
                        stalled_s
                    ):
                        self._ask_who_is_there(stalled_s)
                num_unanswered = 0
            except Exception as error:
                num_unanswered += 1  # of requests in a row
                # One silent request may be another thread's doing; an error of the connection is final.
                if isinstance(error, TimeoutError) and num_unanswered < PATIENCE:
                    continue
                if (
                    is_stalled and not self._ended.is_set()
                ):  # else nothing here waits for the others
                    self._is_cut_off = True
                    self._watched.trip(
                        f"{self._store_failed(error)}. Rank {self._rank} noticed, now {self._watched.status().place}: "
                        f"{short(error)}.{places_of([0, self._rank], self._hosts)}"
                    )
                    return

    def _ask_who_is_there(self, stalled_s: float) -> None:
        noticed = (
            f"rank {self._rank} has waited {stalled_s:.0f} s, now {self._watched.status().place}"
        )
        assert self._give_up_after_s is not None
        if stalled_s > self._give_up_after_s:
            self.collect_status(noticed)
            return
        found = self._presence.ask_all()
        if is_lost(found) and not self._ended.is_set():
            error = diagnose(noticed, found, self._hosts, self._addresses)
            self._agreed(lambda: self._write_error(error), f"comm: {noticed}.")

    # ---- requests to the store ---------------------------------------------------------------------------------------

    def _status_and_liveness(self) -> RankStatus:
        status = self._watched.status()
        waited_s = self._watched.stalled_s()
        # Connections are looked at only where this rank waits: it costs a system call for each.
        found = tcp_info.tcp_connections() if waited_s else []
        return replace(status, liveness=tcp_info.liveness_by_address(found, waited_s=waited_s))

    def _answer(self) -> None:
        self._store.set(f"status/{self._rank}", self._status_and_liveness().to_json())

    def _store_failed(self, error: Exception) -> str:
        waited_s = max(self._watched.stalled_s(), STORE_LIMIT_S)
        port = store_port()
        connections = tcp_info.tcp_connections()
        # All connections to the store's host, not that of the store alone: any of them shows that the host lives.
        to_host = {each.peer for each in connections if each.port == port}
        found = tcp_info.liveness_by_address(
            [each for each in connections if each.peer in to_host], waited_s=waited_s
        )
        liveness = (
            tcp_info.most_telling(list(found.values())) if isinstance(error, TimeoutError) else None
        )
        host = self._hosts[0] if self._hosts else "of rank 0"
        if liveness is not None:
            state = f"says nothing: {tcp_info.describe_liveness(liveness, host=host)}"
        else:
            state = (
                "is dead, stopped or unreachable"
                if isinstance(error, TimeoutError)
                else "is dead or unreachable"
            )
        holder = "rank 0, or the launcher that keeps it,"
        return f"comm: the store through which the ranks met does not answer: {holder} {state}"

    def _first(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value).decode()

    def _write_error(self, error: str) -> str:
        self._store.set("alarm", "1")
        return self._first("error", error)  # the first error written holds for all

    def _all_status(self) -> list[RankStatus | None]:
        self._store.set("alarm", "1")
        self._answer()
        keys = [(f"status/{rank}",) for rank in range(self._world_size)]
        # As long as the slowest watchdog may take to look; the last term is the time to read so many answers.
        limit_s = self._idle_poll_s + 2 * self._poll_s + 0.5 + self._world_size / 250
        return collect(
            self._store,
            keys,
            limit_s=limit_s,
            ask=lambda request: request(),
            wait=threading.Event().wait,
        )

    def _agreed(self, ask: Callable[[], str], otherwise: str) -> str:
        try:
            if self._error_of_all:  # rank 0 may be gone since, and the store with it
                return self._error_of_all
            if self._is_cut_off:
                raise TimeoutError("no answer before")
            error_of_all: str = self._ask(
                ask, own_limit_s=self._idle_poll_s + STORE_LIMIT_S + self._world_size / 250
            )
        except Exception as error:
            self._is_cut_off = True
            return (
                f"{self._store_failed(error)}; the other ranks could not be told ({short(error)}). "
                f"{otherwise.removeprefix('comm: ')}{places_of([0], self._hosts)}"
            )
        with suppress(Exception):
            self._note_read(error_of_all)
        return error_of_all

    def _ask(self, ask: Callable[[], Any], *, own_limit_s: float = STORE_LIMIT_S) -> Any:
        # In a thread of its own: a request to a store whose host is cut off may never come back.
        answers: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with self._lock:
                    answers.append(ask())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(
            target=run, name="comm-ask", daemon=True
        )  # left behind if the store never answers
        thread.start()
        thread.join(own_limit_s)
        if errors:
            raise errors[0]
        if not answers:
            raise TimeoutError(f"no answer within {own_limit_s:g} s")
        return answers[0]


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether an error comes from a backend's collective or from the store, and not from the user's code.

    >>> is_of_a_collective(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_of_a_collective(RuntimeError("the database's connection timed out"))
    False
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
    )


def failed_wait(error: BaseException | None) -> BaseException | None:
    """Return the error of a collective, or of all ranks, that this is or was raised from; None where there is none."""
    while error is not None and not (is_of_a_collective(error) or "comm: " in str(error)):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


def comes_from_others(error: Exception) -> bool:
    """Return whether an error is how Gloo, NCCL, a store or our own check say that another rank is the cause."""
    # By its words: both backends raise plain RuntimeErrors, and Gloo those of a store ("Broken pipe") as they are.
    words = ("gloo", "connection", "timed out", "timeout", "nccl", "socket")
    is_of_backend = isinstance(error, RuntimeError) and any(
        word in str(error).lower() for word in words
    )
    return is_of_backend or isinstance(
        error, OrderError | dist.DistNetworkError | dist.DistStoreError
    )


def short(error: BaseException) -> str:
    """Return type and first line of an error: torch's store errors end in a C++ stack."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def private_store(prefix: str) -> dist.Store:
    """Return the default process group's store, under a prefix of our own."""
    # Its client serves one thread at a time. A clone would not wait for others, but costs every rank a connection, and
    # where names are looked up slowly the store's host stands still for seconds at each.
    return dist.PrefixStore(
        prefix, dist.distributed_c10d._get_default_store()
    )  # keys of other engines do not collide


def store_port() -> int | None:
    """Return the TCP port of the default process group's store; None where it is no server."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "port", None)
