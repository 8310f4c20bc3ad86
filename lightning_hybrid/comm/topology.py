"""Topology: the ranks that share a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch.distributed as dist

from lightning_hybrid.checks import require_whole

# The ranks among which a stage talks. `world`: all. `node`: those of one node. `leaders`: the first of every node.
# `across`: those with the same local rank, one of every node (equal nodes only).
Scope = Literal["world", "node", "leaders", "across"]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The ranks of every node, seen from one rank.

    `nodes` holds the global ranks of each node, ascending; nodes are ordered by their first rank, the node's leader.
    Ranks of a node need not be consecutive (cyclic launchers interleave them), nor nodes of equal size.

    >>> topology = Topology(rank=3, nodes=((0, 2), (1, 3)))
    >>> topology.leader, topology.local_rank, topology.ranks_per_node
    (1, 1, 2)
    >>> Topology(rank=0, nodes=((0, 1), (2,))).ranks_per_node is None
    True

    Raises:
        ValueError: if `nodes` is not such a partition of 0 ... world_size - 1, or `rank` is not in it.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for node in self.nodes for rank in node]
        if not ranks or not all(self.nodes) or sorted(ranks) != list(range(len(ranks))):
            raise ValueError(
                f"`nodes` (={self.nodes}) must hold every rank from 0 to world_size - 1 exactly once and no empty node"
            )
        if any(list(node) != sorted(node) for node in self.nodes) or list(self.nodes) != sorted(
            self.nodes
        ):
            raise ValueError(
                f"`nodes` (={self.nodes}) must be in ascending order, inside each node and from node to node: "
                "every rank has to number nodes and leaders in the same way"
            )
        if not 0 <= self.rank < len(ranks):
            raise ValueError(
                f"`rank` (={self.rank}) must be one of the {len(ranks)} ranks in `nodes`"
            )

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(node) for node in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @cached_property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node, or None if nodes differ."""
        sizes = {len(node) for node in self.nodes}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return next(node for node in self.nodes if self.rank in node)

    @property
    def local_rank(self) -> int:
        """Place of this rank in its node."""
        return self.node.index(self.rank)

    @property
    def leader(self) -> int:
        """The first rank of this rank's node."""
        return self.node[0]

    def partition(self, scope: Scope) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks, over the whole world, that talk among themselves in this scope.

        >>> Topology(rank=0, nodes=((0, 1), (2, 3))).partition("across")
        ((0, 2), (1, 3))
        """
        if scope == "world":
            return (tuple(range(self.world_size)),)
        if scope == "node":
            return self.nodes
        if scope == "leaders":
            return (tuple(node[0] for node in self.nodes),)
        if self.ranks_per_node is None:
            raise ValueError(
                f"`nodes` (={self.nodes}) must be of equal size for groups of equal local rank"
            )
        # The transpose: local rank by node; in ascending order, as torch numbers the ranks of a group.
        return tuple(tuple(sorted(ranks)) for ranks in zip(*self.nodes, strict=True))

    def sharers(self, scope: Literal["node", "world"]) -> tuple[int, ...]:
        """Return the ranks that share an update, in the order of their parts: those of a shard of the node in a row.

        >>> Topology(rank=0, nodes=((0, 1), (2, 3))).sharers("world")
        (0, 2, 1, 3)
        """
        return (
            self.node
            if scope == "node"
            else tuple(rank for ranks in self.partition("across") for rank in ranks)
        )

    @classmethod
    def from_ranks_per_node(cls, *, rank: int, world_size: int, ranks_per_node: int) -> Topology:
        """Take consecutive blocks of `ranks_per_node` ranks as nodes: the user says so, nothing is looked up.

        Raises:
            ValueError: if the blocks do not fit (see `validate_ranks_per_node`).
        """
        validate_ranks_per_node(world_size=world_size, ranks_per_node=ranks_per_node)
        starts = range(0, world_size, ranks_per_node)
        return cls(
            rank=rank, nodes=tuple(tuple(range(start, start + ranks_per_node)) for start in starts)
        )

    @classmethod
    def from_identities(cls, *, rank: int, identities: Sequence[Hashable]) -> Topology:
        """Take the ranks that gave equal identities as nodes. `identities[r]` is that of rank r."""
        # A dict keeps the order of insertion: nodes come in the order of their first ranks, the same on every rank.
        nodes: dict[Hashable, list[int]] = {}
        for owner, identity in enumerate(identities):
            nodes.setdefault(identity, []).append(owner)
        return cls(rank=rank, nodes=tuple(tuple(node) for node in nodes.values()))

    @classmethod
    def discover(cls) -> Topology:
        """Find the nodes of WORLD by gathering every rank's `host_identity`.

        Collective: every rank must call it, in the same order.
        """
        # Not launcher variables or `rank // local_size`: both are wrong for cyclic rank orders and uneven nodes.
        identities: list[tuple[str, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(identities, host_identity())
        return cls.from_identities(rank=dist.get_rank(), identities=identities)


@dataclass(frozen=True, kw_only=True)
class ReplicaSets:
    """Disjoint sets of ranks that cover the world. Each set averages among itself, as the replicas of one stage.

    >>> world = Topology.from_ranks_per_node(rank=3, world_size=8, ranks_per_node=4)
    >>> sets = ReplicaSets(world=world, sets=((0, 2, 4, 6), (1, 3, 5, 7)))
    >>> sets.own.rank, sets.own.nodes           # ranks of the own set, numbered from 0
    (1, ((0, 1), (2, 3)))
    >>> sets.partition("node")                  # ranks of the world
    ((0, 2), (4, 6), (1, 3), (5, 7))

    Raises:
        ValueError: the sets do not hold every rank once, or are spread over nodes in different ways.
    """

    world: Topology
    sets: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if sorted(rank for ranks in self.sets for rank in ranks) != list(
            range(self.world.world_size)
        ):
            raise ValueError(
                f"`sets` (={self.sets}) must hold every rank of the world exactly once"
            )
        if (
            len(
                {
                    (topology.num_nodes, topology.ranks_per_node)
                    for topology in map(self._of, self.sets)
                }
            )
            > 1
        ):
            # Plans choose stages by the topology, and every rank takes part in making the groups of all sets.
            raise ValueError(
                f"`nodes` (={self.world.nodes}) must hold as many ranks of each of the sets {self.sets}: here they are "
                "spread over nodes in different ways. Launch nodes of equal size, a multiple of the number of sets."
            )

    @property
    def rank(self) -> int:
        """Rank of this process in the world."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the world."""
        return self.world.world_size

    @property
    def own(self) -> Topology:
        """The topology of this rank's set, whose ranks are numbered from 0."""
        return self._of(next(ranks for ranks in self.sets if self.rank in ranks))

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of this rank's set."""
        return self.own.nodes

    @property
    def num_nodes(self) -> int:
        """Number of nodes of this rank's set."""
        return self.own.num_nodes

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of this rank's set on each node, or None if nodes differ."""
        return self.own.ranks_per_node

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of the world that are of this rank's set and node."""
        return next(ranks for ranks in self.partition("node") if self.rank in ranks)

    def sharers(self, scope: Literal["node", "world"]) -> tuple[int, ...]:
        """Return the ranks of this rank's set, numbered from 0, that share an update, in the order of their parts."""
        return self.own.sharers(scope)

    def _of(self, ranks: tuple[int, ...]) -> Topology:
        nodes = (
            tuple(index for index, rank in enumerate(ranks) if rank in node)
            for node in self.world.nodes
        )
        rank = ranks.index(self.rank) if self.rank in ranks else 0
        return Topology(rank=rank, nodes=tuple(sorted(node for node in nodes if node)))

    def partition(self, scope: Scope) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks of the world that talk among themselves in this scope."""
        return tuple(
            tuple(ranks[index] for index in part)
            for ranks in self.sets
            for part in self._of(ranks).partition(scope)
        )


def validate_ranks_per_node(*, world_size: int, ranks_per_node: int) -> None:
    """Check an explicit node size. Needs no process group, so it can run before anything is launched."""
    why = "it counts the ranks that share a node. Leave `ranks_per_node` unset to have nodes found"
    require_whole("ranks_per_node", ranks_per_node, why)
    if world_size % ranks_per_node:  # a last node with fewer ranks
        raise ValueError(
            f"`ranks_per_node` (={ranks_per_node}) must divide `world_size` (={world_size}): it says that nodes are "
            f"consecutive blocks of equal size, and here the last node would hold {world_size % ranks_per_node} "
            f"ranks. Either launch a multiple of {ranks_per_node} ranks, or leave `ranks_per_node` unset so "
            "that nodes are found by themselves, or use the flat ring with comm=Comm(algorithm='flat')."
        )


def host_identity() -> tuple[str, ...]:
    """Return an identity that processes of one node share: host name, boot, network namespace. Empty if unreadable."""
    # The boot id separates hosts that share a name; the network namespace separates containers (and emulated hosts) on
    # one machine, which reach each other over a network and not over loopback. Not cgroups: launchers give each rank
    # of one node its own.
    boot_id = network_namespace = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    with suppress(OSError):
        network_namespace = os.readlink("/proc/self/ns/net")
    return socket.gethostname(), boot_id, network_namespace
