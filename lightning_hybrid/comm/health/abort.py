"""Abort of a process's communicators, which unblocks kernels that wait for a failed rank.

When the host waits for its device, for example to print a loss, it waits for an NCCL kernel that spins until its peers
join. Only another thread that aborts the communicator can end the wait. The kernel may belong to any group, including
DistributedDataParallel's group, so all groups are aborted. A process that continues afterwards needs new groups.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

# Seconds to wait for aborts after a failure. Aborts that take longer continue in their threads.
ABORT_LIMIT_S = 5.0

# Backends that wait on the host. All others count as device backends, because torch has given NCCL several names.
_HOST_BACKENDS = ("gloo", "mpi", "fake")

_UNUSED_TAG = 0x4C48  # message tag that is never used for sending


def abort_all(*, limit_s: float) -> list[str]:
    """Abort all process groups of this process that have a GPU communicator.

    Returns:
        The names of the groups whose abort takes longer than `limit_s` seconds.
    """
    # All groups are aborted at the same time, because the abort of one group may wait for the kernel of another group
    # (pytorch#119797). torch's `_abort_process_group` uses an NCCL group call for this. But such a call belongs to one
    # thread, and since torch 2.6 each abort has its own thread.
    return abort_together(list(_device_groups()), limit_s=limit_s)


def abort_together(groups: Iterable[tuple[str, dist.ProcessGroup]], *, limit_s: float) -> list[str]:
    """Abort process groups concurrently, each in its own thread.

    Returns:
        The names of the groups whose abort takes longer than `limit_s` seconds.
    """
    threads = []
    for name, group in groups:
        thread = threading.Thread(
            target=_abort, args=(group,), name=f"comm-abort-{name}", daemon=True
        )
        thread.start()
        threads.append((name, thread))

    deadline_s = monotonic() + limit_s
    for _, thread in threads:
        remaining_s = deadline_s - monotonic()
        thread.join(max(0.0, remaining_s))
    return [name for name, thread in threads if thread.is_alive()]


def end_waits(group: dist.ProcessGroup) -> None:
    """Make all waits in a Gloo group fail, on this rank and on the ranks that wait for this rank.

    The function may be called from any thread. Gloo closes all connections of a group when one wait exceeds its
    timeout. Therefore the function waits for a message with a timeout of one millisecond. Shutting down the sockets
    would not be enough, because Gloo ignores a connection if its message belongs to a failed wait.
    """
    peers = set(range(group.size())) - {group.rank()}
    for rank in peers:
        # RuntimeError: the receive timed out, or the connection was already closed. Others may still be open.
        with suppress(RuntimeError):
            request = group.recv([torch.empty(1)], rank, _UNUSED_TAG)
            request.wait(timedelta(milliseconds=1))


def forget(group: dist.ProcessGroup) -> None:
    """Unregister an aborted process group from torch without waiting for it.

    `destroy_process_group` would wait.
    """
    # ValueError: the default group was destroyed, and this group with it.
    with suppress(ValueError):
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group(group)


def _abort(group: dist.ProcessGroup) -> None:
    # RuntimeError: the group is still being created, or was destroyed.
    with suppress(RuntimeError):
        group.abort()


def _device_groups() -> Iterator[tuple[str, dist.ProcessGroup]]:
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        # RuntimeError: the group has no backend for GPUs.
        with suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if not _is_host_backend(backend):
                yield name, group


def is_on_hosts(group: Any) -> bool:
    """Return whether a process group sends GPU tensors through host memory, as Gloo does.

    The result is False if `group` is None.
    """
    if group is None:
        return False
    return _is_host_backend(group._get_backend(torch.device("cuda")))


def _is_host_backend(backend: Any) -> bool:
    # A backend written in Python may have no name.
    return hasattr(backend, "name") and backend.name() in _HOST_BACKENDS
