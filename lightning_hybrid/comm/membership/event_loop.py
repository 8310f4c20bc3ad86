"""One thread for all sockets of a rank: what comes is handed to its owner, and a tick at fixed times."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from lightning_hybrid.comm.membership.connection import DEATH, Connection, MalformedError

log = logging.getLogger(__name__)

# How long a connection may stay without a greeting, and how long `close` waits until the last words are sent.
GREETING_S = 10.0
LAST_WORDS_S = 0.5


class EventLoop:
    """Reads, writes and ticks, until `close`.

    Args:
        name: of the thread.
        tick_s: time between two calls of `on_tick`.
        on_message: gets each message; MalformedError and errors of missing or wrong fields close the connection.
        on_end: gets a connection that ended, and whether the process at its other end has surely died.
        on_tick: gets whether this thread itself was away for longer than `late_s`, so that others were not heard.
        on_crash: gets what no caller can catch, as it is raised in the thread; all sockets close, as if this rank died.
    """

    def __init__(
        self,
        name: str,
        *,
        tick_s: float,
        late_s: float,
        on_message: Callable[[Connection, dict[str, Any]], None],
        on_end: Callable[[Connection, bool], None],
        on_tick: Callable[[bool], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._tick_s, self._late_s = tick_s, late_s
        self._on_message, self._on_end, self._on_tick, self._on_crash = on_message, on_end, on_tick, on_crash
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._sockets: dict[Any, float] = {self._wake: 0.0}  # and connections: since when they are there
        self._commands: deque[Callable[[], None]] = deque()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._register(self._woken)
        # A forked worker that kept the sockets would hide the death of this process from the others.
        os.register_at_fork(after_in_child=_closer(weakref.ref(self)))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on a socket."""
        self._register(listener)

    def add(self, connection: Connection) -> Connection:
        """Take over a connection."""
        self._register(connection)
        return connection

    def send(self, connection: Connection, **message: Any) -> None:
        """Send, or end the connection where it failed."""
        try:
            connection.send(message)
        except OSError as error:
            self._fail(connection, error)

    def post(self, command: Callable[[], None]) -> None:
        """Run a command in the thread, soon."""
        self._commands.append(command)
        with suppress(OSError):  # full: it wakes anyway; closed: there is none to wake
            self._wake.send(b"x")

    def fds(self) -> set[int]:
        """Return the numbers of all sockets, and of what selects them."""
        return {each.fileno() for each in list(self._sockets)} | {self._selector.fileno()}

    def close(self) -> None:
        """Send what is unsent, for a short time; end the thread and close all sockets."""
        self._is_closing.set()
        self.post(lambda: None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * LAST_WORDS_S + self._tick_s)
        self._close_all()

    def _close_all(self) -> None:
        for each in list(self._sockets):
            each.close()
        self._selector.close()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _register(self, each: Any) -> None:
        self._sockets[each] = monotonic()
        self._selector.register(each, selectors.EVENT_READ)

    def drop(self, connection: Connection) -> None:
        """Close a connection."""
        if self._sockets.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def _fail(self, connection: Connection, error: Exception) -> None:
        if connection in self._sockets:
            self.drop(connection)
            if isinstance(error, OSError):
                self._on_end(connection, error.errno in DEATH)
            else:
                log.warning("elastic: closed a connection of %s: %s", connection.peer or "a stranger", error)

    def _run(self) -> None:
        try:
            self._serve_all()
        except Exception as error:
            if self._is_closing.is_set():
                return
            self._close_all()
            self._on_crash(error)
            raise

    def _serve_all(self) -> None:
        last_s = next_tick_s = monotonic()
        ends_s = float("inf")
        while monotonic() < ends_s:
            if self._is_closing.is_set():
                unsent = [each for each in self._connections() if each.wants_to_write and each.is_connected]
                ends_s = min(ends_s, monotonic() + LAST_WORDS_S) if unsent else 0.0
            for each in self._connections():
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if each.wants_to_write else 0)
                if self._selector.get_key(each).events != wanted:
                    self._selector.modify(each, wanted)
            events = self._selector.select(max(0.0, next_tick_s - monotonic()))
            is_late, last_s = monotonic() - last_s > self._late_s, monotonic()
            for key, mask in events:
                self._serve(key.fileobj, mask)
            while self._commands:
                self._commands.popleft()()
            if is_late or monotonic() >= next_tick_s:
                next_tick_s = monotonic() + self._tick_s
                self._on_tick(is_late)
                for each in self._connections():
                    if not each.is_trusted and monotonic() - self._sockets[each] > GREETING_S:
                        self.drop(each)

    def _connections(self) -> list[Connection]:
        return [each for each in self._sockets if isinstance(each, Connection)]

    def _serve(self, each: Any, mask: int) -> None:
        if each not in self._sockets:  # dropped meanwhile
            return
        if each is self._woken:
            with suppress(BlockingIOError):
                each.recv(4096)
        elif not isinstance(each, Connection):
            with suppress(OSError):
                self.add(Connection(each.accept()[0]))
        else:
            try:
                if mask & selectors.EVENT_WRITE:
                    each.flush()
                for message in each.read() if mask & selectors.EVENT_READ else ():
                    if each in self._sockets:
                        self._on_message(each, message)
            except (OSError, MalformedError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                self._fail(each, error)


def _closer(loop: weakref.ref[EventLoop]) -> Callable[[], None]:
    def close() -> None:
        if (each := loop()) is not None:
            each._close_all()

    return close
