"""The groups of a view: of the hosts that an elastic run has now. torch's default group is one host's.

made         by members alone, through a store that ends with the view
cut          waits in them end by an error, also those of others for this rank; Gloo's own `abort` ends none
left behind  Gloo forgets the waits for a message that is half through as its connection closes: they end with the
             timeout. So the main thread waits no longer than it has to, and such a group stays until the process ends
on CUDA      stages have groups of NCCL, which are aborted; plans, state and logs stay with Gloo, whose waits say so
             where they fail: what is read after an abort may be anything
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.engine.in_flight import FailureLatch
from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.health.abort import ABORT_LIMIT_S, abort_together, end_waits
from lightning_hybrid.comm.topology import Topology

# How long one request to the store of a view may take.
STORE_LIMIT = timedelta(seconds=10)

# How long a group that is being made is waited for when its view has ended; then it is left to its timeout.
CONNECT_LIMIT_S = 0.5

_PATIENCE = timedelta(seconds=CONNECT_LIMIT_S / 2)

_LEFT: list[list[dist.ProcessGroup]] = []  # that are left behind: to free them would be to wait


class ViewGroups(CommGroups):
    """Groups of one view. Collective: every rank of the view makes them.

    Args:
        topology: of the view, seen from this rank.
        store: `"ip:port"` of a store of this view alone.
        number: of the view; no other view of the run has it.
        timeout: of every collective.
        device: of gradients.

    Attributes:
        world: a group of all ranks, over Gloo; None where this rank is alone.
        is_stuck: whether a wait in them has not ended after a cut.

    Raises:
        RuntimeError: a rank is lost meanwhile, or the store.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        store: str,
        number: int,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        on_cuda = device.type == "cuda"
        super().__init__(topology=topology, timeout=timeout)
        self._share = on_cuda  # from here on: the default group, of one host, outlives the view
        # Ranks of one GPU have Gloo, as NCCL takes one rank on each.
        self._backend = "nccl" if on_cuda and dist.get_backend() != "gloo" else "gloo"
        self.of_view = topology
        self._device = device
        self.world: dist.ProcessGroup | None = None
        self._aborting = threading.Lock()
        self._stuck = list[str]()
        self._on_devices: dict[str, dist.ProcessGroup] = {}  # those to abort, until they are
        self._on_gloo: list[dist.ProcessGroup] = []
        self.is_stuck = False
        self.number = number
        self._store_at = store
        self._is_cut = False
        self._cut_s = 0.0

    def open(self) -> None:
        """Connect to the store, and make the group of all ranks. From here on `cut` may be called."""
        host, _, port = self._store_at.rpartition(":")
        # A client alone: its server ends with the rank that coordinates the view, or sooner.
        connect = partial(
            dist.TCPStore, is_master=False, timeout=STORE_LIMIT, wait_for_workers=False
        )
        self.store = _in_thread(
            partial(connect, host, int(port)), self._device, is_over=self._is_late
        )
        if self.topology.world_size > 1:
            world = self.world = self._new_group(
                tuple(range(self.topology.world_size)), "view", "gloo"
            )
            self._owned.append(world)

    def _make(
        self, missing: list[tuple[int, ...]], desc: str
    ) -> list[tuple[tuple[int, ...], dist.ProcessGroup | None]]:
        own_sets = [ranks for ranks in missing if self.topology.rank in ranks]
        groups = {ranks: self._new_group(ranks, desc, self._backend) for ranks in own_sets}
        return [(ranks, groups.get(ranks)) for ranks in missing]

    def _new_group(self, ranks: tuple[int, ...], desc: str, backend: str) -> dist.ProcessGroup:
        # What `init_process_group` does for a second world: `new_group` knows the ranks of the default group alone.
        torch_groups: Any = dist.distributed_c10d
        rank = ranks.index(self.topology.rank)
        name = f"view {self.number}, {desc}, {ranks}"
        options: dict[str, Any] = {"group_name": name, "timeout": self._timeout, "group_desc": desc}
        if backend == "nccl":
            options |= {
                "backend_options": options_of_nccl(self._timeout),
                "device_id": self._device,
            }
        make = partial(
            torch_groups._new_process_group_helper,
            len(ranks),
            rank,
            [],
            backend,
            self.store,
            **options,
        )
        group, _ = _in_thread(make, self._device, is_over=self._is_late)
        if backend == "nccl":
            self._on_devices[name] = group
        else:
            self._on_gloo.append(group)
        # torch finds a rank's place in a group by its number in the default group, which other hosts' ranks have too:
        # they stand under numbers that no rank has.
        numbers = {index: -1 - index for index in range(len(ranks))} | {rank: dist.get_rank()}
        torch_groups._world.pg_group_ranks[group] = {
            number: group_rank for group_rank, number in numbers.items()
        }
        if self._is_cut:  # it may have been too late for the cut
            self.cut()
            raise RuntimeError("comm: the view has ended")
        return group

    def run(self, do: Callable[[], Any]) -> Any:
        """Run `do`, which waits for other ranks, and return its result.

        Collective: every rank of the view must call it.

        Raises:
            RuntimeError: the view has ended meanwhile.
        """
        try:
            return _in_thread(do, self._device, is_over=self._is_late)
        except _LeftBehindError:
            self.is_stuck = True
            raise

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        """Copy a tensor of one rank to all others, which have such. Collective. Raises as `run`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(self._all.broadcast([tensor], options))

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in its place. Collective. Raises as `run`."""
        if self.world is not None:
            self._wait(self._all.allreduce([tensor]))

    @property
    def _all(self) -> dist.ProcessGroup:
        if self._is_cut or self.world is None:
            raise RuntimeError("comm: the view has ended")
        return self.world

    def _wait(self, work: dist.Work) -> None:
        while True:
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError:
                if work.is_completed() and not work.is_success():
                    raise
            if self._is_late():
                self.is_stuck = True
                raise _LeftBehindError("comm: the view has ended")

    def cut(self) -> None:
        """End all waits in the groups and for the store.

        May be called from any thread. A group that is being made is left behind.
        """
        self._cut_s = self._cut_s or monotonic()
        self._is_cut = True
        for group in list(self._on_gloo):
            end_waits(group)
        _shut_clients_of(self._store_at)
        self.abort(limit_s=ABORT_LIMIT_S)

    def abort(self, *, limit_s: float) -> list[str]:
        """Abort NCCL's work in these groups only, and wait until it is aborted. May be called from any thread."""
        with self._aborting:
            groups = self._on_devices
            self._on_devices = {}
            self._stuck += abort_together(groups.items(), limit_s=limit_s)
            return self._stuck

    def _is_late(self) -> bool:
        limit_s = ABORT_LIMIT_S if self._device.type == "cuda" else CONNECT_LIMIT_S
        return self._is_cut and monotonic() > self._cut_s + limit_s

    def _give_up(self) -> list[dist.ProcessGroup]:
        # What an attempt has put on streams may yet write into gradients, which the next one needs.
        if self._is_cut and self._device.type == "cuda":
            self._cut_s = monotonic()
            _in_thread(torch.cuda.synchronize, self._device, is_over=self._is_late)
            if self._stuck:
                raise RuntimeError(
                    f"comm: groups {self._stuck} of the former view do not end on {self._device}"
                )
        return super()._give_up()

    def destroy(self) -> None:
        """Free the groups, but for those that are stuck. After a cut nothing of NCCL's is waited for."""
        if self.is_stuck:
            _LEFT.append(self._on_gloo)
        (self.forget if self._is_cut and self._backend == "nccl" else super().destroy)()
        self.world, self._on_gloo = None, []  # threads and sockets end with the last reference


class _LeftBehindError(RuntimeError): ...


def _in_thread(do: Callable[[], Any], device: torch.device, *, is_over: Callable[[], bool]) -> Any:
    # What a cut may not end: NCCL and Gloo that wait to be connected to by a rank which has left, CUDA.
    results: list[Any] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            results.append(do())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, name="comm-limited", daemon=True)
    thread.start()
    while thread.is_alive() and not is_over():
        thread.join(0.02)
    if not results:
        raise _LeftBehindError(f"comm: groups on {device} still wait for a host that is gone")
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def options_of_nccl(timeout: timedelta) -> Any:
    """Return the options of a group that torch does not split from its default group, which has other ranks."""
    options = dist.ProcessGroupNCCL.Options()
    options.lazy_init = True
    options._timeout = timeout
    return options


class ViewWatch:
    """Watchdog of a view: compares buckets over its ranks and ends its sums if one fails.

    Membership handles lost hosts.
    """

    def __init__(self, store: dist.Store, latch: FailureLatch) -> None:
        self._store = store
        self._latch = latch

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def compare(self, key: str, value: str) -> str:
        """Return what the first rank to come wrote under `key`."""
        return str(self._store.compare_set(key, "", value).decode())

    def report(self, noticed: str, cause: Exception) -> None:
        """End the sums of this rank."""
        self._latch.trip(f"comm: {noticed}.", cause)

    def raise_alarm(self, error: str) -> str:
        """Return the error: other ranks learn of it when this process ends."""
        return error

    def collect_status(self, noticed: str) -> str:
        """Return what was noticed."""
        return f"comm: {noticed}."

    def leave(self) -> None:
        """Do nothing: none asks."""


def _shut_clients_of(address: str) -> None:
    # Those of this process: torch has no way to end the wait of a store's client.
    host, _, port = address.rpartition(":")
    for name in os.listdir("/proc/self/fd"):
        if not Path(f"/proc/self/fd/{name}").is_socket():
            continue
        with (
            suppress(OSError),
            socket.socket(fileno=os.dup(int(name))) as client,
        ):  # the copy's number stays what it is
            if client.getpeername()[:2] in ((host, int(port)), (f"::ffff:{host}", int(port))):
                client.shutdown(socket.SHUT_RDWR)
