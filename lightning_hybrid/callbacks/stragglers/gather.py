"""Collection of all ranks' step times on the first rank, with one small collective per window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_hybrid.callbacks.stragglers.window import NUM_FIGURES, RankWindow
from lightning_hybrid.comm.health.diagnosis import name_ranks
from lightning_hybrid.comm.health.link_rates import node_of_addresses
from lightning_hybrid.comm.health.tcp_info import own_addresses
from lightning_hybrid.comm.topology import Topology, host_identity


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts and addresses of the ranks that are compared.

    Attributes:
        ranks: Global ranks.
        nodes: Host index of each rank.
        node_names: Host names by index. If several hosts have the same name, ranks are appended.
        node_of_address: Host index of each IP address, except the addresses of this rank's host.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    node_names: dict[int, str]
    node_of_address: dict[str, int]

    @classmethod
    def of_world(cls) -> Hosts:
        """Gather the host names and addresses of all ranks.

        Collective: every rank must call it, in the same order.
        """
        gathered: list[Any] = [None] * dist.get_world_size()
        own_host = (host_identity(), own_addresses())
        dist.all_gather_object(gathered, own_host)
        identities = [identity for identity, _ in gathered]
        topology = Topology.from_identities(rank=dist.get_rank(), identities=identities)

        nodes = [0] * topology.world_size
        node_names = {}
        addresses: dict[int, set[str]] = {}
        host_names = [identities[ranks[0]][0] for ranks in topology.nodes]
        for node, ranks in enumerate(topology.nodes):
            node_names[node] = host_names[node]
            if host_names.count(host_names[node]) > 1:
                node_names[node] += f" ({name_ranks(ranks)})"
            addresses[node] = set()
            for rank in ranks:
                nodes[rank] = node
                _, addresses_of_rank = gathered[rank]
                addresses[node].update(addresses_of_rank)

        own_node = nodes[topology.rank]
        ranks = tuple(range(topology.world_size))
        return cls(
            ranks=ranks,
            nodes=tuple(nodes),
            node_names=node_names,
            node_of_address=node_of_addresses(addresses, own_node=own_node),
        )

    def of_ranks(self, ranks: Sequence[int]) -> Hosts:
        """Return the hosts and addresses of a subset of the ranks."""
        nodes = tuple(self.nodes[rank] for rank in ranks)
        return replace(self, ranks=tuple(ranks), nodes=nodes)


class WindowGather(Protocol):
    """Interface for gathering the step times of all ranks on the first rank of a group."""

    def gather(self, window: RankWindow) -> list[list[RankWindow]]:
        """Send this rank's step times to the first rank, and return the windows received so far.

        Each item holds the step times of all ranks in one window of steps, with the oldest window first. On ranks other
        than the first, the list is empty.

        Collective: every rank of the group must call it, in the same order.
        """


class HostGather:
    """Blocking gather of CPU tensors to the first rank of a group.

    Args:
        group: Process group of the compared ranks. None means all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._is_first = dist.get_rank(group) == 0
        self._first_rank = first_rank_of(group)

    def gather(self, window: RankWindow) -> list[list[RankWindow]]:
        """Gather the step times of all ranks on the first rank. On other ranks, the list is empty."""
        sent = torch.tensor(window.to_figures(), dtype=torch.float32)
        received = None
        if self._is_first:
            num_ranks = dist.get_world_size(self._group)
            received = list(torch.empty(num_ranks, NUM_FIGURES))
        dist.gather(
            sent,
            received,
            dst=self._first_rank,
            group=self._group,
        )
        if received is None:
            return []
        return [windows_of(received)]


def first_rank_of(group: dist.ProcessGroup | None) -> int:
    """Return the global rank of a group's first rank."""
    if group is None:
        return 0
    return dist.get_global_rank(group, 0)


def windows_of(received: Sequence[torch.Tensor]) -> list[RankWindow]:
    """Convert the gathered tensors of all ranks to `RankWindow` objects."""
    windows = []
    for figures in received:
        windows.append(RankWindow.from_figures(figures.tolist()))
    return windows
