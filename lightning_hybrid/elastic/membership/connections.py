"""Connections for JSON messages between ranks, which one thread of each rank serves."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from lightning_hybrid.elastic.membership.view import Settings

log = logging.getLogger(__name__)

LIMIT = 64 * 1024  # maximum bytes of a message

# Maximum number of bytes that are buffered for a peer that does not read, such as a stopped process that will soon be
# considered lost.
MOST_UNSENT = 4 * 1024 * 1024

# Errors which prove that the other process has died. Other errors may be caused by the network.
DEATH = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)

# Ticks per heartbeat between ranks of one host. These heartbeats are less frequent than those between hosts, because
# the kernel reports the end of a process anyway, and each heartbeat wakes a thread.
TICKS_WITHIN_HOST = 4

# Time limit in seconds for the greeting on a new connection, and for sending unsent messages in `close`.
GREETING_S = 10.0
LAST_WORDS_S = 0.5


class MalformedError(ValueError):
    """Error raised when received data is not a valid message."""


class Connection(asyncio.Protocol):
    """Connection to another rank over one socket of a `SocketThread`.

    The socket may still be connecting. Messages that arrive before `trust` is called are passed to the thread's
    `greet`.
    """

    def __init__(self, sock: socket.socket, thread: SocketThread) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._thread = thread
        self.since_s = monotonic()
        self.peer = "an unknown process"
        self.is_trusted = False
        self.is_connected = False
        self._received = b""
        self._unsent = b""
        self.opening: asyncio.Task[None] | None = None
        self._read: Callable[[dict[str, Any]], None] = lambda message: thread.greet(self, message)
        self._ended: Callable[[bool], None] = lambda is_dead: None

    def trust(
        self, peer: str, read: Callable[[dict[str, Any]], None], ended: Callable[[bool], None]
    ) -> None:
        """Accept the peer, and set the callbacks for its messages and for the end of the connection.

        Args:
            peer: Name of the peer, for log messages.
            read: Callback for each later message.
            ended: Callback for the end of the connection. Its argument is True if the other process has certainly died.
        """
        self.peer = peer
        self.is_trusted = True
        self._read = read
        self._ended = ended

    def send(self, **message: Any) -> None:
        """Send a message, or buffer it until the socket accepts it.

        If `MOST_UNSENT` bytes are already buffered, the message is dropped.

        Raises:
            MalformedError: The message is longer than `LIMIT` bytes.
        """
        line = json.dumps(message).encode() + b"\n"
        if len(line) > LIMIT:
            raise MalformedError(
                f"a message has {len(line)} bytes, which is more than the limit of {LIMIT} bytes, because there are "
                "too many hosts"
            )
        if not self.is_connected:
            self._unsent += line if len(self._unsent) < MOST_UNSENT else b""
        elif self.num_unsent() < MOST_UNSENT:
            self._transport.write(line)

    def num_unsent(self) -> int:
        """Return the number of bytes that are buffered because the socket has not accepted them yet."""
        return self._transport.get_write_buffer_size() if self.is_connected else 0

    def drop(self) -> None:
        """Close the connection without calling the `ended` callback."""
        self._thread.sockets.pop(self.sock, None)
        if self.is_connected:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Send the messages that were buffered while the socket was connecting."""
        self._transport = transport
        self.is_connected = True
        transport.write(self._unsent)

    def data_received(self, data: bytes) -> None:
        """Process the messages that have arrived, and close the connection if a message is malformed."""
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            if max(map(len, [*lines, self._received])) > LIMIT:
                raise MalformedError("the received data is not a valid message")
            for line in lines:
                if self.sock in self._thread.sockets:
                    self._read(json.loads(line))
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
            RecursionError,
        ) as error:
            log.warning("elastic: closed the connection to %s: %r", self.peer, error)
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        """Call the callback `ended`, unless this rank has closed the connection."""
        self.sock.close()
        if self._thread.sockets.pop(self.sock, None):
            self._ended(error is None or getattr(error, "errno", 0) in DEATH)


class SocketThread:
    """Thread that serves all membership sockets of one rank.

    All methods except `start`, `post` and `close` run in this thread, which `close` ends.

    Args:
        settings: Membership settings of this rank.
        deliver: Callback for events, called in this thread: `("view", proposal)`, `("change", why)`,
            `("isolated", why)`, `("refused", why)`, and `("lost", why)` if a rank of this host has died.
        *listeners: Sockets to which other ranks connect.
    """

    key = ""  # key of this host, once known

    def __init__(
        self, settings: Settings, deliver: Callable[[str, Any], None], *listeners: socket.socket
    ) -> None:
        self._settings = settings
        self._deliver = deliver
        self.sockets: dict[socket.socket, Connection | None] = dict.fromkeys(listeners)
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(self._crash)
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        # If forked workers kept the sockets open, other ranks would not notice the death of this process.
        os.register_at_fork(after_in_child=_closer(weakref.ref(self)))

    # ---- overridden by subclasses ------------------------------------------------------------------------------------

    def greet(self, connection: Connection, message: dict[str, Any]) -> None:
        """Process the first message of a connection, which the base class always rejects.

        Raises:
            MalformedError: The message is not a valid greeting.
        """
        raise MalformedError("the first message is not a greeting")

    def tick(self, now: float, is_late: bool) -> None:
        """Send due heartbeats, and report peers whose heartbeats have stopped.

        Args:
            now: Current time in seconds.
            is_late: Whether this thread was paused for so long that messages of other ranks may be unread.
        """
        raise NotImplementedError

    @property
    def pause_s(self) -> float:
        """Time between two calls of `tick`, in seconds."""
        return self._settings.tick_s

    # ---- from any thread ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: Callable[..., object], *arguments: Any) -> None:
        """Schedule a function call on the thread, unless the thread has exited."""
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(command, *arguments)

    def close(self) -> None:
        """Try to send all buffered messages, then end the thread and close all sockets."""
        self.post(self._end.cancel)
        if self._thread is not threading.current_thread():
            self._thread.join(2 * LAST_WORDS_S + self._settings.tick_s)

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def open(self, sock: socket.socket, address: str = "") -> Connection:
        """Create a connection from a socket.

        Args:
            sock: The socket.
            address: "ip:port" to which the socket begins to connect, or empty if it is already connected.
        """
        self.sockets[sock] = connection = Connection(sock, self)
        connection.opening = self._loop.create_task(self._open(connection, address))
        return connection

    async def _open(self, connection: Connection, address: str) -> None:
        try:
            if address:
                await self._loop.sock_connect(connection.sock, split(address))
            await self._loop.connect_accepted_socket(lambda: connection, connection.sock)
        except OSError as error:
            connection.connection_lost(error)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            self.open(listener.accept()[0])

    def _connections(self) -> list[Connection]:
        return [connection for connection in self.sockets.values() if connection]

    def _crash(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # No caller can catch this error. All sockets are closed at once, as if this rank had died.
        if not self._end.done():
            self._end.set_exception(context.get("exception") or RuntimeError(context["message"]))
            self._close_all()

    def _close_all(self) -> None:
        for sock in list(self.sockets):
            sock.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            self._deliver("isolated", f"the membership thread failed with {error!r}")
            raise

    async def _serve(self) -> None:
        for listener in self.sockets:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)
        try:
            self._tick_again(monotonic())
            with suppress(asyncio.CancelledError):
                await self._end
            last_s = monotonic()
            while monotonic() - last_s < LAST_WORDS_S and any(
                connection.num_unsent() for connection in self._connections()
            ):
                await asyncio.sleep(0.01)
        finally:
            for connection in self._connections():
                connection.drop()
            await asyncio.sleep(0)
            self._close_all()

    def _tick_again(self, last_s: float) -> None:
        if self._end.done():
            return
        now = monotonic()
        pause_s = self.pause_s
        self.tick(now, now - last_s > pause_s + 0.375 * self._settings.silent_s)
        for connection in self._connections():
            if not connection.is_trusted and now - connection.since_s > GREETING_S:
                connection.drop()
        self._loop.call_later(pause_s, self._tick_again, now)


def _closer(of_thread: weakref.ref[SocketThread]) -> Callable[[], None]:
    def close() -> None:
        if (thread := of_thread()) is not None:
            thread._close_all()

    return close


def split(address: str) -> tuple[str, int]:
    """Split an address "ip:port" into its IP address and port."""
    ip, _, port = address.rpartition(":")
    return ip, int(port)


def own_ip_towards(address: str) -> str:
    """Return the local IP address that would be used to connect to `address`.

    No data is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(split(address))
        return str(probe.getsockname()[0])


def listen(address: Any, family: int = socket.AF_INET) -> socket.socket | None:
    """Return a socket that listens on an address, or None if the address is not available.

    An address is not available if it belongs to another host or is already in use.
    """
    try:
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise
