"""Distinction between errors of torch's collectives and stores and errors of user code."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm.health.backend_errors import comes_from_others, is_of_a_collective
from lightning_hybrid.comm.health.consensus import OrderError

OF_USERS = [
    RuntimeError("socket timeout of my database"),
    RuntimeError("connection to the image server timed out after 30 s"),
    RuntimeError("cannot open gloomy_morning.jpg: broken pipe"),
    RuntimeError("the cluster has no nccl-tests, see nccl.conf"),
    RuntimeError("Distributed sampler: DistStore is empty"),
    TimeoutError("Timed out waiting 1800000ms for recv operation to complete"),
    OSError("Connection reset by peer"),
]
OF_TORCH = [
    RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:39836."
    ),
    RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv"),
    RuntimeError("Application timeout caused pair closure"),
    RuntimeError("Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:150] no error"),
    RuntimeError("Rank 0 timed out in monitoredBarrier after 2000 ms."),
    RuntimeError("Operation timed out!"),
    RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:77, remote process exited"
    ),
    RuntimeError("NCCL communicator was aborted on rank 1."),
    RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, ...)"),
    RuntimeError(
        "Got the following error when running the callback: DistNetworkError: Broken pipe"
    ),
    dist.DistBackendError("unhandled system error"),
    dist.DistNetworkError("Broken pipe"),
    dist.DistStoreError("wait timeout after 8000ms, keys: /default_pg/0//none"),
]


@pytest.mark.parametrize("error", OF_USERS, ids=str)
def test_an_error_of_user_code_that_sounds_like_a_networks_stays_the_users(error):
    assert not comes_from_others(error)
    assert not is_of_a_collective(error)


@pytest.mark.parametrize("error", OF_TORCH, ids=str)
def test_an_error_of_a_collective_or_a_store_is_recognized(error):
    assert comes_from_others(error)
    assert is_of_a_collective(error)


def test_another_order_of_buckets_is_known_from_other_ranks_and_from_no_collective():
    error = OrderError("this rank hands over x, and another y")
    assert comes_from_others(error)
    assert not is_of_a_collective(error)


def errors_of_a_rank_that_does_not_answer():
    """Return the errors that torch raises on each rank after a receive on rank zero has timed out."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.zeros(4)

    def receive():
        group.recv([tensor], 1 - dist.get_rank(), 0).wait()

    def receive_in_callback():
        future = group.allreduce([tensor]).get_future()
        future.then(lambda done: done.value()).wait()

    def wait_in_store():
        store.wait(["never written"], timedelta(milliseconds=100))

    dist.barrier()
    if dist.get_rank() == 1:
        store.wait(["receive has failed"], timedelta(seconds=60))
    errors = []
    for wait in (receive, receive, receive_in_callback, wait_in_store):
        with pytest.raises(RuntimeError) as caught:
            wait()
        errors.append(caught.value)
        store.set("receive has failed", "1")
    return [(str(error), comes_from_others(error)) for error in errors]


def test_errors_that_this_torch_raises_are_recognized(two_ranks):
    for errors in two_ranks.run(errors_of_a_rank_that_does_not_answer):
        for text, is_recognized in errors:
            assert is_recognized, text
