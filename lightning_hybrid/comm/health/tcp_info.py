"""Kernel state of TCP connections, which shows whether an unresponsive host is unreachable, slow or stopped.

A rank that does not answer a question may be dead, stopped, or behind a slow link. Further questions cannot distinguish
these cases, but the state of TCP connections can. The kernel of a host acknowledges received data, whatever the host's
processes do, and it closes the connections of a process that died. Therefore, if a rank does not answer, the state of
every TCP connection is read from the kernel.

    sent data is not acknowledged, and nothing was heard since the wait began   cut     host or link is down
    sent data is not acknowledged, but something was heard                      slow    host is alive, link is slow
    all sent data is acknowledged, and something was heard                      taken   host is alive, ranks are not
    all sent data is acknowledged, and nothing was heard                        idle    any of these

"Heard" means that data or an acknowledgement arrived. The state is available only on Linux and with TCP.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

_ESTABLISHED = 1  # TCP_ESTABLISHED of linux/tcp.h
# Number of bytes of `struct tcp_info` that are requested. Older kernels return fewer.
_NUM_BYTES = 192

# Offsets of 32-bit fields of `struct tcp_info` in linux/tcp.h.
_UNACKED = 24  # tcpi_unacked
_LAST_DATA_RECV = 52  # tcpi_last_data_recv
_LAST_ACK_RECV = 56  # tcpi_last_ack_recv

# Offsets of 64-bit fields, available since Linux 4.10.
_BYTES_ACKED = 120  # tcpi_bytes_acked
_BUSY_TIME = 168  # tcpi_busy_time, in microseconds: some data was not acknowledged
# `tcpi_rwnd_limited`, in microseconds: in addition, the receiver had no room for more.
_RWND_LIMITED = 176

# Seconds after the start of a wait during which data that was sent earlier may still arrive.
MARGIN_S = 1.0

# One of the words `cut`, `slow`, `taken` and `idle`, and the seconds since the host was last heard.
Liveness = tuple[str, float]


@dataclass(frozen=True, kw_only=True)
class TcpConnection:
    """Kernel state of one TCP connection, as seen from this host.

    Args:
        peer: Address of the other end.
        port: Port of the other end.
        local: Address of this end.
        is_open: Whether the connection is established. It is False if the other end has closed the connection.
        heard_s: Seconds since data or an acknowledgement arrived.
        is_waiting: Whether sent data has not been acknowledged yet.
        local_port: Port of this end.
        acked_bytes: Bytes that the other end has acknowledged so far, or 0 if the number is unknown.
        sending_s: Total time in seconds during which data was in transit and the receiver had buffer space.
    """

    peer: str
    port: int
    local: str
    is_open: bool
    heard_s: float
    is_waiting: bool
    local_port: int = 0
    acked_bytes: int = 0
    sending_s: float = 0.0


def tcp_connections() -> list[TcpConnection]:
    """Return the state of this process's TCP connections, or an empty list if it is not available."""
    # With `socket.setdefaulttimeout`, wrapping a descriptor would make it non-blocking for its owner as well.
    if socket.getdefaulttimeout() is not None:
        return []

    connections = []
    with suppress(OSError, AttributeError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError, struct.error):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                # A duplicate is wrapped, because Python closes the descriptor of a wrapped socket.
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    connection = _connection_of(duplicate)
                if connection is not None:
                    connections.append(connection)
    return connections


def _connection_of(tcp_socket: socket.socket) -> TcpConnection | None:
    is_internet = tcp_socket.family in (socket.AF_INET, socket.AF_INET6)
    if not is_internet or tcp_socket.type != socket.SOCK_STREAM:
        return None
    peer = tcp_socket.getpeername()
    local = tcp_socket.getsockname()
    info = tcp_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NUM_BYTES)

    # If a stopped process does not read, further data is not sent to it, and therefore not counted in tcpi_unacked.
    num_unacknowledged = _field(info, _UNACKED)
    # An acknowledgement is a sign of life, just like data.
    heard_ms = min(_field(info, _LAST_DATA_RECV), _field(info, _LAST_ACK_RECV))
    acked_bytes = 0
    sending_s = 0.0
    if len(info) >= _NUM_BYTES:
        acked_bytes = _long_field(info, _BYTES_ACKED)
        sending_s = (_long_field(info, _BUSY_TIME) - _long_field(info, _RWND_LIMITED)) / 1e6
    return TcpConnection(
        peer=_plain(peer[0]),
        port=peer[1],
        local=_plain(local[0]),
        is_open=info[0] == _ESTABLISHED,
        heard_s=heard_ms / 1e3,
        is_waiting=num_unacknowledged > 0,
        local_port=local[1],
        acked_bytes=acked_bytes,
        sending_s=sending_s,
    )


def _field(info: bytes, offset: int) -> int:
    (value,) = struct.unpack_from("=I", info, offset)
    return int(value)


def _long_field(info: bytes, offset: int) -> int:
    (value,) = struct.unpack_from("=Q", info, offset)
    return int(value)


def _plain(address: str) -> str:
    # A socket for IPv4 and IPv6 shows an IPv4 peer as an IPv6 address.
    return address.removeprefix("::ffff:")


def own_addresses() -> list[str]:
    """Return the local IP addresses of this process's TCP connections, except loopback addresses."""
    addresses = {connection.local for connection in tcp_connections()}
    return sorted(addresses - {"127.0.0.1", "::1"})


def liveness_by_address(
    connections: Iterable[TcpConnection], *, waited_s: float
) -> dict[str, Liveness]:
    """Return the liveness of each remote address to which a TCP connection is open.

    Args:
        connections: Connections to evaluate. Closed connections are ignored.
        waited_s: Seconds for which this rank has waited for an answer from these addresses.
    """
    liveness: dict[str, Liveness] = {}
    for connection in connections:
        if not connection.is_open:
            continue
        state = (_word_for(connection, waited_s), connection.heard_s)
        if connection.peer in liveness:
            liveness[connection.peer] = _combined([liveness[connection.peer], state])
        else:
            liveness[connection.peer] = state
    return liveness


def _word_for(connection: TcpConnection, waited_s: float) -> str:
    was_heard = connection.heard_s < waited_s - MARGIN_S  # since the wait began
    if connection.is_waiting and was_heard:
        return "slow"
    if connection.is_waiting:
        return "cut"
    if was_heard:
        return "taken"
    return "idle"


def most_telling(reports: Sequence[Liveness | None]) -> Liveness | None:
    """Combine several liveness reports on one host into a single report.

    The result has the most informative word of all reports, and the shortest time since the host was heard. It is None
    if every report is None.

    >>> most_telling([("cut", 20.0), None, ("taken", 3.0), ("slow", 4.0)]), most_telling([None])
    (('slow', 3.0), None)
    """
    known_states = [state for state in reports if state is not None]
    if not known_states:
        return None
    return _combined(known_states)


def _combined(states: Sequence[Liveness]) -> Liveness:
    # A sign of life outweighs silent connections. Among silent connections, unacknowledged data is most informative.
    order = ("slow", "taken", "cut", "idle")
    word = min((word for word, _ in states), key=order.index)
    return word, min(heard_s for _, heard_s in states)


def describe_liveness(liveness: Liveness, *, host: str) -> str:
    """Describe the state of a host whose ranks do not respond, for error messages."""
    word, heard_s = liveness
    if word == "slow":
        return (
            f"host {host} is alive and was last heard {heard_s:.1f} s ago, but its link is so slow that answers "
            "arrive too late"
        )
    if word == "taken":
        return (
            f"host {host} is alive, was last heard {heard_s:.1f} s ago and has acknowledged all data, so its "
            "processes are stopped or hang"
        )
    if word == "cut":
        return (
            f"host {host} has sent nothing for {heard_s:.0f} s, not even an acknowledgement, so its link is down or "
            "almost blocked, or the host is down"
        )
    return (
        f"host {host} has sent nothing for {heard_s:.0f} s, and its connections are not closed, so its processes are "
        "stopped, its link is down or almost blocked, or the host is down"
    )
