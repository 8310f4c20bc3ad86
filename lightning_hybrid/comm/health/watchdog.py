"""Watchdog thread that raises the same error on every rank soon after any rank fails.

A wait in Gloo ends only with its group, so a rank that waits for a dead rank would wait for the group's timeout (30
minutes by default). To avoid this, every rank has a thread that checks the rendezvous store for an alarm:

    a stage raises an error         the rank writes the error; other ranks read it and fail with the same message
    a collective raises an error    another rank is the cause: this rank asks for the status of all ranks, every
                                    watchdog answers, and `diagnose` names the rank that does not answer, has closed
                                    its engine, or is behind
    the store does not answer       the rank reports it, with the kernel's view of the store's host (tcp_info.py)
    a bucket is in flight for long  on CUDA, where no collective raises an error: the rank asks whether all ranks are
                                    alive (presence.py), and after the limit it asks for their status

All ranks report the error that was written first. The thread reads the store four times a second if a bucket has been
in flight for half a second, otherwise once a second. With thousands of ranks it reads less often, to limit the load on
the store.
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
from lightning_hybrid.comm.health.backend_errors import comes_from_others
from lightning_hybrid.comm.health.diagnosis import RankStatus, diagnose, is_lost, places_of
from lightning_hybrid.comm.health.presence import Presence, collect

# Seconds that a bucket is in flight before its rank looks for alarms more often.
STALL_S = 0.5

# Seconds that one request to the store may take before the store's host is considered lost.
STORE_LIMIT_S = 5.0

# Number of successive requests that the store may leave unanswered, because another thread may be using its client.
PATIENCE = 4

# Time limit of a comparison in seconds. A comparison does not delay the detection of a failure.
COMPARE_LIMIT_S = 60.0


class Watchdog:
    """Watchdog thread of one rank, which reports failures to all ranks through the rendezvous store.

    The thread runs from `start` to `leave`.

    Args:
        store: Store that contains only keys of this engine. Only this class uses it, because a store's client serves
            one thread at a time.
        rank, world_size: Rank in the engine, and number of ranks. With a single rank, the watchdog only formats errors.
        watched: Object to watch, such as an engine's `FailureLatch`: `status()` returns the status of this rank,
            `stalled_s()` the age of its oldest bucket in flight in seconds, and `trip(error, cause)` fails all buckets
            in flight.
        give_up_after_s: Seconds that a bucket may be in flight. None if collectives raise errors themselves, as with
            Gloo.
        hosts, addresses: Name of every rank's host, and the addresses by which other hosts know it, for messages.
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
        # With thousands of ranks, each rank reads less often, because all ranks share one store.
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
        """Start the watchdog thread, unless there is only one rank."""
        if self._world_size > 1:
            self._thread.start()

    def compare(self, key: str, value: str) -> str:
        """Set `key` in the store if no other rank has set it, and return the key's value."""
        return self._ask(lambda: self._first(key, value), limit_s=COMPARE_LIMIT_S)

    def report(self, noticed: str, cause: Exception) -> None:
        """Report an error in an all-reduce stage of this rank, and fail all ranks' buckets in flight."""
        if comes_from_others(cause):
            error = self.collect_status(noticed)
        else:
            error = self.raise_alarm(f"comm: {noticed}.")
        self._watched.trip(error, cause)

    def raise_alarm(self, error: str) -> str:
        """Publish this rank's error to all ranks, and return the error that all ranks report.

        If another rank has published an error earlier, that error takes precedence.
        """
        error = error.rstrip(".") + "." + places_of([self._rank], self._hosts)
        return self._agreed(lambda: self._write_error(error), error)

    def collect_status(self, noticed: str) -> str:
        """Diagnose a failure by asking all ranks for their status, and return the error for all ranks."""
        if self._world_size == 1:
            return f"comm: {noticed}."

        def write_diagnosis() -> str:
            statuses = self._collect_all_statuses()
            error = diagnose(noticed, statuses, self._hosts, self._addresses)
            return self._write_error(error)

        return self._agreed(write_diagnosis, f"comm: {noticed}.")

    def leave(self) -> None:
        """End the watchdog thread, and inform other ranks that this rank has closed its engine."""
        if self._ended.is_set():
            return
        self._ended.set()
        # No rank can be reached, and each request would take its full time limit.
        if self._is_cut_off:
            return
        was_started = self._thread.ident is not None
        if was_started:
            self._thread.join(STORE_LIMIT_S)

        status = self._watched.status()
        left = RankStatus(
            num_submitted=status.num_submitted, order=status.order, place="gone", has_left=True
        )
        try:
            self._ask(lambda: self._store.set(f"status/{self._rank}", left.to_json()))
            # The store may end with rank 0, so rank 0 waits for a limited time until other ranks have read the error.
            if self._error_of_all and self._rank == 0:
                self._ask(self._wait_for_readers)
        except Exception:  # Other ranks, and the store, may have ended already.
            return

    def _wait_for_readers(self) -> None:
        began_s = monotonic()
        while (waited_s := monotonic() - began_s) < STORE_LIMIT_S:
            readers = list(range(1, self._world_size))
            # By then, every watchdog that is alive has written its status.
            if waited_s > 2 * self._idle_poll_s:
                readers = [rank for rank in readers if self._store.check([f"status/{rank}"])]
            if all(self._store.check([f"read/{rank}"]) for rank in readers):
                return
            time.sleep(0.05)

    def _note_read(self, error_of_all: str) -> None:
        self._error_of_all = error_of_all
        self._ask(lambda: self._store.set(f"read/{self._rank}", "1"))

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Wait for an alarm in the store. After it, write this rank's status, and fail with the error of all ranks."""
        since_asked_s = 0.0
        has_answered = False
        num_unanswered = 0  # number of successive requests without an answer
        while not self._ended.wait(self._poll_s):
            since_asked_s += self._poll_s
            stalled_s = self._watched.stalled_s()
            is_stalled = stalled_s > STALL_S
            if not is_stalled and since_asked_s < self._idle_poll_s and not has_answered:
                continue
            since_asked_s = 0.0

            try:
                if not has_answered and self._ask(lambda: self._store.check(["alarm"])):
                    self._ask(self._write_status)
                    has_answered = True  # from now on, this thread only waits for the error
                # The error follows the alarm, because the rank that raised the alarm first collects all statuses.
                if has_answered and self._ask(lambda: self._store.check(["error"])):
                    self._fail_with_error_of_all()
                    return
                gives_up_at_all = self._give_up_after_s is not None
                if gives_up_at_all and not has_answered and not self._ended.is_set():
                    self._presence.answer()
                    self._ask_if_stalled(stalled_s)
                num_unanswered = 0
            except Exception as error:
                num_unanswered += 1
                # A timeout may be caused by another thread that uses the store. A connection error is final.
                if isinstance(error, TimeoutError) and num_unanswered < PATIENCE:
                    continue
                # If nothing is stalled, this rank does not wait for other ranks.
                if is_stalled and not self._ended.is_set():
                    self._fail_without_store(error)
                    return

    def _fail_with_error_of_all(self) -> None:
        error_of_all = self._ask(lambda: self._store.get("error")).decode()
        self._note_read(error_of_all)
        self._watched.trip(error_of_all)

    def _fail_without_store(self, error: Exception) -> None:
        self._is_cut_off = True
        self._watched.trip(
            f"{self._store_failed(error)}. Rank {self._rank} detected this (state: {self._watched.status().place}; "
            f"error: {short(error)}).{places_of([0, self._rank], self._hosts)}"
        )

    def _ask_if_stalled(self, stalled_s: float) -> None:
        """Ask all ranks for their status if this rank has waited too long, and fail if it has to give up."""
        assert self._give_up_after_s is not None
        gives_up = stalled_s > self._give_up_after_s
        if not gives_up and not self._presence.is_time_to_ask(stalled_s):
            return

        status = self._watched.status()
        noticed = f"rank {self._rank} has waited {stalled_s:.0f} s (state: {status.place})"
        if gives_up:
            self.collect_status(noticed)
            return
        statuses = self._presence.ask_all()
        if is_lost(statuses) and not self._ended.is_set():
            error = diagnose(noticed, statuses, self._hosts, self._addresses)
            self._agreed(lambda: self._write_error(error), f"comm: {noticed}.")

    # ---- requests to the store ---------------------------------------------------------------------------------------

    def _status_and_liveness(self) -> RankStatus:
        status = self._watched.status()
        waited_s = self._watched.stalled_s()
        connections = []
        # Only a rank that waits reads the state of its connections, because each needs a system call.
        if waited_s > 0:
            connections = tcp_info.tcp_connections()
        liveness = tcp_info.liveness_by_address(connections, waited_s=waited_s)
        return replace(status, liveness=liveness)

    def _write_status(self) -> None:
        self._store.set(f"status/{self._rank}", self._status_and_liveness().to_json())

    def _store_failed(self, error: Exception) -> str:
        """Describe a failure of the rendezvous store, including the state of its host if it is known."""
        liveness = self._liveness_of_store()
        host = "of rank 0"
        if self._hosts:
            host = self._hosts[0]

        if not isinstance(error, TimeoutError):
            state = "is dead or unreachable"
        elif liveness is None:
            state = "is dead, stopped or unreachable"
        else:
            state = f"does not respond: {tcp_info.describe_liveness(liveness, host=host)}"
        return (
            "comm: the rendezvous store does not answer: rank 0, or the launcher that runs the store, "
            f"{state}"
        )

    def _liveness_of_store(self) -> tcp_info.Liveness | None:
        """Return the liveness of the store's host, combined over all connections to the host."""
        waited_s = max(self._watched.stalled_s(), STORE_LIMIT_S)
        port = store_port()
        connections = tcp_info.tcp_connections()
        store_addresses = {connection.peer for connection in connections if connection.port == port}
        to_host = [connection for connection in connections if connection.peer in store_addresses]
        liveness = tcp_info.liveness_by_address(to_host, waited_s=waited_s)
        return tcp_info.most_telling(list(liveness.values()))

    def _first(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value).decode()

    def _write_error(self, error: str) -> str:
        self._store.set("alarm", "1")
        return self._first("error", error)  # All ranks report the error that was written first.

    def _collect_all_statuses(self) -> list[RankStatus | None]:
        self._store.set("alarm", "1")
        self._write_status()
        keys = [(f"status/{rank}",) for rank in range(self._world_size)]
        # Time that the slowest watchdog may need to see the alarm. The last term is the time to read all answers.
        limit_s = self._idle_poll_s + 2 * self._poll_s + 0.5 + self._world_size / 250
        return collect(
            self._store,
            keys,
            limit_s=limit_s,
            ask=lambda request: request(),
            wait=threading.Event().wait,
        )

    def _agreed(self, request: Callable[[], str], fallback: str) -> str:
        """Publish an error unless another rank did so before, and return the error for all ranks.

        Args:
            request: Function that writes an error to the store, and returns the error that was written first.
            fallback: Error to report if the store does not answer.
        """
        try:
            if self._error_of_all:  # The store may have ended with rank 0 in the meantime.
                return self._error_of_all
            if self._is_cut_off:
                raise TimeoutError("the rendezvous store did not answer an earlier request")
            limit_s = self._idle_poll_s + STORE_LIMIT_S + self._world_size / 250
            error_of_all: str = self._ask(request, limit_s=limit_s)
        except Exception as error:
            self._is_cut_off = True
            return (
                f"{self._store_failed(error)}. The other ranks could not be informed ({short(error)}). "
                f"{fallback.removeprefix('comm: ')}{places_of([0], self._hosts)}"
            )
        with suppress(Exception):
            self._note_read(error_of_all)
        return error_of_all

    def _ask(self, request: Callable[[], Any], *, limit_s: float = STORE_LIMIT_S) -> Any:
        # The request runs in its own thread, because it may never return if the store's host is unreachable.
        answers: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with self._lock:
                    answers.append(request())
            except BaseException as error:
                errors.append(error)

        # If the store never answers, the thread is left behind.
        thread = threading.Thread(target=run, name="comm-ask", daemon=True)
        thread.start()
        thread.join(limit_s)
        if errors:
            raise errors[0]
        if not answers:
            raise TimeoutError(f"the rendezvous store did not answer within {limit_s:g} s")
        return answers[0]


def short(error: BaseException) -> str:
    """Return the type and the first line of an error.

    The C++ stack trace in torch's store errors is omitted.
    """
    first_line = ""
    lines = str(error).splitlines()
    if lines:
        first_line = lines[0]
    return f"{type(error).__name__}: {first_line}"


def private_store(prefix: str) -> dist.Store:
    """Return the default process group's store, with a prefix that separates the keys of engines."""
    # The store's client serves one thread at a time. A clone would not wait for other threads, but it costs a
    # connection per rank. If host names resolve slowly, the store's host blocks for seconds at each connection.
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def store_port() -> int | None:
    """Return the TCP port of the default process group's store, or None if it is not a TCP store."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "port", None)
