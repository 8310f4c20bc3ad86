"""Ends the communicators of this process at once, so that kernels which wait in them for a lost rank end as well.

A rank whose host waits for its device (a loss that is printed) sits behind a kernel of NCCL
that spins until its peers come. Only aborting that communicator frees it, from another thread; and as it may wait in
any group, DistributedDataParallel's own too, all groups are aborted. A process that goes on after that needs new ones.
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

# How long a failure waits for communicators to end; they go on ending afterwards.
ABORT_LIMIT_S = 5.0

# What waits on the host. Everything else has kernels on a device: torch has given NCCL's backend several names.
_ON_HOSTS = ("gloo", "mpi", "fake")

_TAG = 0x4C48  # of a message that is never sent


def abort_all(*, limit_s: float) -> list[str]:
    """Abort every group of this process that has communicators on a GPU; returns names of those that take longer."""
    # All at the same time, as the abort of one may wait for the kernel of another (pytorch#119797). torch's own
    # `_abort_process_group` puts them into one group of NCCL's for that, but a group is a thread's, and since torch 2.6
    # each abort has a thread of its own.
    return abort_together(list(_on_devices()), limit_s=limit_s)


def abort_together(groups: Iterable[tuple[str, dist.ProcessGroup]], *, limit_s: float) -> list[str]:
    """Abort these groups, each in a thread; returns names of those that have not ended within the limit."""
    threads = []
    for name, group in groups:
        thread = threading.Thread(
            target=_abort, args=(group,), name=f"comm-abort-{name}", daemon=True
        )
        thread.start()
        threads.append((name, thread))
    end_s = monotonic() + limit_s
    for _, thread in threads:
        thread.join(max(0.0, end_s - monotonic()))
    return [name for name, thread in threads if thread.is_alive()]


def end_waits(group: dist.ProcessGroup) -> None:
    """End every wait in a group of Gloo's by an error, on this rank and on those that wait for it; from any thread.

    Where one wait is over its time, Gloo closes all connections of the group: here a receive that has a millisecond.
    To shut its sockets is not enough: a connection whose message is for a wait that has failed is not looked at again.
    """
    for rank in set(range(group.size())) - {group.rank()}:
        with suppress(
            RuntimeError
        ):  # over its time, or closed already, where the next one may not be
            group.recv([torch.empty(1)], rank, _TAG).wait(timedelta(milliseconds=1))


def forget(group: dist.ProcessGroup) -> None:
    """Remove an aborted group from torch's tables, which `destroy_process_group` would do after waiting for it."""
    with suppress(ValueError):  # the default group is gone, and took this one with it
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group(group)


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # it is being made, or gone
        group.abort()


def _on_devices() -> Iterator[tuple[str, dist.ProcessGroup]]:
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError):  # no backend for GPUs
            if not _is_on_hosts(group._get_backend(torch.device("cuda"))):
                yield name, group


def is_on_hosts(group: Any) -> bool:
    """Return whether hosts carry what a group does with tensors of a GPU; not where there is no group (None)."""
    return group is not None and _is_on_hosts(group._get_backend(torch.device("cuda")))


def _is_on_hosts(backend: Any) -> bool:
    return (
        hasattr(backend, "name") and backend.name() in _ON_HOSTS
    )  # one in Python may have no name
