"""Abort of communicators: all are aborted at the same time, and none that hangs is waited for."""

import threading
import time
from datetime import timedelta
from importlib.metadata import entry_points

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm.health import abort
from lightning_hybrid.comm.health.backend_errors import comes_from_others


def aborting(do):
    return type("Aborting", (), {"abort": lambda self: do()})()


def gone():
    raise RuntimeError("it is gone")


def test_no_abort_waits_for_another_to_begin_and_what_does_not_end_is_named_and_not_waited_for():
    started = threading.Barrier(3)
    may_end = threading.Event()
    # Each waits for all the others.
    groups = {str(index): aborting(lambda: started.wait(30)) for index in range(3)}
    groups |= {"stuck": aborting(lambda: may_end.wait(60)), "gone": aborting(gone)}
    began_s = time.monotonic()
    assert abort.abort_together(groups.items(), limit_s=1) == ["stuck"]
    assert time.monotonic() - began_s < 30
    assert not started.broken
    may_end.set()


def seconds_until_waits_end():
    group = dist.new_group(timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    if rank == 0:
        # this wait has failed, so nothing receives incoming data
        group.recv([torch.zeros(1)], 2, 0)
    if rank == 2:
        group.send([torch.zeros(1)], 0, 0)
    dist.barrier()
    if rank == 0:
        peer = 2
    else:
        peer = 0
    if rank == 0:
        threading.Timer(0.3, abort.end_waits, (group,)).start()
    began_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        group.recv([torch.zeros(1)], peer, 5).wait()
    assert comes_from_others(caught.value)
    return time.monotonic() - began_s


def test_all_waits_in_a_group_of_gloo_can_be_ended_also_those_for_a_connection_that_it_does_not_look_at(
    rank_pool,
):
    assert max(rank_pool.ranks(3).run(seconds_until_waits_end)) < 20


# All backend names in torch so far. Backends on the host are not aborted.
ON_DEVICES = {"nccl", "nccl-legacy", "nccl2", "nccl-lazy", "nccl4py", "ucc", "xccl"}
ON_HOSTS = {"gloo", "mpi", "fake"}


def names_in_torch():
    names = {entry.name for entry in entry_points(group="torch.distributed.backends")}
    for name, devices in dist.Backend.backend_capability.items():
        if "cuda" in devices:
            names.add(name)
    return names


def test_every_backend_that_this_torch_registers_is_known_here():
    assert names_in_torch() <= ON_DEVICES | ON_HOSTS
    assert "nccl" in names_in_torch()


class Group:
    """Group of a backend with this name. None: a Python backend, which has no name."""

    def __init__(self, name):
        self.is_aborted = False
        if name is not None:
            self.name = lambda: name

    def _get_backend(self, device):
        assert device == torch.device("cuda")
        return self

    def abort(self):
        self.is_aborted = True


def groups_that_would_be_aborted():
    gloo_group = dist.new_group([0, 1])
    groups = {name: Group(name) for name in [*sorted(ON_DEVICES | ON_HOSTS), None]}
    names = dist.distributed_c10d._world.pg_names
    names.update({group: str(name) for name, group in groups.items()})
    try:
        assert abort.abort_all(limit_s=30) == []
    finally:
        for group in groups.values():
            del names[group]
    dist.all_reduce(torch.ones(1), group=gloo_group)  # Gloo's group is not aborted
    dist.destroy_process_group(gloo_group)
    return {name for name, group in groups.items() if group.is_aborted}


def test_only_groups_with_communicators_on_a_device_are_aborted(two_ranks):
    assert two_ranks.run(groups_that_would_be_aborted) == [ON_DEVICES | {None}] * 2


def forgotten():
    group = dist.new_group([0, 1])
    aborted = []
    dist.barrier()  # both are connected; forgetting earlier would break the other rank's handshake
    num_groups = len(dist.distributed_c10d._world.pg_map)
    abort.forget(group)
    abort.forget(group)
    with pytest.MonkeyPatch.context() as patch:  # after the default group
        patch.setattr(dist, "is_initialized", lambda: False)
        patch.setattr(dist.distributed_c10d, "_abort_process_group", aborted.append)
        abort.forget(dist.group.WORLD)
    return num_groups - len(dist.distributed_c10d._world.pg_map), aborted


def test_a_group_that_was_aborted_is_taken_out_of_torchs_book_without_waiting(two_ranks):
    assert two_ranks.run(forgotten) == [(1, [])] * 2
