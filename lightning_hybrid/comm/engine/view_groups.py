"""Process groups of a view, which is the current set of hosts of an elastic run.

torch's default group contains only the ranks of one host. The groups of a view contain ranks of all its hosts.

creation     Only members of the view take part, through a store that exists as long as the view.
end          Every wait in the groups ends with an error, including waits of other ranks for this one. Gloo's own
             `abort` does not end waits.
stuck waits  If a connection closes in the middle of a message, Gloo does not end the wait for the message before the
             timeout. Therefore the main thread stops waiting soon after the end of a view, and a group with such a wait
             is kept until the process ends.
CUDA         Stages use NCCL groups, which are aborted. Plans, state and logs use Gloo, because failed waits of Gloo
             raise errors, whereas data that is read after an abort of NCCL is undefined.
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

# Time limit of one request to the store of a view.
STORE_LIMIT = timedelta(seconds=10)

# Seconds to wait for a group that is being created when its view ends. After that, the creation ends by its own
# timeout.
CONNECT_LIMIT_S = 0.5

_PATIENCE = timedelta(seconds=CONNECT_LIMIT_S / 2)

# Groups with a stuck wait. They are kept until the process ends, because freeing them would block.
_STUCK_GROUPS: list[list[dist.ProcessGroup]] = []


class ViewGroups(CommGroups):
    """Process groups over the hosts of one view of an elastic run.

    Collective: every rank of the view must create them.

    Args:
        topology: Topology of the view, from the perspective of this rank.
        store: Address `"ip:port"` of a store that only this view uses.
        number: Number of the view, which is unique in the run.
        timeout: Time limit of every collective.
        device: Device of the gradients.

    Attributes:
        world: Gloo group of all ranks, or None if there is only one rank.
        is_stuck: Whether a wait in the groups has not ended after `cut`.

    Raises:
        RuntimeError: A rank or the store was lost in the meantime.
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
        # Set after the parent's `__init__`, which would otherwise share the default group of one host.
        self._share = on_cuda
        self._backend = "gloo"
        # Ranks that share a GPU use Gloo, because NCCL accepts only one rank per GPU.
        if on_cuda and dist.get_backend() != "gloo":
            self._backend = "nccl"
        self.of_view = topology
        self._device = device
        self.world: dist.ProcessGroup | None = None
        self._aborting = threading.Lock()
        self._stuck: list[str] = []
        self._nccl_groups: dict[str, dist.ProcessGroup] = {}  # by name, until they are aborted
        self._gloo_groups: list[dist.ProcessGroup] = []
        self.is_stuck = False
        self.number = number
        self._store_address = store
        self._is_cut = False
        self._cut_s = 0.0

    def open(self) -> None:
        """Connect to the view's store, and create the process group of all ranks.

        After that, `cut` may be called.
        """
        host, _, port = self._store_address.rpartition(":")
        # This is only a client. The server ends with the rank that coordinates the view, or earlier.
        connect = partial(
            dist.TCPStore, is_master=False, timeout=STORE_LIMIT, wait_for_workers=False
        )
        self.store = _in_thread(
            partial(connect, host, int(port)), self._device, is_over=self._is_late
        )
        if self.topology.world_size > 1:
            all_ranks = tuple(range(self.topology.world_size))
            self.world = self._new_group(all_ranks, "view", "gloo")
            self._owned.append(self.world)

    def _make(
        self, missing: list[tuple[int, ...]], desc: str
    ) -> list[tuple[tuple[int, ...], dist.ProcessGroup | None]]:
        own_sets = [ranks for ranks in missing if self.topology.rank in ranks]
        groups = {ranks: self._new_group(ranks, desc, self._backend) for ranks in own_sets}
        return [(ranks, groups.get(ranks)) for ranks in missing]

    def _new_group(self, ranks: tuple[int, ...], desc: str, backend: str) -> dist.ProcessGroup:
        # This creates a group as `init_process_group` would, because `new_group` only knows ranks of the default group.
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
            self._nccl_groups[name] = group
        else:
            self._gloo_groups.append(group)
        # torch looks up a rank of a group by its rank in the default group, in which ranks of different hosts have the
        # same numbers. Ranks of other hosts therefore get negative numbers here, which are unique.
        group_ranks = {}
        for group_rank in range(len(ranks)):
            number = -1 - group_rank
            if group_rank == rank:
                number = dist.get_rank()
            group_ranks[number] = group_rank
        torch_groups._world.pg_group_ranks[group] = group_ranks
        if self._is_cut:  # `cut` may not have seen this group.
            self.cut()
            raise RuntimeError("comm: the group of hosts has changed")
        return group

    def run(self, do: Callable[[], Any]) -> Any:
        """Call a function that waits for other ranks and return its result, or raise if the view ends.

        Collective: every rank of the view must call it.

        Raises:
            RuntimeError: The view has ended in the meantime.
        """
        try:
            return _in_thread(do, self._device, is_over=self._is_late)
        except _LeftBehindError:
            self.is_stuck = True
            raise

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        """Broadcast a tensor in place from the rank `source` to all other ranks of the view.

        Collective: every rank of the view must call it, in the same order.

        Raises:
            RuntimeError: The view has ended in the meantime.
        """
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(self._all.broadcast([tensor], options))

    def add_up(self, tensor: Tensor) -> None:
        """All-reduce a tensor in place over all ranks of the view.

        Collective: every rank of the view must call it, in the same order.

        Raises:
            RuntimeError: The view has ended in the meantime.
        """
        if self.world is not None:
            self._wait(self._all.allreduce([tensor]))

    @property
    def _all(self) -> dist.ProcessGroup:
        if self._is_cut or self.world is None:
            raise RuntimeError("comm: the group of hosts has changed")
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
                raise _LeftBehindError("comm: the group of hosts has changed")

    def cut(self) -> None:
        """Unblock all waits in the process groups and for the store, which then raise an error.

        The method may be called from any thread. It does not wait for a group that is being created.
        """
        self._cut_s = self._cut_s or monotonic()
        self._is_cut = True
        for group in list(self._gloo_groups):
            end_waits(group)
        _shut_clients_of(self._store_address)
        self.abort(limit_s=ABORT_LIMIT_S)

    def abort(self, *, limit_s: float) -> list[str]:
        """Abort the NCCL groups of this view, and return the names of groups that are stuck.

        A group is stuck if its abort takes longer than `limit_s` seconds. The method may be called from any thread.
        """
        with self._aborting:
            groups = self._nccl_groups
            self._nccl_groups = {}
            self._stuck += abort_together(groups.items(), limit_s=limit_s)
            return self._stuck

    def _is_late(self) -> bool:
        limit_s = CONNECT_LIMIT_S
        if self._device.type == "cuda":
            limit_s = ABORT_LIMIT_S
        return self._is_cut and monotonic() > self._cut_s + limit_s

    def _give_up(self) -> list[dist.ProcessGroup]:
        # Work that is still queued on streams could overwrite gradients of the next attempt.
        if self._is_cut and self._device.type == "cuda":
            self._cut_s = monotonic()
            _in_thread(torch.cuda.synchronize, self._device, is_over=self._is_late)
            if self._stuck:
                raise RuntimeError(
                    f"comm: the process groups {self._stuck} of the previous set of hosts could not be aborted on "
                    f"{self._device}, so this host cannot continue. Start it again to join the run."
                )
        return super()._give_up()

    def destroy(self) -> None:
        """Destroy the process groups, except groups with a stuck wait.

        After `cut`, NCCL groups are released without waiting.
        """
        if self.is_stuck:
            _STUCK_GROUPS.append(self._gloo_groups)
        if self._is_cut and self._backend == "nccl":
            self.forget()
        else:
            super().destroy()
        # Threads and sockets are closed when the last reference is dropped.
        self.world = None
        self._gloo_groups = []


class _LeftBehindError(RuntimeError): ...


def _in_thread(do: Callable[[], Any], device: torch.device, *, is_over: Callable[[], bool]) -> Any:
    """Call a function in a thread and return its result, or raise as soon as `is_over` returns True.

    The function needs a separate thread, because `cut` cannot end every wait. NCCL and Gloo may wait for a connection
    from a rank that was lost, and CUDA may wait for a kernel.
    """
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
        raise _LeftBehindError(
            f"comm: process groups on {device} are still waiting for a failed host"
        )
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def options_of_nccl(timeout: timedelta) -> Any:
    """Return options for an NCCL group that torch does not split from the default group.

    Splitting is not possible, because the default group contains different ranks.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.lazy_init = True
    options._timeout = timeout
    return options


class ViewWatch:
    """Minimal watchdog of an elastic view, which compares buckets between ranks and reports failures.

    The watchdog has no thread, because the membership protocol detects lost hosts.

    Args:
        store: Store of the view.
        latch: Buckets in flight and the first failure.
    """

    def __init__(self, store: dist.Store, latch: FailureLatch) -> None:
        self._store = store
        self._latch = latch

    def start(self) -> None:
        """Do nothing, because this watchdog has no thread."""

    def compare(self, key: str, value: str) -> str:
        """Set `key` in the store if no other rank has set it, and return the key's value."""
        return str(self._store.compare_set(key, "", value).decode())

    def report(self, noticed: str, cause: Exception) -> None:
        """Fail all buckets in flight on this rank."""
        self._latch.trip(f"comm: {noticed}.", cause)

    def raise_alarm(self, error: str) -> str:
        """Return the error unchanged, because other ranks notice when this process exits."""
        return error

    def collect_status(self, noticed: str) -> str:
        """Return an error message about an event, without asking other ranks for their status."""
        return f"comm: {noticed}."

    def leave(self) -> None:
        """Do nothing, because ranks do not ask each other for their status."""


def _shut_clients_of(address: str) -> None:
    # torch cannot end the wait of a store's client, so this process's sockets to the store are shut down.
    host, _, port = address.rpartition(":")
    store_addresses = ((host, int(port)), (f"::ffff:{host}", int(port)))
    for name in os.listdir("/proc/self/fd"):
        if not Path(f"/proc/self/fd/{name}").is_socket():
            continue
        # A duplicate is wrapped, because Python closes the descriptor of a wrapped socket.
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as client:
            if client.getpeername()[:2] in store_addresses:
                client.shutdown(socket.SHUT_RDWR)
