"""Communicators are aborted all at the same time, and none that does not end is waited for."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm.health import abort


def test_no_abort_waits_for_another_to_begin():
    started = threading.Barrier(3)

    class Waits:
        is_aborted = False

        def abort(self):
            started.wait(30)  # for all the others
            self.is_aborted = True

    groups = [Waits() for _ in range(3)]
    assert abort.abort_together(((str(index), each) for index, each in enumerate(groups)), limit_s=30) == []
    assert all(each.is_aborted for each in groups)


def test_what_does_not_end_is_named_and_not_waited_for():
    may_end = threading.Event()

    class Hangs:
        def abort(self):
            may_end.wait(60)

    class Raises:
        def abort(self):
            raise RuntimeError("it is gone")

    began_s = time.monotonic()
    assert abort.abort_together([("stuck", Hangs()), ("gone", Raises())], limit_s=0.2) == ["stuck"]
    assert time.monotonic() - began_s < 30
    may_end.set()


def groups_that_would_be_aborted():
    """Of the default group, one of Gloo's and one that says it has a backend for GPUs."""
    other, aborted = dist.new_group([0, 1]), []

    class OnDevice:
        def name(self):
            return "nccl"

        def _get_backend(self, device):
            assert device == torch.device("cuda")
            return self

        def abort(self):
            aborted.append("on a device")

    names = dist.distributed_c10d._world.pg_names
    on_device = OnDevice()
    names[on_device] = "on a device"
    try:
        assert abort.abort_all(limit_s=30) == []
    finally:
        del names[on_device]
    dist.all_reduce(torch.ones(1), group=other)  # Gloo's is left alone
    dist.destroy_process_group(other)
    return aborted


def test_only_groups_with_communicators_on_a_device_are_aborted(two_ranks):
    assert two_ranks.run(groups_that_would_be_aborted) == [["on a device"]] * 2


def forgotten():
    group = dist.new_group([0, 1])
    dist.barrier()  # both are connected: forgotten before, it would end the other's handshake
    num_groups = len(dist.distributed_c10d._world.pg_map)
    abort.forget(group)
    abort.forget(group)
    return num_groups - len(dist.distributed_c10d._world.pg_map)


def test_a_group_that_was_aborted_is_taken_out_of_torchs_book_without_waiting(two_ranks):
    assert two_ranks.run(forgotten) == [1, 1]


def test_nothing_is_forgotten_after_the_default_group(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda group: pytest.fail("it is gone"))
    abort.forget(object())
