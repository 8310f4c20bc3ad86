"""One rank's part in the membership of an elastic run."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from lightning_hybrid.elastic.membership.connections import (
    TICKS_WITHIN_HOST,
    Connection,
    SocketThread,
    split,
)
from lightning_hybrid.elastic.membership.host import Host
from lightning_hybrid.elastic.membership.view import (
    IsolatedError,
    Member,
    RefusedError,
    Settings,
    View,
    members_of,
)

# Time between two messages of a rank that waits for a view. Our choice: hosts that are there meet within 10 s.
WAIT_MESSAGE_S = 15.0


def end_process(why: str) -> None:
    """End this process at once: its host is lost as a whole."""
    print(f"elastic: {why}; this rank ends too", file=sys.stderr, flush=True)
    os._exit(75)


class Follower(SocketThread):
    """Another rank of a host: it speaks with the first alone."""

    _first: Connection | None = None
    _has_left = False
    _seen_s = 0.0
    _committed: int | None = (
        None  # with which this rank has come, before there was somebody to say it to
    )

    def come(self, committed: int) -> None:
        """Say that this rank waits for a view."""
        self._committed = committed
        self._say_it()

    def end_view(self, why: str) -> None:
        """Say that the present view has ended."""
        if self._first:
            self._first.send(kind="end", why=why)

    def leave(self) -> None:
        """Leave as planned."""
        self._has_left = True
        if self._first:
            self._first.send(kind="bye")

    def waits_for(self) -> str:
        """Say what the next view waits for."""
        return "the first rank of this host, which speaks with the others"

    def _say_it(self) -> None:
        if self._first and self.key and self._committed is not None:
            self._first.send(kind="come", committed=self._committed)
            self._committed = None

    def _hear(self, message: dict[str, Any]) -> None:
        self._seen_s = monotonic()
        kind = message["kind"]
        if kind == "hello":
            self.key = message["key"]
            self._say_it()
        elif kind != "alive":
            # From then on the first rank may end, each time for a reason of its own.
            self._has_left = self._has_left or kind in ("bye", "isolated", "refused")
        if kind not in ("hello", "alive", "bye"):
            self._deliver(kind, message["value"])

    def _has_closed(self, is_dead: bool) -> None:
        self._first = None
        if self.key and not self._has_left:
            self._deliver("lost", "the first rank of this host is gone")

    @property
    def pause_s(self) -> float:
        """Time between two ticks."""
        return self._settings.tick_s * (TICKS_WITHIN_HOST if self.key else 1)

    def tick(self, now: float, is_late: bool) -> None:
        """Look for the first rank, or whether it gives signs of life."""
        if self._first is None and not self.key:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self._settings.path)
            except OSError:  # it has not started yet
                sock.close()
                return
            self._first = self.open(sock)
            self._seen_s = now
            self._first.trust("the first rank", self._hear, self._has_closed)
            self._first.send(kind="hello", local=self._settings.local)
        elif self._first:
            self._first.send(kind="alive")
            if is_late:
                self._seen_s = now
            elif (
                now - self._seen_s > (limit_s := 2 * self._settings.silent_s) and not self._has_left
            ):
                self._deliver("lost", f"the first rank of this host was silent for {limit_s:g} s")


class Membership:
    """Membership of a run, seen by one rank. Its thread runs from the constructor to `close`.

    Args:
        on_change: called in a thread of its own, once a view, with its number and why it ends: a loss, or a host that
            joins. It may be called before `next_view` has returned that view, and after it has returned the next.
        make_store: called on the first rank of each host before it waits for a view; returns the "ip:port" of a fresh
            store. That of one host serves for the view.
        on_own_host_lost: called where another rank of this host is gone; it is not meant to return.
        meet, settings: as for `Settings`.
    """

    def __init__(
        self,
        *,
        meet: Sequence[str],
        on_change: Callable[[int, str], None],
        make_store: Callable[[], str],
        on_own_host_lost: Callable[[str], None] = end_process,
        **settings: Any,
    ) -> None:
        meet = [f"{socket.gethostbyname(ip)}:{port}" for ip, port in map(split, meet)]
        self._settings = Settings(meet=meet, **settings)
        self._on_change = on_change
        self._make_store = make_store
        self._on_own_host_lost = on_own_host_lost
        self._changed = threading.Condition()
        self._view: View | None = None
        self._error: Exception | None = None
        self._is_waiting = False  # this rank has come, and there is no view yet
        self._has_told = True  # the caller that the present view ended
        part = Follower if self._settings.local else Host
        self._part: Host | Follower = part(self._settings, self._deliver)
        self._part.start()

    @property
    def me(self) -> Member:
        """The member that is this rank, once `enter` has returned."""
        return members_of([self._part.key], self._settings.ranks_per_host)[self._settings.local]

    def next_view(
        self,
        committed: int,
        *,
        timeout_s: float,
        on_wait: Callable[[float, str], None] | None = None,
    ) -> View:
        """Wait for the view after the present one, which ended. Every rank of every living host must call it.

        `committed`: steps that this rank has; -1: it has not taken the state yet that the former view promised it.
        `on_wait`: called every `WAIT_MESSAGE_S` with how long this rank has waited, and what for.

        Raises:
            TimeoutError: no view in time; says what was waited for.
            IsolatedError: the others go on without this host, or none may.
            RefusedError: the token of the run that it would join is another.
        """
        with self._changed:
            self._is_waiting = True
        self._part.post(
            self._part.come, committed, *([] if self._settings.local else [self._make_store()])
        )
        with self._changed:
            self._wait_for_view(timeout_s, on_wait)
            if self._error:
                raise self._error
            if self._is_waiting or self._view is None:
                raise TimeoutError(
                    f"elastic: no group of hosts was formed within `timeout` (={timeout_s:g} s). Waited for "
                    f"{self._part.waits_for()}. Start the missing hosts, or raise `timeout`."
                )
            return self._view

    def _wait_for_view(
        self, timeout_s: float, on_wait: Callable[[float, str], None] | None
    ) -> None:
        """Wait, with the lock held, until there is a view or an error, or the time is over."""
        began_s = monotonic()
        while True:
            waited_s = monotonic() - began_s
            next_wait_s = min(WAIT_MESSAGE_S, timeout_s - waited_s)
            if self._changed.wait_for(
                lambda: self._error or not self._is_waiting, max(next_wait_s, 0.0)
            ):
                return
            waited_s = monotonic() - began_s
            if waited_s >= timeout_s:
                return
            if on_wait is not None:
                on_wait(waited_s, self._part.waits_for())

    def end_view(self, why: str) -> None:
        """End the present view everywhere: this rank cannot be in it. `next_view` does so too, once it is called."""
        self._part.post(self._part.end_view, why)

    enter = next_view  # the first, or that of a run that is there; `committed` is of a checkpoint

    def say_goodbye(self) -> None:
        """Tell the others that this rank ends as planned. Closed sockets are no loss then."""
        self._part.post(self._part.leave)

    def close(self) -> None:
        """End the thread and close all sockets."""
        self._part.close()

    def _deliver(self, what: str, value: Any) -> None:
        """Take what the thread of the sockets has to say."""
        why = ""
        with self._changed:
            if what == "view":
                self._view = View(
                    number=value["to"],
                    members=members_of(value["next"], self._settings.ranks_per_host),
                    store=value["store"],
                    target=value["target"],
                    **{name: tuple(value[name]) for name in ("donors", "behind", "reasons")},
                )
                self._is_waiting = self._has_told = False
            elif what == "isolated":
                self._error = IsolatedError(f"elastic: this host may not go on: {value}")
                why = value
            elif what == "refused":
                self._error = RefusedError(f"elastic: {value}")
            elif what == "change":
                why = value
            if self._is_waiting or self._has_told:
                why = ""
            self._has_told = self._has_told or bool(why)
            number = self._view.number if self._view else -1
            self._changed.notify_all()
        if what == "lost":
            self._on_own_host_lost(value)
        elif why:
            told = threading.Thread(
                target=self._on_change, args=(number, why), name="membership-change", daemon=True
            )
            told.start()
