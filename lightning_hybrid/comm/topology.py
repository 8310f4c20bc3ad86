"""Who shares a node with whom, and the process groups that follow from it."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from lightning_hybrid.comm.health.abort import forget

Scope = Literal["world", "node", "leaders", "across"]
"""Which ranks a stage talks among.

``world``: all. ``node``: those of one node. ``leaders``: the first of every node. ``across``: those with the same
local rank, one of every node (equal nodes only).
"""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Which ranks share a node, seen from one of them.

    ``nodes`` holds the global ranks of each node, ascending; nodes are ordered by their first rank, which is the
    node's leader. Ranks of one node need not be consecutive (cyclic launchers interleave them), and nodes need not be
    of equal size.

    >>> topology = Topology(rank=3, nodes=((0, 2), (1, 3)))
    >>> topology.leader, topology.local_rank, topology.ranks_per_node
    (1, 1, 2)
    >>> Topology(rank=0, nodes=((0, 1), (2,))).ranks_per_node is None
    True

    Raises ``ValueError`` where ``nodes`` is not such a partition of 0 ... world_size - 1, or ``rank`` is not in it.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for node in self.nodes for rank in node]
        if not ranks or not all(self.nodes) or sorted(ranks) != list(range(len(ranks))):
            raise ValueError(
                f"`nodes` (={self.nodes}) must hold every rank from 0 to world_size - 1 exactly once and no empty node"
            )
        if any(list(node) != sorted(node) for node in self.nodes) or list(self.nodes) != sorted(self.nodes):
            raise ValueError(
                f"`nodes` (={self.nodes}) must be in ascending order, inside each node and from node to node: "
                "every rank has to number nodes and leaders alike"
            )
        if not 0 <= self.rank < len(ranks):
            raise ValueError(f"`rank` (={self.rank}) must be one of the {len(ranks)} ranks in `nodes`")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(node) for node in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node; None where nodes differ."""
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
        """The sets of ranks, over the whole world, that talk among themselves in this scope.

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
            raise ValueError(f"`nodes` (={self.nodes}) must be of equal size for groups of equal local rank")
        return tuple(zip(*self.nodes, strict=True))

    @classmethod
    def from_ranks_per_node(cls, *, rank: int, world_size: int, ranks_per_node: int) -> Topology:
        """Nodes as consecutive blocks of ``ranks_per_node`` ranks: the user's word, nothing is looked up.

        >>> Topology.from_ranks_per_node(rank=1, world_size=4, ranks_per_node=2).nodes
        ((0, 1), (2, 3))

        Raises ``ValueError`` where the blocks do not fit (see ``validate_ranks_per_node``).
        """
        validate_ranks_per_node(world_size=world_size, ranks_per_node=ranks_per_node)
        starts = range(0, world_size, ranks_per_node)
        return cls(rank=rank, nodes=tuple(tuple(range(start, start + ranks_per_node)) for start in starts))

    @classmethod
    def from_identities(cls, *, rank: int, identities: Sequence[Hashable]) -> Topology:
        """Nodes as the ranks that gave equal identities; ``identities[r]`` is rank r's.

        >>> Topology.from_identities(rank=0, identities=["a", "b", "a"]).nodes
        ((0, 2), (1,))
        """
        nodes: dict[Hashable, list[int]] = {}
        for owner, identity in enumerate(identities):
            nodes.setdefault(identity, []).append(owner)
        return cls(rank=rank, nodes=tuple(tuple(node) for node in nodes.values()))

    @classmethod
    def discover(cls, group: dist.ProcessGroup | None = None) -> Topology:
        """Nodes as found by gathering every rank's ``host_identity``. Ranks are those of ``group`` (default: WORLD).

        Collective: every rank of the group must call it, in the same order. Launcher variables and
        ``rank // local_size`` are not used: both are wrong for cyclic rank orders and uneven nodes.
        """
        identities: list[tuple[str, ...]] = [()] * dist.get_world_size(group)
        dist.all_gather_object(identities, host_identity(), group=group)
        return cls.from_identities(rank=dist.get_rank(group), identities=identities)


def validate_ranks_per_node(*, world_size: int, ranks_per_node: int) -> None:
    """Check an explicit node size; needs no process group, so it can run before anything is launched.

    >>> validate_ranks_per_node(world_size=12, ranks_per_node=8)
    Traceback (most recent call last):
    ValueError: `ranks_per_node` (=8) must divide `world_size` (=12): it says that nodes are consecutive blocks of \
equal size, and here the last node would hold 4 ranks. Either launch a multiple of 8 ranks, or leave \
`strategy.ranks_per_node` unset so that nodes are found by themselves, or use the flat ring with \
`strategy.algorithm=flat`.
    """
    if not isinstance(ranks_per_node, int) or isinstance(ranks_per_node, bool) or ranks_per_node < 1:
        raise ValueError(
            f"`ranks_per_node` (={ranks_per_node!r}) must be a whole number from 1 to `world_size` (={world_size}): "
            "it counts the ranks that share a node. Leave `strategy.ranks_per_node` unset to have nodes found."
        )
    if world_size % ranks_per_node:
        raise ValueError(
            f"`ranks_per_node` (={ranks_per_node}) must divide `world_size` (={world_size}): it says that nodes are "
            f"consecutive blocks of equal size, and here the last node would hold {world_size % ranks_per_node} "
            f"ranks. Either launch a multiple of {ranks_per_node} ranks, or leave `strategy.ranks_per_node` unset so "
            "that nodes are found by themselves, or use the flat ring with `strategy.algorithm=flat`."
        )


def host_identity() -> tuple[str, ...]:
    """What two processes must have in common to count as one node: host name, boot and network namespace.

    The boot id tells apart hosts that share a name; the network namespace tells apart containers (and emulated
    hosts) on one machine, which reach each other over a network and not over loopback. What cannot be read counts as
    empty. cgroups are left out on purpose: launchers give each rank of one node its own.
    """
    boot_id = network_namespace = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    with suppress(OSError):
        network_namespace = os.readlink("/proc/self/ns/net")
    return socket.gethostname(), boot_id, network_namespace


class CommGroups:
    """The process groups of a set of stages, made for them alone and destroyed together.

    Collective: every rank of WORLD must construct it, in the same order, with the same stages.

    Each stage has groups of its own: two stages that ran on one Gloo group from two threads would be matched with each
    other by order of arrival, which sums the wrong tensors without a word. ``share`` lets stages of equal membership
    use one group, and the default group serve for all ranks; right only where a single thread issues everything in one
    order (CUDA streams), and there it saves communicators: hundreds of MiB each. DistributedDataParallel's own
    collectives, as that of ``find_unused_parameters``, are then in one order with the sums on the device as well, which
    NCCL asks of communicators that are in use at the same time. Where the default group is bound to a device, the
    groups of a scope are made by one split of it, else one after the other, by all ranks.

    Arguments:
        topology: seen from this rank.
        scopes: scope of each stage, by stage name; the order is the order of construction. More by ``add``.
        timeout: of every collective. ``dist.new_group`` would not inherit that of the default group.
        share: see above.
        backend: None takes the default group's.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        scopes: Mapping[str, Scope],
        timeout: timedelta,
        share: bool = False,
        backend: str | None = None,
    ) -> None:
        self.topology = topology
        self._timeout, self._share, self._backend = timeout, share, backend
        self._of_stage: dict[str, dist.ProcessGroup | None] = {}
        self._scopes: dict[str, Scope] = {}
        self._built: dict[tuple[int, ...], dist.ProcessGroup | None] = {}  # None: made, and this rank is not in it
        self._owned: list[dist.ProcessGroup] = []
        everybody = tuple(range(topology.world_size))
        if share and backend is None and dist.is_initialized() and dist.get_world_size() == len(everybody):
            self._built[everybody] = dist.distributed_c10d._get_default_group()
        self.add(scopes)

    def add(self, scopes: Mapping[str, Scope]) -> None:
        """Make the groups of the stages that have none yet. Collective, as the constructor."""
        rank, built = self.topology.rank, self._built
        for stage, scope in scopes.items():
            if stage in self._of_stage:
                continue
            self._of_stage[stage], self._scopes[stage] = None, scope
            several = _several(self.topology.partition(scope))
            missing = [ranks for ranks in several if not (self._share and ranks in built)]
            for ranks, group in self._make(missing, f"lightning_hybrid.{stage}"):
                built[ranks] = group
                if group is not None:
                    self._owned.append(group)
            for ranks in several:
                if rank in ranks:
                    self._of_stage[stage] = built[ranks]

    def _make(
        self, missing: list[tuple[int, ...]], desc: str
    ) -> list[tuple[tuple[int, ...], dist.ProcessGroup | None]]:
        """Groups of these ranks; None where this rank is not in it. All ranks of WORLD call it, in one order."""
        if self._share and missing and _can_be_split():
            split = dist.split_group(
                split_ranks=[list(ranks) for ranks in missing], timeout=self._timeout, group_desc=desc
            )
            return [(ranks, split if self.topology.rank in ranks else None) for ranks in missing]
        made = []
        for ranks in missing:
            group = dist.new_group(list(ranks), timeout=self._timeout, backend=self._backend, group_desc=desc)
            made.append((ranks, group if self.topology.rank in ranks else None))
        return made

    def of(self, stage: str) -> dist.ProcessGroup | None:
        """Group of this rank in a stage; None where it has nobody to talk to."""
        return self._of_stage[stage]

    def destroy(self) -> None:
        """Free the groups. May be called again, and after the default group is gone."""
        for group in self._give_up():
            _destroy(group)

    def forget(self) -> None:
        """As ``destroy``, of groups that were aborted: nothing is waited for."""
        for group in self._give_up():
            forget(group)

    def _give_up(self) -> list[dist.ProcessGroup]:
        owned, self._owned, self._of_stage, self._built = self._owned, [], {}, {}
        return owned

    def keep(self, stages: Iterable[str]) -> None:
        """Free the groups of all other stages, but for those that are shared with one of these. Collective."""
        kept = set(stages)
        used = {ranks for stage in kept for ranks in self.topology.partition(self._scopes[stage])}
        for stage in [stage for stage in self._of_stage if stage not in kept]:
            del self._of_stage[stage], self._scopes[stage]
        for ranks in [ranks for ranks in self._built if ranks not in used and len(ranks) < self.topology.world_size]:
            group = self._built.pop(ranks)
            if group is not None:
                self._owned = [owned for owned in self._owned if owned is not group]
                _destroy(group)

    def destroy_stage(self, stage: str) -> None:
        """Free the group of one stage (no shared one): ranks that wait in a collective of it learn so by an error."""
        group, self._of_stage[stage] = self._of_stage.get(stage), None
        self._built = {ranks: each for ranks, each in self._built.items() if each is not group}
        if group is not None:
            self._owned = [owned for owned in self._owned if owned is not group]
            _destroy(group)

    def forget_stage(self, stage: str) -> None:
        """Free the group of one stage (no shared one) that is not in use; ``add`` may make it again."""
        self.destroy_stage(stage)
        del self._of_stage[stage], self._scopes[stage]


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # destroying the default group has already destroyed this one
        if dist.is_initialized():
            dist.destroy_process_group(group)


def _can_be_split() -> bool:
    """Whether the default group's communicator is there, on a device of its own, and its backend can split it."""
    default = dist.distributed_c10d._get_default_group()
    if default.bound_device_id is None or not torch.cuda.is_available():
        return False
    return bool(default._get_backend(torch.device("cuda")).supports_splitting)


def _several(partition: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Without the sets of one rank, which need no group."""
    return [ranks for ranks in partition if len(ranks) > 1]
