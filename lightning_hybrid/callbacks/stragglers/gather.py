"""Gather of each rank's figures of a window: one small collective per window."""

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
    """Hosts of the ranks that are compared.

    Attributes:
        ranks: Ranks of the world.
        nodes: Number of each rank's host.
        node_names: Host name by number, with its ranks if other hosts have the same name.
        node_of_address: Number of the host, by address, of the hosts other than this rank's.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    node_names: dict[int, str]
    node_of_address: dict[str, int]

    @classmethod
    def of_world(cls) -> Hosts:
        """Gather the hosts of all ranks.

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
        """Return the hosts of some ranks of the world."""
        nodes = tuple(self.nodes[rank] for rank in ranks)
        return replace(self, ranks=tuple(ranks), nodes=nodes)


class WindowGather(Protocol):
    """Gather of figures to the first rank of a group."""

    def gather(self, window: RankWindow) -> list[list[RankWindow]]:
        """Send this rank's window, and return the windows of all ranks that have arrived, oldest first.

        Ranks other than the first get none. Collective: every rank of the group must call it, in the same order.
        """


class HostGather:
    """Gather through the host's memory, which ends before the call returns.

    Args:
        group: Ranks that are compared. None: all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._is_first = dist.get_rank(group) == 0
        self._first_rank = first_rank_of(group)

    def gather(self, window: RankWindow) -> list[list[RankWindow]]:
        """Send this rank's window, and return that of all ranks on the first rank."""
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
    """Return the first rank of a group as a rank of the world."""
    if group is None:
        return 0
    return dist.get_global_rank(group, 0)


def windows_of(received: Sequence[torch.Tensor]) -> list[RankWindow]:
    """Return the windows of all ranks from their figures on the host."""
    windows = []
    for figures in received:
        windows.append(RankWindow.from_figures(figures.tolist()))
    return windows
