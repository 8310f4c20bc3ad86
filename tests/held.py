"""Counts of process resources, for tests that open and close something many times."""

import gc
import os
import time
from collections.abc import Callable

import torch.distributed as dist

SETTLE_LIMIT_S = 5.0
"""Gloo's threads and sockets, and the other side's of a pair, end a little after ``destroy`` has returned."""


def held() -> dict[str, int]:
    """Count the OS threads, process groups and open files of this process."""
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "files": len(os.listdir("/proc/self/fd")),
    }


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(cycle: Callable[[], None], *, num_warm_up: int, num_cycles: int) -> dict[str, int]:
    """Return the growth of resources and of resident bytes over ``num_cycles`` cycles.

    The first count is taken once nothing has changed for half a second. The second count is taken once it no longer
    exceeds the first one, or at the deadline. A resource that each cycle leaks is counted ``num_cycles`` times.

    Collective: every rank of the group must call it.
    """
    for _ in range(num_warm_up):
        cycle()
    dist.barrier()
    before = _at_rest()
    resident_before = resident_bytes()
    for _ in range(num_cycles):
        cycle()
    dist.barrier()
    gc.collect()
    after = held()
    deadline_s = time.monotonic() + SETTLE_LIMIT_S
    while any(after[name] > before[name] for name in before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
        after = held()
    return {
        **{name: after[name] - before[name] for name in before},
        "bytes": resident_bytes() - resident_before,
    }


def _at_rest() -> dict[str, int]:
    gc.collect()
    seen = held()
    since_s = time.monotonic()
    deadline_s = time.monotonic() + SETTLE_LIMIT_S
    while time.monotonic() < min(deadline_s, since_s + 0.5):
        time.sleep(0.05)
        if (now := held()) != seen:
            seen = now
            since_s = time.monotonic()
    return seen
