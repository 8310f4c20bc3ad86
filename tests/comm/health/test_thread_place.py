"""Place of a rank that hangs outside of the engine, reported for any collective in which the others wait."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.health.device_waits import DeviceWaits
from lightning_hybrid.comm.health.diagnosis import diagnose
from lightning_hybrid.comm.health.thread_place import place_of_error
from lightning_hybrid.pipeline.pipeline_watchdog import PipelineWatchdog
from lightning_hybrid.strategy.failures import setup_watchdog
from tests.comm.layouts import engine_over
from tests.stand_in.recording_cuda import CUDA, Cuda

WAITS = {
    "broadcast": lambda model: dist.broadcast(torch.ones(1), src=0),
    "backward": lambda model: model(torch.ones(2, 4) + dist.get_rank()).sum().backward(),
}


def user_code(seconds):
    time.sleep(seconds)


def status_beside(wait):
    """Let rank 0 wait for rank 1, which is in user code, and return the status of each rank seen by another thread."""
    engine = engine_over(((0, 1),), CommPlan())
    results = []
    model = DistributedDataParallel(nn.BatchNorm1d(4))
    dist.barrier()
    asks = threading.Timer(0.2, lambda: results.append(engine._latch.status()))
    asks.start()
    if dist.get_rank() == 1:
        user_code(0.4)
    WAITS[wait](model)
    asks.join()
    engine.close()
    return results[0]


@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_in_user_code_is_the_cause_of_a_wait_in_any_collective(two_ranks, wait):
    statuses = two_ranks.run(status_beside, wait)
    assert [statuse.is_inside for statuse in statuses] == [True, False]
    assert diagnose("Rank 0 saw it", statuses).startswith(
        "comm: rank 1 does not join the collective in which others wait. State of rank 1: with no bucket in flight, in "
        "`user_code` (test_thread_place.py:"
    )


def test_an_error_of_a_collective_says_which_it_was_and_who_called_it(one_rank):
    assert (
        "in `broadcast`, called by `failed_call` (test_thread_place.py:"
        in one_rank.run(failed_call)[0]
    )


def failed_call():
    try:
        dist.broadcast("no tensor", src=0)
    except TypeError as error:
        return place_of_error(error)


@pytest.fixture
def cuda(monkeypatch):
    with Cuda().installed(monkeypatch) as cuda:
        yield cuda


def test_no_event_is_asked_for_while_a_graph_is_captured(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", cuda.stream(CUDA))
    # The query must run on the stream's own device. Otherwise every rank would create a context on the first GPU.
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: cuda.device == CUDA != cuda.current
    )
    waits = DeviceWaits(CUDA, also=lambda: pytest.fail("a look"))
    assert waits.stalled_s() == 0.0
    assert cuda.num_queries == cuda.number == 0


def stalled_pipeline():
    """Let rank 0's device wait for a message of rank 1, which is in user code."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = Cuda().installed(patch)
        aborted = threading.Event()
        errors = []
        patch.setattr(setup_watchdog, "abort_all", lambda limit_s: aborted.set())
        watchdog = PipelineWatchdog(timeout=timedelta(seconds=1), device=CUDA)
        watchdog.engine = SimpleNamespace(abort=errors.append)
        if dist.get_rank() == 0:
            watchdog.note("stage 0, backward of micro-batch 2", is_waiting=True)
            watchdog.wait_for(cuda.hang)  # as with NCCL: the host continues while the device hangs
        else:
            watchdog.note("stage 1, forward of micro-batch 2")
        is_aborted = aborted.wait(30)
        watchdog.leave()
        return is_aborted, errors[0]


def test_a_pipelines_stage_that_hangs_on_a_gpu_is_named_within_the_limit_and_all_are_freed(
    two_ranks,
):
    (first, error), (second, same) = two_ranks.run(stalled_pipeline)
    assert first
    assert second
    assert error == same
    assert (
        "rank 1 does not join the collective in which others wait. State of rank 1: stage 1, forward of micro-batch 2"
        in error
    )
    assert "rank 0 has waited 1 s (state: stage 0, backward of micro-batch 2)" in error
