"""One rank's part in the membership of an elastic run."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from lightning_hybrid.comm.membership.connection import Connection, split
from lightning_hybrid.comm.membership.event_loop import EventLoop
from lightning_hybrid.comm.membership.host import Deliver, Host
from lightning_hybrid.comm.membership.view import IsolatedError, Member, RefusedError, Settings, View, members_of


def end_process(why: str) -> None:
    """End this process at once: its host is lost as a whole."""
    print(f"elastic: {why}; this rank ends too", file=sys.stderr, flush=True)
    os._exit(75)


class Follower:
    """Another rank of a host: it speaks with the first alone. `deliver` is as for `Host`, without "store"."""

    def __init__(self, settings: Settings, deliver: Deliver) -> None:
        self._settings, self._deliver = settings, deliver
        self.key = ""
        self._first: Connection | None = None
        self._has_left = False
        self._seen_s = 0.0
        self._committed: int | None = None  # with which this rank has come, before there was somebody to say it to
        self.loop = EventLoop(
            "membership",
            tick_s=settings.tick_s,
            late_s=settings.silent_s / 2,
            on_message=self._message,
            on_end=self._ended,
            on_tick=self._tick,
            on_crash=lambda error: deliver("isolated", f"its own thread failed: {error!r}"),
        )

    def come(self, committed: int) -> None:
        """Say that this rank waits for a view."""

        def come() -> None:
            self._committed = committed
            self._say_it()

        self.loop.post(come)

    def say_goodbye(self) -> None:
        """Leave as planned."""

        def leave() -> None:
            self._has_left = True
            if self._first:
                self.loop.send(self._first, kind="bye")

        self.loop.post(leave)

    def waits_for(self) -> str:
        """Say what the next view waits for."""
        return "the first rank of this host, which speaks with the others"

    def _say_it(self) -> None:
        if self._first and self.key and self._committed is not None:
            self.loop.send(self._first, kind="come", committed=self._committed)
            self._committed = None

    def _message(self, connection: Connection, message: dict[str, Any]) -> None:
        self._seen_s, kind = monotonic(), message["kind"]
        if kind == "hello":
            self.key = message["key"]
            self._say_it()
        elif kind != "alive":
            # From then on the first rank may end, each time for a reason of its own.
            self._has_left = self._has_left or kind in ("bye", "isolated", "refused")
        if kind not in ("hello", "alive", "bye"):
            self._deliver(kind, message["value"])

    def _ended(self, connection: Connection, is_dead: bool) -> None:
        self._first = None
        if self.key and not self._has_left:
            self._deliver("lost", "the first rank of this host is gone")

    def _tick(self, is_late: bool) -> None:
        if self._first is None and not self.key:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self._settings.path)
            except OSError:  # it has not started yet
                sock.close()
                return
            self._first = self.loop.add(Connection(sock))
            self._first.is_trusted = True
            self.loop.send(self._first, kind="hello", local=self._settings.local)
            self._seen_s = monotonic()
        elif self._first:
            self.loop.send(self._first, kind="alive")
            if is_late:
                self._seen_s = monotonic()
            elif monotonic() - self._seen_s > self._settings.silent_s and not self._has_left:
                self._deliver("lost", f"the first rank of this host was silent for {self._settings.silent_s:g} s")


class Membership:
    """Who takes part, seen by one rank. Its thread runs from the constructor to `close`.

    Args:
        host: name of this host, of no other of the run.
        local, ranks_per_host: this rank on its host.
        meet: "ip:port" of where starting hosts ask for the run, in the same order on all. The holder of the first is
            the arbiter where a cut link leaves two halves.
        min_hosts, max_hosts: fewer do not go on; more wait.
        token: of what must be equal on all hosts.
        on_change: called in a thread of its own, once a view, with why the view ends: a loss, or a host that joins. It
            may be called before `next_view` has returned that view; it is not, where this rank waits already.
        make_store: called where a view is made, in the thread that waits for it; returns its "ip:port".
        silent_s: after how long without a sign of life a host is lost.
        wait_s: how long the first meeting waits for more hosts than `min_hosts`.
        on_own_host_lost: called where another rank of this host is gone; it is not meant to return.
    """

    def __init__(
        self,
        *,
        host: str,
        local: int,
        ranks_per_host: int,
        meet: Sequence[str],
        min_hosts: int,
        max_hosts: int,
        token: str,
        on_change: Callable[[str], None],
        make_store: Callable[[], str],
        silent_s: float = 2.0,
        wait_s: float = 10.0,
        on_own_host_lost: Callable[[str], None] = end_process,
    ) -> None:
        self._settings = Settings(
            host=host,
            local=local,
            ranks_per_host=ranks_per_host,
            meet=tuple(f"{socket.gethostbyname(ip)}:{port}" for ip, port in map(split, meet)),
            min_hosts=min_hosts,
            max_hosts=max_hosts,
            token=token,
            silent_s=silent_s,
            wait_s=wait_s,
        )
        self._on_change, self._make_store, self._on_own_host_lost = on_change, make_store, on_own_host_lost
        self._changed = threading.Condition()
        self._view: View | None = None
        self._error: Exception | None = None
        self._is_waiting = False  # this rank has come, and there is no view yet
        self._wants_store = False
        self._has_told = True  # the caller that the present view ended
        part = Follower if local else Host
        self._part: Host | Follower = part(self._settings, self._deliver)
        self._part.loop.start()

    @property
    def me(self) -> Member:
        """The member that is this rank, once `enter` has returned."""
        return members_of([self._part.key], self._settings.ranks_per_host)[self._settings.local]

    @property
    def view(self) -> View | None:
        """The latest view of this rank."""
        return self._view

    def enter(self, committed: int, *, timeout_s: float) -> View:
        """Wait for the first view, or join the run that is there. `committed`: steps, as of a checkpoint.

        Raises:
            TimeoutError: no view in time; says what was waited for.
            RefusedError: the token of the run is another.
            IsolatedError: left out while it joined.
        """
        return self.next_view(committed, timeout_s=timeout_s)

    def next_view(self, committed: int, *, timeout_s: float) -> View:
        """Wait for the view after the present one, which ended. Every rank of every living host must call it.

        `committed`: steps that this rank has; -1: it has not taken the state yet that the former view promised it.

        Raises:
            TimeoutError: no view in time; says what was waited for.
            IsolatedError: the others go on without this host, or none may.
        """
        ends_s = monotonic() + timeout_s
        with self._changed:
            self._is_waiting = True
        self._part.come(committed)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._error or not self._is_waiting or self._wants_store, ends_s - monotonic()
                )
                if self._error:
                    raise self._error
                if not self._is_waiting and self._view:
                    return self._view
                makes_store, self._wants_store = self._wants_store, False
            if makes_store and isinstance(self._part, Host):
                self._part.give_store(self._make_store())
            elif monotonic() >= ends_s:
                raise TimeoutError(f"elastic: no view in {timeout_s:g} s; waited for {self._part.waits_for()}")

    def fds(self) -> set[int]:
        """Return the numbers of the sockets of this object."""
        return self._part.loop.fds()

    def say_goodbye(self) -> None:
        """Tell the others that this rank ends as planned; closed sockets are no loss then."""
        self._part.say_goodbye()

    def close(self) -> None:
        """End the thread and close all sockets."""
        self._part.loop.close()

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
            elif what == "store":
                self._wants_store = True
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
            self._changed.notify_all()
        if what == "lost":
            self._on_own_host_lost(value)
        elif why:
            threading.Thread(target=self._on_change, args=(why,), name="membership-change", daemon=True).start()
