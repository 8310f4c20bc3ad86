"""A device that waits outside of a bucket is seen as well, and so a pipeline's stage that never comes is named."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm.health.device_waits import DeviceWaits
from lightning_hybrid.pipeline.pipeline_watchdog import PipelineWatchdog
from lightning_hybrid.strategy import setup_watchdog
from tests.stand_in.recording_cuda import CUDA, Cuda


@pytest.fixture
def cuda(monkeypatch):
    with Cuda().installed(monkeypatch) as cuda:
        yield cuda


def test_no_event_is_asked_for_while_a_graph_is_captured(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", cuda.stream(CUDA))
    # A stream is entered on its own device: to leave it would else make a context on the first GPU, in every rank.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.device == CUDA != cuda.current)
    waits = DeviceWaits(CUDA, also=lambda: pytest.fail("a look"))
    assert waits.stalled_s() == 0.0
    assert cuda.num_queries == cuda.number == 0


def stalled_pipeline():
    """Rank 0's device waits for a message of rank 1, which is in user code."""
    with pytest.MonkeyPatch.context() as patch:
        cuda, aborted, errors = Cuda().installed(patch), threading.Event(), []
        patch.setattr(setup_watchdog, "abort_all", lambda limit_s: aborted.set())
        watchdog = PipelineWatchdog(timeout=timedelta(seconds=1), device=CUDA)
        watchdog.engine = SimpleNamespace(abort=errors.append)
        if dist.get_rank() == 0:
            watchdog.note("stage 0, backward of micro-batch 2", is_waiting=True)
            watchdog.wait_for(cuda.hang)  # as NCCL's: the host goes on, and the device does not
        else:
            watchdog.note("stage 1, forward of micro-batch 2")
        is_aborted = aborted.wait(30)
        watchdog.leave()
        return is_aborted, errors[0]


def test_a_pipelines_stage_that_hangs_on_a_gpu_is_named_within_the_limit_and_all_are_freed(two_ranks):
    (first, error), (second, same) = two_ranks.run(stalled_pipeline)
    assert first
    assert second
    assert error == same
    assert "rank 1 does not come to the collective in which others wait; now stage 1, forward of micro-batch 2" in error
    assert "rank 0 has waited 1 s, now stage 0, backward of micro-batch 2" in error
