"""Membership of one rank in an elastic run."""

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

# Seconds between two log messages of a rank that waits for a view. We chose this value because hosts that are present
# meet within 10 s.
WAIT_MESSAGE_S = 15.0


def end_process(why: str) -> None:
    """Exit this process immediately, because another rank of its host has died.

    The whole host is considered lost.
    """
    print(f"elastic: {why}, so this rank exits too.", file=sys.stderr, flush=True)
    os._exit(75)


class Follower(SocketThread):
    """Membership thread of any rank except the first rank of a host.

    The thread exchanges messages only with the first rank of its host.
    """

    _first: Connection | None = None
    _has_left = False
    _seen_s = 0.0
    # Completed steps of this rank, until they are sent to the first rank.
    _committed: int | None = None

    def come(self, committed: int) -> None:
        """Tell the first rank that this rank waits for the next membership view.

        Args:
            committed: Number of steps that this rank has completed, or -1 if it lacks the state of the run.
        """
        self._committed = committed
        self._say_it()

    def end_view(self, why: str) -> None:
        """Ask the first rank to end the current membership view."""
        if self._first:
            self._first.send(kind="end", why=why)

    def leave(self) -> None:
        """Leave the run without an error, and notify the first rank of this host."""
        self._has_left = True
        if self._first:
            self._first.send(kind="bye")

    def waits_for(self) -> str:
        """Describe the ranks that the next membership view is waiting for."""
        return "the first rank of this host, which communicates with the other hosts"

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
            # After one of these messages, the first rank may exit without being considered lost.
            self._has_left = self._has_left or kind in ("bye", "isolated", "refused")
        if kind not in ("hello", "alive", "bye"):
            self._deliver(kind, message["value"])

    def _has_closed(self, is_dead: bool) -> None:
        self._first = None
        if self.key and not self._has_left:
            self._deliver("lost", "the first rank of this host has exited")

    @property
    def pause_s(self) -> float:
        """Time between two calls of `tick`, in seconds."""
        return self._settings.tick_s * (TICKS_WITHIN_HOST if self.key else 1)

    def tick(self, now: float, is_late: bool) -> None:
        """Connect to the first rank of this host, or exchange heartbeats with it."""
        if self._first is None and not self.key:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self._settings.path)
            except OSError:  # the first rank has not started yet
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
    """Interface of one rank to the membership protocol of an elastic run.

    A background thread runs from construction to `close`.

    Args:
        meet: Addresses "ip:port" or "name:port" at which hosts find each other, as in `Settings`.
        on_change: Callback for the end of a view, called once per view in a separate thread, with the view's number and
            the reason for its end: a loss, or a host that joins. It may be called before `next_view` has returned that
            view, or after it has returned the next view.
        make_store: Function that creates a TCP store and returns its "ip:port". The first rank of each host calls it
            before it waits for a view. A view uses the store of one host.
        on_own_host_lost: Callback for the death of another rank of this host. It should not return.
        **settings: As in `Settings`.
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
        self._is_waiting = False  # whether this rank waits for a view
        self._has_told = True  # whether the caller knows that the current view has ended
        part = Follower if self._settings.local else Host
        self._part: Host | Follower = part(self._settings, self._deliver)
        self._part.start()

    @property
    def me(self) -> Member:
        """Entry of this rank in a membership view, available once `enter` has returned."""
        return members_of([self._part.key], self._settings.ranks_per_host)[self._settings.local]

    def next_view(
        self,
        committed: int,
        *,
        timeout_s: float,
        on_wait: Callable[[float, str], None] | None = None,
    ) -> View:
        """Wait for the next membership view after the current one has ended, and return it.

        Collective: every rank of every living host must call it.

        Args:
            committed: Number of steps that this rank has completed, or -1 if it has not yet received the state that it
                should have received in the previous view.
            timeout_s: Maximum time to wait, in seconds.
            on_wait: Callback that is called every `WAIT_MESSAGE_S` seconds, with the seconds that this rank has waited
                and a description of what it waits for.

        Raises:
            TimeoutError: There was no view in time. The error names the missing ranks or hosts.
            IsolatedError: The other hosts continue without this host, or no host may continue.
            RefusedError: The run that this host would join has a different token.
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
                    f"{self._part.waits_for()}. Start the missing hosts, or increase `timeout`."
                )
            return self._view

    def _wait_for_view(
        self, timeout_s: float, on_wait: Callable[[float, str], None] | None
    ) -> None:
        """Wait for a membership view or an error, or until the timeout expires.

        The caller holds the lock.
        """
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
        """End the current membership view on all hosts, because this rank cannot take part in it.

        `next_view` also ends the current view when it is called.
        """
        self._part.post(self._part.end_view, why)

    enter = next_view  # for the first view of this rank, with the number of steps in its checkpoint

    def say_goodbye(self) -> None:
        """Inform the other ranks that this rank exits without an error.

        The other ranks then do not treat its closed sockets as a loss.
        """
        self._part.post(self._part.leave)

    def close(self) -> None:
        """Stop the thread and close all sockets."""
        self._part.close()

    def _deliver(self, what: str, value: Any) -> None:
        """Process an event from the socket thread, such as a new membership view or the loss of a rank."""
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
                self._error = IsolatedError(
                    f"elastic: this host cannot continue: {value}. If other hosts continue, restart this host to join "
                    "them. Otherwise, resume from a checkpoint."
                )
                why = value
            elif what == "refused":
                self._error = RefusedError(f"elastic: {value}.")
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
