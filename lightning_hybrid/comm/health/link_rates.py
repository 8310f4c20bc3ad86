"""Measurement of the TCP bandwidth to other nodes, counting only the time during which data is sent.

    rate = bytes acknowledged / (time with unacknowledged data - time in which the receiver accepted no data)

Because the kernel counts bytes and times (`tcp_info.py`), a rank that sends late does not look like a slow link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_hybrid.comm.health.tcp_info import TcpConnection, tcp_connections

MIN_BYTES_PER_STEP = 64 * 1024
"""Minimum number of bytes per step. With fewer bytes, latency dominates, and the rate is meaningless."""

MIN_SENDING_S = 0.02
"""Minimum sending time in a window, in seconds. For shorter times, the kernel's clock (about 4 ms) is too coarse."""


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """Measured bandwidth of this rank's connections to another node.

    Attributes:
        bytes_per_s: Bytes per second while data is being sent.
        node: Index of the other node, or -1 if nothing was measured.
    """

    bytes_per_s: float
    node: int


UNKNOWN_LINK = LinkRate(bytes_per_s=0.0, node=-1)

_Counts = tuple[int, float]  # bytes acknowledged, seconds of sending


class LinkRates:
    """Bandwidth meter of this rank's TCP connections to other nodes.

    Args:
        node_of_address: Node of each address of another node.
    """

    def __init__(self, node_of_address: Mapping[str, int]) -> None:
        self._node_of_address = node_of_address
        self._last: dict[tuple[str, int, int], _Counts] = {}
        if node_of_address:
            self._last = self._read()

    def take_slowest(self, num_steps: int) -> LinkRate:
        """Return the bandwidth of the slowest connection to another node, measured since the last call.

        Nodes that received far fewer bytes than others are ignored (see `slowest_rate`).

        Args:
            num_steps: Number of steps since the last call.
        """
        if not self._node_of_address:
            return UNKNOWN_LINK
        counts = self._read()
        by_node: dict[int, _Counts] = {}
        for connection, (num_bytes, sending_s) in counts.items():
            last_bytes, last_sending_s = self._last.get(connection, (0, 0.0))
            node = self._node_of_address[connection[0]]
            node_bytes, node_sending_s = by_node.get(node, (0, 0.0))
            node_bytes += num_bytes - last_bytes
            node_sending_s += sending_s - last_sending_s
            by_node[node] = (node_bytes, node_sending_s)
        self._last = counts
        return slowest_rate(by_node, num_steps=num_steps)

    def _read(self) -> dict[tuple[str, int, int], _Counts]:
        counts = {}
        for connection in tcp_connections():
            if connection.peer in self._node_of_address:
                counts[_key_of(connection)] = (connection.acked_bytes, connection.sending_s)
        return counts


def _key_of(connection: TcpConnection) -> tuple[str, int, int]:
    return connection.peer, connection.port, connection.local_port


def slowest_rate(by_node: Mapping[int, _Counts], *, num_steps: int) -> LinkRate:
    """Return the lowest bandwidth to any node, ignoring nodes that received far fewer bytes.

    Nodes are included if they received at least half as many bytes as the node with the most bytes.

    Args:
        by_node: Number of bytes sent to each node, and seconds of sending.
        num_steps: Number of steps in which the bytes were sent.

    >>> slowest_rate({1: (8_000_000, 0.5), 2: (6_000_000, 1.0), 3: (1_000, 0.5)}, num_steps=10)
    LinkRate(bytes_per_s=6000000.0, node=2)
    """
    most_bytes = max((num_bytes for num_bytes, _ in by_node.values()), default=0)
    least_bytes = max(most_bytes / 2, MIN_BYTES_PER_STEP * num_steps)
    slowest = UNKNOWN_LINK
    for node, (num_bytes, sending_s) in by_node.items():
        if num_bytes < least_bytes or sending_s < MIN_SENDING_S:
            continue
        bytes_per_s = num_bytes / sending_s
        if slowest is UNKNOWN_LINK or bytes_per_s < slowest.bytes_per_s:
            slowest = LinkRate(bytes_per_s=bytes_per_s, node=node)
    return slowest


def node_of_addresses(addresses: Mapping[int, set[str]], *, own_node: int) -> dict[str, int]:
    """Map the IP addresses of other nodes to node indices, leaving out ambiguous addresses.

    An address is ambiguous if several nodes have it.

    Args:
        addresses: Addresses of each node, by node.
        own_node: Node of this rank.

    >>> node_of_addresses({0: {"10.0.0.1", "172.17.0.1"}, 1: {"10.0.0.2", "172.17.0.1"}}, own_node=0)
    {'10.0.0.2': 1}
    """
    node_of_address: dict[str, int] = {}
    for node, of_node in addresses.items():
        for address in of_node:
            is_shared = any(
                address in others for other, others in addresses.items() if other != node
            )
            if node != own_node and not is_shared:
                node_of_address[address] = node
    return node_of_address
