"""Ends the communicators of this process at once, so that kernels which wait in them for a lost rank end as well.

A rank whose host waits for its device (a loss that is printed) sits behind a kernel of NCCL
that spins until its peers come. Only aborting that communicator frees it, from another thread; and as it may wait in
any group, DistributedDataParallel's own too, all groups are aborted. A process that goes on after that needs new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic

import torch
import torch.distributed as dist


def abort_all(*, limit_s: float) -> list[str]:
    """Abort every group of this process that has communicators on a GPU; returns names of those that take longer."""
    # All at the same time, as the abort of one may wait for the kernel of another (pytorch#119797). torch's own
    # `_abort_process_group` puts them into one group of NCCL's for that, but a group is a thread's, and since torch 2.6
    # each abort has a thread of its own.
    return abort_together(((name, group) for group, name in _on_devices()), limit_s=limit_s)


def abort_together(groups: Iterable[tuple[str, dist.ProcessGroup]], *, limit_s: float) -> list[str]:
    """Abort these groups, each in a thread; returns names of those that have not ended within the limit."""
    threads = []
    for name, group in groups:
        thread = threading.Thread(target=_abort, args=(group,), name=f"comm-abort-{name}", daemon=True)
        thread.start()
        threads.append((name, thread))
    end_s = monotonic() + limit_s
    for _, thread in threads:
        thread.join(max(0.0, end_s - monotonic()))
    return [name for name, thread in threads if thread.is_alive()]


def forget(group: dist.ProcessGroup) -> None:
    """Remove an aborted group from torch's tables, which `destroy_process_group` would do after waiting for it."""
    with suppress(ValueError):  # the default group is gone, and took this one with it
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group(group)


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # it is being made, or gone
        group.abort()


def _on_devices() -> list[tuple[dist.ProcessGroup, str]]:
    found: list[tuple[dist.ProcessGroup, str]] = []
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError):  # no backend for GPUs
            if group._get_backend(torch.device("cuda")).name() == "nccl":
                found.append((group, name))
    return found
