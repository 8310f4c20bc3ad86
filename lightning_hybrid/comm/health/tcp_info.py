"""What the kernel knows of TCP connections: whether a host that says nothing is cut off, slow or stopped.

A rank that does not answer a question may be dead, stopped, or behind a slow link, and no question tells them apart.
TCP does: data sent to a host is acknowledged by its kernel, whatever its processes do, and the connections of a process
that died are closed. So where a rank is missed, the kernel is asked for the state of every TCP connection.

    sent data is not acknowledged, nothing was heard since the wait began       cut        the host is down, or its link
    sent data is not acknowledged, but something was heard                      slow       it lives, its link is slow
    all that was sent is acknowledged, and something was heard                  taken      it lives, its ranks do not
    all that was sent is acknowledged, nothing was heard                        idle       any of these

Heard means data or acknowledgements. Linux only, and TCP only: elsewhere nothing is known.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

# TCP_ESTABLISHED of linux/tcp.h, and how many bytes of `struct tcp_info` are asked for.
_ESTABLISHED = 1
_BYTES = 104

# What was heard so shortly after the wait began may have been on its way before.
MARGIN_S = 1.0

# `cut`, `slow`, `taken` or `idle`, and the seconds since a host was heard.
Liveness = tuple[str, float]


@dataclass(frozen=True, kw_only=True)
class TcpConnection:
    """One TCP connection, as this end sees it."""

    peer: str  # address of the other end, and its port
    port: int
    own: str  # address of this end
    is_open: bool  # not closed by the other end
    heard_s: float  # since data or an acknowledgement came
    is_waiting: bool  # something sent is not acknowledged yet


def tcp_connections() -> list[TcpConnection]:
    """Return every TCP connection of this process; empty where the kernel does not say."""
    found: list[TcpConnection | None] = []
    # Under `socket.setdefaulttimeout` a look at a descriptor would make it one that does not block, for its owner too.
    if socket.getdefaulttimeout() is not None:
        return []
    with suppress(OSError, AttributeError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError, struct.error):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    # A duplicate: Python closes what it wraps, and the connection is someone else's.
                    with socket.socket(fileno=os.dup(int(name))) as own:
                        found.append(_connection_of(own))
    return [each for each in found if each is not None]


def _connection_of(own: socket.socket) -> TcpConnection | None:
    if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
        return None
    peer = own.getpeername()
    here = own.getsockname()
    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)  # struct tcp_info
    # tcpi_unacked, tcpi_last_data_recv, tcpi_last_ack_recv of linux/tcp.h. What waits because a stopped process reads
    # nothing is not sent, and not in tcpi_unacked.
    unacked, data_ms, ack_ms = (struct.unpack_from("=I", info, at)[0] for at in (24, 52, 56))
    return TcpConnection(
        peer=_plain(peer[0]),
        port=peer[1],
        own=_plain(here[0]),
        is_open=info[0] == _ESTABLISHED,
        heard_s=min(data_ms, ack_ms) / 1e3,  # an acknowledgement is a sign of life as data are
        is_waiting=unacked > 0,
    )


def _plain(address: str) -> str:
    # A socket of both families shows an IPv4 peer as an IPv6 address.
    return address.removeprefix("::ffff:")


def own_addresses() -> list[str]:
    """Return the addresses of this host that its connections show; none where it talks to itself alone."""
    return sorted({each.own for each in tcp_connections()} - {"127.0.0.1", "::1"})


def liveness_by_address(found: Iterable[TcpConnection], *, waited_s: float) -> dict[str, Liveness]:
    """Return what is known of each address to which a connection is open.

    `waited_s`: how long this rank has waited for it.
    """
    known: dict[str, Liveness] = {}
    for each in found:
        if each.is_open:
            was_heard = each.heard_s < waited_s - MARGIN_S  # since the wait began
            word = (
                ("slow" if was_heard else "cut")
                if each.is_waiting
                else ("taken" if was_heard else "idle")
            )
            known[each.peer] = most_telling([known.get(each.peer), (word, each.heard_s)]) or (
                word,
                each.heard_s,
            )
    return known


def most_telling(found: Sequence[Liveness | None]) -> Liveness | None:
    """Return what says most of one host, and the shortest time since it was heard. None where nothing is known.

    >>> most_telling([("cut", 20.0), None, ("taken", 3.0), ("slow", 4.0)]), most_telling([None])
    (('slow', 3.0), None)
    """
    there = [liveness for liveness in found if liveness is not None]
    words = {word for word, _ in there}
    # One sign of life outweighs all silence; of silence, data that is not acknowledged says most.
    word = next((word for word in ("slow", "taken", "cut", "idle") if word in words), None)
    return None if word is None else (word, min(heard_s for _, heard_s in there))


def describe_liveness(liveness: Liveness, *, host: str) -> str:
    """Say what is known of a host none of whose ranks answers."""
    word, heard_s = liveness
    return {
        "slow": f"host {host} lives, was last heard {heard_s:.1f} s ago, but its link is so slow that answers do not "
        "come in time",
        "taken": f"host {host} lives and acknowledged all that it was sent, {heard_s:.1f} s ago or later, with "
        "connections open: stopped, or hanging",
        "cut": f"nothing has come from host {host} for {heard_s:.0f} s, not even an acknowledgement: its link is cut "
        "or lets next to nothing through, or the host is down",
        "idle": f"nothing has come from host {host} for {heard_s:.0f} s, and its connections are not closed: its ranks "
        "are stopped, or its link is cut or lets next to nothing through, or the host is down",
    }[word]
