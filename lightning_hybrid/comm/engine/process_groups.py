"""The process groups in which the stages of an engine talk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.comm.health.abort import abort_all, forget, is_on_hosts
from lightning_hybrid.comm.topology import ReplicaSets, Scope, Topology


class CommGroups:
    """The process groups of a set of stages, made for them alone and destroyed together.

    `by_stage` has the group of this rank in each stage; None where it has no other rank to talk to.

    Args:
        topology: seen from this rank; or the sets that it is divided into, each with an engine of its own.
        timeout: of every collective. `dist.new_group` would not inherit that of the default group.
        share: whether stages of equal membership use one group, and the default group serves for all ranks. Only where
            a single thread issues everything in one order (CUDA streams); it saves communicators, hundreds of MiB each.
    """

    def __init__(
        self, *, topology: Topology | ReplicaSets, timeout: timedelta, share: bool = False
    ) -> None:
        self.topology = topology
        self._timeout = timeout
        self._share = share
        self.by_stage: dict[str, dist.ProcessGroup | None] = {}
        self._built: dict[
            tuple[int, ...], dist.ProcessGroup | None
        ] = {}  # None: made, and this rank is not in it
        # Each stage has groups of its own: two stages on one Gloo group would be matched with each other by order of
        # arrival, which sums the wrong tensors without a word.
        self._owned: list[dist.ProcessGroup] = []
        everybody = tuple(range(topology.world_size))  # the default group serves for these
        # DDP's own collectives, as that of `find_unused_parameters`, are then in one order with the sums on the device
        # as well, which NCCL asks of communicators that are in use at the same time.
        if share and dist.is_initialized() and dist.get_world_size() == len(everybody):
            self._built[everybody] = dist.distributed_c10d._get_default_group()

    def add(self, scopes: Mapping[str, Scope]) -> None:
        """Make the groups of the stages (by name) that have none yet. Collective: the same stages in the same order."""
        rank = self.topology.rank
        built = self._built
        for stage, scope in scopes.items():
            if stage in self.by_stage:
                continue
            self.by_stage[stage] = None
            several = _several(self.topology.partition(scope))
            missing = [ranks for ranks in several if not (self._share and ranks in built)]
            for ranks, group in self._make(missing, f"lightning_hybrid.{stage}"):
                built[ranks] = group
                if group is not None:
                    self._owned.append(group)
            for ranks in several:
                if rank in ranks:
                    self.by_stage[stage] = built[ranks]

    def _make(
        self, missing: list[tuple[int, ...]], desc: str
    ) -> list[tuple[tuple[int, ...], dist.ProcessGroup | None]]:
        # One split of the default group where it is bound to a device; else one after the other, by all ranks.
        # `Any`: torch 2.15 types them as a group or the number that stands for none, 2.13 as a group.
        if self._share and missing and _can_be_split():
            split: Any = dist.split_group(
                split_ranks=[list(ranks) for ranks in missing],
                timeout=self._timeout,
                group_desc=desc,
            )
            return [(ranks, split if self.topology.rank in ranks else None) for ranks in missing]
        groups = []
        for ranks in missing:  # `new_group` is collective: ranks outside call it too
            group: Any = dist.new_group(list(ranks), timeout=self._timeout, group_desc=desc)
            groups.append((ranks, group if self.topology.rank in ranks else None))
        return groups

    def abort(self, *, limit_s: float) -> list[str]:
        """Abort all groups of this process on GPUs. Return names of those that take longer than the limit."""
        return abort_all(limit_s=limit_s)

    def destroy(self) -> None:
        """Free the groups. May be called again, and after the default group is gone."""
        for group in self._give_up():
            destroy(group)

    def forget(self) -> None:
        """Free groups that were aborted: nothing is waited for."""
        for group in self._give_up():
            forget(group)

    def _give_up(self) -> list[dist.ProcessGroup]:
        owned = self._owned
        self._owned = []
        self.by_stage = {}
        self._built = {}
        return owned

    def destroy_stage(self, stage: str) -> None:
        """Free the group of one stage (no shared one): ranks that wait in a collective of it learn so by an error."""
        group = self.by_stage.get(stage)
        self.by_stage[stage] = None
        self._built = {
            ranks: other_group
            for ranks, other_group in self._built.items()
            if other_group is not group
        }  # no reference may stay
        if group is not None:
            self._owned = [owned for owned in self._owned if owned is not group]
            destroy(group)


def own_group(
    sets: Sequence[Sequence[int]], *, timeout: timedelta | None, desc: str, **options: Any
) -> Any:
    """Create a group for each of these sets, which divide the world, and return this rank's.

    Collective: all ranks call it.
    """
    if (
        not options and _can_be_split()
    ):  # else each is a split of its own, in which all ranks take part
        return dist.split_group(
            split_ranks=[list(ranks) for ranks in sets], timeout=timeout, group_desc=desc
        )
    groups = [
        dist.new_group(list(ranks), timeout=timeout, group_desc=desc, **options) for ranks in sets
    ]
    return next(
        group for ranks, group in zip(sets, groups, strict=True) if dist.get_rank() in ranks
    )


def _can_be_split() -> bool:
    # torch splits a communicator only where the default group is bound to a device. It has no public way to ask.
    default = dist.distributed_c10d._get_default_group()
    if default.bound_device_id is None or not torch.cuda.is_available():
        return False
    # Gloo says that it can. torch 2.13 gives its splits names that differ between ranks, which then wait for each other
    # for ever, and `new_group` for another backend asks Gloo for a method that it does not have.
    if is_on_hosts(default):
        return False
    return bool(default._get_backend(torch.device("cuda")).supports_splitting)


def _several(partition: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    # A rank that is alone needs no group.
    return [ranks for ranks in partition if len(ranks) > 1]


def new_node_group(
    topology: Topology, *, timeout: timedelta | None, desc: str
) -> dist.ProcessGroup:
    """Make a group for each node, and return that of this rank's. Collective: every rank must call it."""
    group: dist.ProcessGroup = own_group(topology.nodes, timeout=timeout, desc=desc)
    return group


def destroy(group: dist.ProcessGroup) -> None:
    """Free a group, unless the default group is gone."""
    with suppress(ValueError):
        if dist.is_initialized():
            dist.destroy_process_group(group)


def end_group(group: dist.ProcessGroup, *, is_aborted: bool) -> None:
    """Free a group, unless the default group is gone. After a failure that aborted it, wait for nothing."""
    # On CUDA a failure aborts all communicators.
    (forget if is_aborted else destroy)(group)
