"""Assignment of ranks to nodes, and sets of ranks that average gradients independently."""

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

# Sets of ranks between which an all-reduce stage communicates. `world`: all ranks. `node`: the ranks of one node.
# `leaders`: the first rank of every node. `across`: the ranks with the same local rank, one on every node, which needs
# nodes of equal size.
Scope = Literal["world", "node", "leaders", "across"]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Assignment of all ranks to nodes, from the perspective of one rank.

    The ranks of a node need not be consecutive, because some launchers assign ranks to nodes in turn. Nodes may differ
    in size.

    Args:
        rank: Rank of this process.
        nodes: Global ranks of each node, in ascending order. Nodes are ordered by their first rank, the node's leader.

    >>> topology = Topology(rank=3, nodes=((0, 2), (1, 3)))
    >>> topology.leader, topology.local_rank, topology.ranks_per_node
    (1, 1, 2)
    >>> Topology(rank=0, nodes=((0, 1), (2,))).ranks_per_node is None
    True

    Raises:
        ValueError: `nodes` is not a partition of 0 ... world_size - 1 in this order, or `rank` is not in it.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for node in self.nodes for rank in node]
        if not ranks or not all(self.nodes) or sorted(ranks) != list(range(len(ranks))):
            raise ValueError(
                f"`nodes` (={self.nodes}) must contain every rank from 0 to world_size - 1 exactly once, and no empty "
                "node. Use `Topology.discover`, or list all ranks."
            )
        sorted_nodes = sorted(tuple(sorted(node)) for node in self.nodes)
        if [tuple(node) for node in self.nodes] != sorted_nodes:
            raise ValueError(
                f"`nodes` (={self.nodes}) must be in ascending order, within each node and from node to node, because "
                "all ranks must number nodes and leaders in the same way. Sort the ranks and the nodes."
            )
        if not 0 <= self.rank < len(ranks):
            raise ValueError(
                f"`rank` (={self.rank}) must be one of the {len(ranks)} ranks in `nodes`. Pass a rank from 0 to "
                f"{len(ranks) - 1}."
            )

    @cached_property
    def world_size(self) -> int:
        """Total number of ranks."""
        return sum(len(node) for node in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @cached_property
    def ranks_per_node(self) -> int | None:
        """Number of ranks on each node, or None if nodes differ in size."""
        sizes = {len(node) for node in self.nodes}
        if len(sizes) > 1:
            return None
        return sizes.pop()

    @property
    def node(self) -> tuple[int, ...]:
        """Ranks on this rank's node, including this rank."""
        return next(node for node in self.nodes if self.rank in node)

    @property
    def local_rank(self) -> int:
        """Index of this rank within its node."""
        return self.node.index(self.rank)

    @property
    def leader(self) -> int:
        """Lowest rank on this rank's node."""
        return self.node[0]

    def partition(self, scope: Scope) -> tuple[tuple[int, ...], ...]:
        """Partition all ranks into groups that communicate with each other, for a scope such as `"node"`.

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
                f"`nodes` (={self.nodes}) must have the same number of ranks on every node, because the ranks "
                "with equal local rank form a group. Launch the same number of ranks on every node, or use another "
                "scope."
            )
        # Ranks are in ascending order, because torch numbers the ranks of a group in this order.
        return tuple(tuple(sorted(ranks)) for ranks in zip(*self.nodes, strict=True))

    def sharers(self, scope: Literal["node", "world"]) -> tuple[int, ...]:
        """Return the ranks that share a sharded optimizer update, in the order of their shards.

        With `"world"`, ranks with the same local rank are adjacent, because they share one shard of the node.

        >>> Topology(rank=0, nodes=((0, 1), (2, 3))).sharers("world")
        (0, 2, 1, 3)
        """
        if scope == "node":
            return self.node
        ranks_in_order: list[int] = []
        for ranks in self.partition("across"):
            ranks_in_order.extend(ranks)
        return tuple(ranks_in_order)

    @classmethod
    def from_ranks_per_node(cls, *, rank: int, world_size: int, ranks_per_node: int) -> Topology:
        """Create a topology whose nodes are consecutive blocks of `ranks_per_node` ranks.

        Raises:
            ValueError: The blocks do not fit (see `validate_ranks_per_node`).
        """
        validate_ranks_per_node(world_size=world_size, ranks_per_node=ranks_per_node)
        starts = range(0, world_size, ranks_per_node)
        nodes = tuple(tuple(range(start, start + ranks_per_node)) for start in starts)
        return cls(rank=rank, nodes=nodes)

    @classmethod
    def from_identities(cls, *, rank: int, identities: Sequence[Hashable]) -> Topology:
        """Create a topology in which ranks with equal host identities share a node.

        `identities[r]` is the identity of rank r.
        """
        # Dictionaries keep insertion order, so that on every rank the nodes are in the order of their first ranks.
        nodes: dict[Hashable, list[int]] = {}
        for owner, identity in enumerate(identities):
            nodes.setdefault(identity, []).append(owner)
        return cls(rank=rank, nodes=tuple(tuple(node) for node in nodes.values()))

    @classmethod
    def discover(cls) -> Topology:
        """Create the topology of all ranks by gathering every rank's host identity.

        Collective: every rank must call it, in the same order.
        """
        # Launcher variables and `rank // local_size` are wrong for cyclic rank orders and uneven nodes.
        identities: list[tuple[str, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(identities, host_identity())
        return cls.from_identities(rank=dist.get_rank(), identities=identities)


@dataclass(frozen=True, kw_only=True)
class ReplicaSets:
    """Partition of all ranks into sets that average their gradients independently.

    An example is one set for each pipeline stage, which holds the replicas of the stage.

    Args:
        world: Topology of all ranks.
        sets: Ranks of each set.

    >>> world = Topology.from_ranks_per_node(rank=3, world_size=8, ranks_per_node=4)
    >>> sets = ReplicaSets(world=world, sets=((0, 2, 4, 6), (1, 3, 5, 7)))
    >>> sets.own.rank, sets.own.nodes           # ranks of this rank's set, numbered from 0
    (1, ((0, 1), (2, 3)))
    >>> sets.partition("node")                  # global ranks
    ((0, 2), (4, 6), (1, 3), (5, 7))

    Raises:
        ValueError: The sets do not contain every rank exactly once, or they are spread over nodes in different ways.
    """

    world: Topology
    sets: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        all_ranks: list[int] = []
        for ranks in self.sets:
            all_ranks.extend(ranks)
        if sorted(all_ranks) != list(range(self.world.world_size)):
            raise ValueError(
                f"`sets` (={self.sets}) must contain every rank from 0 to {self.world.world_size - 1} exactly once. "
                "Assign each rank to one set."
            )
        topologies = [self._of(ranks) for ranks in self.sets]
        shapes = {(topology.num_nodes, topology.ranks_per_node) for topology in topologies}
        if len(shapes) > 1:
            # The topology determines the stages, and every rank takes part in creating the groups of all sets.
            raise ValueError(
                f"`nodes` (={self.world.nodes}) must have the same number of ranks of each set on every node, but the "
                f"sets {self.sets} are distributed unequally over the nodes. Launch the same number of ranks on every "
                f"node, which must be a multiple of {len(self.sets)}."
            )

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Total number of ranks in all sets."""
        return self.world.world_size

    @property
    def own(self) -> Topology:
        """Topology of the set that contains this rank, with the ranks of the set numbered from 0."""
        return self._of(next(ranks for ranks in self.sets if self.rank in ranks))

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of this rank's set on each node, numbered from 0 within the set."""
        return self.own.nodes

    @property
    def num_nodes(self) -> int:
        """Number of nodes that this rank's set of ranks spans."""
        return self.own.num_nodes

    @property
    def ranks_per_node(self) -> int | None:
        """Number of ranks per node in this rank's set, or None if it differs between nodes."""
        return self.own.ranks_per_node

    @property
    def node(self) -> tuple[int, ...]:
        """Global ranks of this rank's set that are on this rank's node."""
        return next(ranks for ranks in self.partition("node") if self.rank in ranks)

    def sharers(self, scope: Literal["node", "world"]) -> tuple[int, ...]:
        """Return the ranks that share a sharded update with this rank, in the order of their shards.

        The ranks belong to this rank's set and are numbered from 0 within it.
        """
        return self.own.sharers(scope)

    def _of(self, ranks: tuple[int, ...]) -> Topology:
        """Return the topology of a set of ranks, with its ranks renumbered from 0."""
        nodes = []
        for node in self.world.nodes:
            indices = tuple(index for index, rank in enumerate(ranks) if rank in node)
            if indices:
                nodes.append(indices)
        set_rank = 0
        if self.rank in ranks:
            set_rank = ranks.index(self.rank)
        return Topology(rank=set_rank, nodes=tuple(sorted(nodes)))

    def partition(self, scope: Scope) -> tuple[tuple[int, ...], ...]:
        """Partition each set into groups of ranks that communicate with each other, by global rank."""
        groups = []
        for ranks in self.sets:
            for indices in self._of(ranks).partition(scope):
                groups.append(tuple(ranks[index] for index in indices))
        return tuple(groups)


def validate_ranks_per_node(*, world_size: int, ranks_per_node: int) -> None:
    """Raise if `ranks_per_node` is not a positive integer that divides the world size.

    The check needs no process group, so it can run before ranks are launched.

    Raises:
        ValueError: `ranks_per_node` is not a positive integer, or does not divide `world_size`.
    """
    why = "each node has this number of ranks. Leave `ranks_per_node` unset to detect the nodes"
    require_whole("ranks_per_node", ranks_per_node, why)
    num_left = world_size % ranks_per_node
    if num_left > 0:
        raise ValueError(
            f"`ranks_per_node` (={ranks_per_node}) must divide `world_size` (={world_size}), because "
            f"otherwise the last node would have only {num_left} ranks. Launch a multiple "
            f"of {ranks_per_node} ranks, or leave `ranks_per_node` unset to detect the nodes."
        )


def host_identity() -> tuple[str, ...]:
    """Return the host name, boot ID and network namespace, which together identify a node.

    Entries that cannot be read are empty strings.
    """
    # The boot ID distinguishes hosts with the same name. The network namespace distinguishes containers (and emulated
    # hosts) on one machine, which reach each other over a network and not over loopback. Cgroups are not used, because
    # launchers may give each rank of a node its own cgroup.
    boot_id = ""
    network_namespace = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    with suppress(OSError):
        network_namespace = os.readlink("/proc/self/ns/net")
    return socket.gethostname(), boot_id, network_namespace
