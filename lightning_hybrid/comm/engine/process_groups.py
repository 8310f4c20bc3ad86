"""Process groups for the stages of the all-reduce algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.comm.health.abort import abort_all, forget, is_on_hosts
from lightning_hybrid.comm.topology import ReplicaSets, Scope, Topology


class CommGroups:
    """Process groups of an engine's all-reduce stages.

    The groups are created stage by stage, and are destroyed together.

    Args:
        topology: Topology from the perspective of this rank, or the sets of ranks if each set has its own engine.
        timeout: Time limit of every collective. `dist.new_group` does not inherit the default group's timeout.
        share: Whether stages with the same ranks use one group, and the default group is used for all ranks. This saves
            communicators, which take hundreds of MiB each. It requires that one thread issues all collectives in one
            order, as with CUDA streams.

    Attributes:
        by_stage: Process group of this rank for each stage, or None if there is no other rank to communicate with.
    """

    def __init__(
        self, *, topology: Topology | ReplicaSets, timeout: timedelta, share: bool = False
    ) -> None:
        self.topology = topology
        self._timeout = timeout
        self._share = share
        self.by_stage: dict[str, dist.ProcessGroup | None] = {}
        # Groups by their ranks. The value is None if the group exists but does not include this rank.
        self._built: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        # Each stage has its own groups. Gloo matches collectives only by their order. If two stages shared a group,
        # Gloo could silently add the wrong tensors.
        self._owned: list[dist.ProcessGroup] = []
        all_ranks = tuple(range(topology.world_size))
        # If the default group is used, our all-reduces and DDP's own collectives, such as that of
        # `find_unused_parameters`, are in the same order on the device. NCCL requires this of communicators that are in
        # use at the same time.
        if share and dist.is_initialized() and dist.get_world_size() == len(all_ranks):
            self._built[all_ranks] = dist.distributed_c10d._get_default_group()

    def add(self, scopes: Mapping[str, Scope]) -> None:
        """Create process groups for each named stage that does not have any yet.

        Collective: every rank must call it with the same stages, in the same order.
        """
        rank = self.topology.rank
        built = self._built
        for stage, scope in scopes.items():
            if stage in self.by_stage:
                continue
            self.by_stage[stage] = None
            # A single rank needs no group.
            rank_sets = [ranks for ranks in self.topology.partition(scope) if len(ranks) > 1]
            missing = [ranks for ranks in rank_sets if not (self._share and ranks in built)]
            for ranks, group in self._make(missing, f"lightning_hybrid.{stage}"):
                built[ranks] = group
                if group is not None:
                    self._owned.append(group)
            for ranks in rank_sets:
                if rank in ranks:
                    self.by_stage[stage] = built[ranks]

    def _make(
        self, missing: list[tuple[int, ...]], desc: str
    ) -> list[tuple[tuple[int, ...], dist.ProcessGroup | None]]:
        """Create a process group for each set of ranks, and return a list of `(ranks, group)` pairs.

        The group is None for sets that do not contain this rank.
        """
        # The default group is split once if it is bound to a device. Otherwise, all ranks create one group after the
        # other. The type is `Any`, because torch 2.15 types a result as a group, or a number that means no group.
        split: Any = None
        uses_split = self._share and bool(missing) and _can_be_split()
        if uses_split:
            split = dist.split_group(
                split_ranks=[list(ranks) for ranks in missing],
                timeout=self._timeout,
                group_desc=desc,
            )
        groups = []
        for ranks in missing:
            group: Any = split
            if not uses_split:
                # `new_group` is collective, so ranks outside of the group call it too.
                group = dist.new_group(list(ranks), timeout=self._timeout, group_desc=desc)
            if self.topology.rank not in ranks:
                group = None
            groups.append((ranks, group))
        return groups

    def abort(self, *, limit_s: float) -> list[str]:
        """Abort all GPU communicators of this process, and return the names of groups that are stuck.

        A group is stuck if its abort takes longer than `limit_s` seconds.
        """
        return abort_all(limit_s=limit_s)

    def destroy(self) -> None:
        """Destroy all process groups that this object has created.

        The method may be called repeatedly, and after the default group was destroyed.
        """
        for group in self._give_up():
            destroy(group)

    def forget(self) -> None:
        """Release process groups that were aborted, without waiting for them."""
        for group in self._give_up():
            forget(group)

    def _give_up(self) -> list[dist.ProcessGroup]:
        owned = self._owned
        self._owned = []
        self.by_stage = {}
        self._built = {}
        return owned

    def destroy_stage(self, stage: str) -> None:
        """Destroy the process group of one stage, which unblocks waiting ranks with an error.

        The group must not be shared with other stages.
        """
        group = self.by_stage.get(stage)
        self.by_stage[stage] = None
        # A group is destroyed when its last reference is dropped.
        self._built = {
            ranks: other_group
            for ranks, other_group in self._built.items()
            if other_group is not group
        }
        if group is not None:
            self._owned = [owned for owned in self._owned if owned is not group]
            destroy(group)


def own_group(
    sets: Sequence[Sequence[int]], *, timeout: timedelta | None, desc: str, **options: Any
) -> Any:
    """Create a process group for each set of ranks, and return the group of this rank's set.

    The sets are a partition of all ranks.

    Collective: every rank must call it, in the same order.
    """
    if not options and _can_be_split():
        return dist.split_group(
            split_ranks=[list(ranks) for ranks in sets], timeout=timeout, group_desc=desc
        )
    group_of_rank: Any = None
    for ranks in sets:
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=desc, **options)
        if dist.get_rank() in ranks:
            group_of_rank = group
    return group_of_rank


def _can_be_split() -> bool:
    # torch splits a communicator only if the default group is bound to a device. There is no public API to check this.
    default = dist.distributed_c10d._get_default_group()
    if default.bound_device_id is None or not torch.cuda.is_available():
        return False
    # Gloo reports that it can be split. But in torch 2.13 the names of the splits differ between ranks, which then wait
    # for each other forever, and `new_group` with another backend calls a method that Gloo does not have.
    if is_on_hosts(default):
        return False
    return bool(default._get_backend(torch.device("cuda")).supports_splitting)


def new_node_group(
    topology: Topology, *, timeout: timedelta | None, desc: str
) -> dist.ProcessGroup:
    """Create a process group for every node, and return the group of this rank's node.

    Collective: every rank must call it, in the same order.
    """
    group: dist.ProcessGroup = own_group(topology.nodes, timeout=timeout, desc=desc)
    return group


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a process group, unless it was destroyed together with the default group."""
    with suppress(ValueError):
        if dist.is_initialized():
            dist.destroy_process_group(group)


def end_group(group: dist.ProcessGroup, *, is_aborted: bool) -> None:
    """Destroy a process group, without waiting if it was aborted after a failure.

    Args:
        group: Process group to destroy.
        is_aborted: Whether the group was aborted, as all communicators on CUDA are after a failure.
    """
    if is_aborted:
        forget(group)
    else:
        destroy(group)
