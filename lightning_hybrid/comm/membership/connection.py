"""Messages over sockets that never block: JSON with a magic and a length, and a limit on it."""

from __future__ import annotations

import errno
import json
import socket
import struct
from typing import Any

HEADER = struct.Struct("!4sI")
MAGIC = b"LHM1"
LIMIT = 64 * 1024

# What a connection may hold back for a peer that does not read: one that is stopped, and soon lost.
MOST_UNSENT = 4 * 1024 * 1024

# How a dead process shows. Other errors are of the network, and no proof.
DEATH = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)


class MalformedError(ValueError):
    """What came is no message."""


class Connection:
    """One socket, connected or about to be; reading, writing and connecting happen where its owner has selected it."""

    def __init__(self, sock: socket.socket, *, is_connected: bool = True) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.is_connected = sock, is_connected
        self.peer = ""  # whose words these are, once known
        self.is_trusted = False  # whether a greeting with the token of the run has come
        self._received, self._unsent = bytearray(), bytearray()

    @classmethod
    def to(cls, address: str) -> Connection:
        """Begin to connect to an "ip:port"."""
        connection = cls(socket.socket(), is_connected=False)
        connection.sock.connect_ex(split(address))
        return connection

    def fileno(self) -> int:
        """Return the number of the socket, for selectors."""
        return self.sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether to select it for writing."""
        return bool(self._unsent) or not self.is_connected

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, now or as soon as the socket takes it."""
        body = json.dumps(message).encode()
        if len(body) > LIMIT:
            raise MalformedError(f"a message of {len(body)} bytes is longer than {LIMIT}: too many hosts")
        if len(self._unsent) < MOST_UNSENT:
            self._unsent += HEADER.pack(MAGIC, len(body)) + body
            if self.is_connected:
                self.flush()

    def flush(self) -> None:
        """Write what the socket takes. Raises OSError where the connection failed."""
        if not self.is_connected:
            if code := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, "cannot connect")
            self.is_connected = True
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            return

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come. Raises OSError where the connection ended, MalformedError on others."""
        try:
            data = self.sock.recv(LIMIT)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "closed")
        self._received += data
        messages = []
        while len(self._received) >= HEADER.size:
            magic, length = HEADER.unpack_from(self._received)
            if magic != MAGIC or length > LIMIT:
                raise MalformedError("not a message")
            if len(self._received) < HEADER.size + length:
                break
            try:
                message = json.loads(self._received[HEADER.size : HEADER.size + length])
            except (ValueError, RecursionError) as error:
                raise MalformedError("not JSON") from error
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise MalformedError("no kind")
            messages.append(message)
            del self._received[: HEADER.size + length]
        return messages

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def split(address: str) -> tuple[str, int]:
    """Return ip and port of an "ip:port"."""
    ip, _, port = address.rpartition(":")
    return ip, int(port)


def own_ip_towards(address: str) -> str:
    """Return the address of the interface through which `address` is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(split(address))
        return str(probe.getsockname()[0])


def listen_at_path(path: str) -> socket.socket:
    """Listen on a Unix socket."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise RuntimeError("elastic: another first rank of this host runs: give each host a name of its own") from error
    sock.listen(128)
    sock.setblocking(False)
    return sock


def listen(address: tuple[str, int]) -> socket.socket | None:
    """Listen on one address; None where it is another host's, or taken."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise
    sock.setblocking(False)
    return sock
