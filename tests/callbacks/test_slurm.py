"""SLURM jobs near their time limit, which are saved between two steps and requeued once the file is on disk."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid import DurableCheckpointIO, HybridAllReduceStrategy
from lightning_hybrid.callbacks import StopOnSignal, stop_on_signal
from lightning_hybrid.checkpoint import io as checkpoint_io
from lightning_hybrid.checkpoint.file import check_whole
from tests import toy
from tests.callbacks.test_stop_on_signal import Signals
from tests.scenes import at

SCONTROL = """#!/bin/sh
echo "$@: $(cd {folder} && ls *.ckpt 2>/dev/null)" >> {folder}/requests
{then}
"""


@pytest.fixture
def folder(tmp_path):
    """Create a folder with a mock `scontrol` that records its requests and the checkpoints that exist by then."""
    return with_scontrol(tmp_path)


def with_scontrol(folder: Path, then: str = "") -> Path:
    (folder / "bin").mkdir()
    (folder / "bin" / "scontrol").write_text(SCONTROL.format(folder=folder, then=then))
    (folder / "bin" / "scontrol").chmod(0o755)
    return folder


def requests(folder: Path) -> list[str]:
    if (folder / "requests").exists():
        return (folder / "requests").read_text().splitlines()
    return []


def signals(trainer, module, batch, batch_idx, dataloader_idx=0):
    if batch_idx == 0:
        signal.raise_signal(signal.SIGUSR1)


def environment_of_a_job():
    """Return the variables that SLURM sets for this rank, and those that Lightning would leave behind."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    return {
        "SLURM_NTASKS": world_size,
        "SLURM_NTASKS_PER_NODE": world_size,
        "SLURM_NNODES": 1,
        "SLURM_NODEID": 0,
        "SLURM_JOB_ID": 17,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }


def in_a_job(folder, rank, number=signal.SIGUSR1, in_test=False):
    write = checkpoint_io.write_checkpoint

    def write_slowly(*args, **kwargs):
        time.sleep(0.5)
        write(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment_of_a_job().items():
            patch.setenv(name, str(value))
        patch.setenv("PATH", f"{folder}/bin", prepend=":")
        patch.setattr(checkpoint_io, "write_checkpoint", write_slowly)
        strategy = HybridAllReduceStrategy(checkpoint_io=DurableCheckpointIO(in_background=True))
        if in_test:
            signalling = at(on_test_batch_start=signals)
            max_epochs = 0
        else:
            signalling = Signals(rank, step=5, number=number)
            max_epochs = 3
        trainer = toy.trainer(
            callbacks=[StopOnSignal(folder), signalling],
            default_root_dir=folder,
            strategy=strategy,
            max_epochs=max_epochs,
        )
        assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
        try:
            if in_test:
                trainer.test(toy.Toy(), toy.loader(), verbose=False)
            else:
                trainer.fit(toy.Toy(), toy.loader(), toy.loader())
        except SIGTERMException as end:
            return end.code, trainer.global_step
        return "went on", trainer.global_step


def test_a_job_near_its_end_stops_between_two_steps_and_is_queued_again_once_the_disk_has_its_checkpoint(
    two_ranks, folder
):
    """After `scontrol requeue`, SLURM kills the job some seconds later, even during a write."""
    assert two_ranks.run(in_a_job, str(folder), 1) == [(143, 6), (143, 6)]
    # Lightning's own hpc_ckpt_1.ckpt does not exist.
    assert requests(folder) == ["requeue 17: stopped.ckpt"]
    assert check_whole(folder / "stopped.ckpt")


def test_a_job_that_is_told_to_end_is_not_queued_again(one_rank, folder):
    """`scancel` and preemption send SIGTERM, and SLURM itself decides what happens to the job."""
    assert one_rank.run(in_a_job, str(folder), 0, signal.SIGTERM) == [(143, 6)]
    assert check_whole(folder / "stopped.ckpt")
    assert requests(folder) == []


def test_in_testing_a_job_is_queued_again_with_nothing_saved(two_ranks, folder):
    assert two_ranks.run(in_a_job, str(folder), 0, signal.SIGUSR1, True) == [("went on", 0)] * 2
    assert requests(folder) == ["requeue 17: "]


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("echo Job is not requeueable >&2; exit 1", r"\(Job is not requeueable\)"),
        (None, r"No such file or directory: 'scontrol'"),
        ("sleep 9", r"timed out after 0\.2 seconds"),
    ],
)
def test_a_job_that_cannot_be_queued_again_says_why(tmp_path, monkeypatch, then, reason):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    limit_s = 0.2 if then == "sleep 9" else 30.0
    monkeypatch.setattr(stop_on_signal, "REQUEUE_LIMIT_S", limit_s)
    if then is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("PATH", f"{with_scontrol(tmp_path, then)}/bin", prepend=":")
    with pytest.raises(AssertionError, match=reason):
        assert stop_on_signal.queue_again() == "SLURM job 17 was requeued"
    assert "`scontrol requeue 17`" in stop_on_signal.queue_again()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURMEnvironment, signal.SIGUSR1),
        (lambda: SLURMEnvironment(requeue_signal=signal.SIGUSR2), signal.SIGUSR2),
        (lambda: SLURMEnvironment(auto_requeue=False), None),
        (lambda: None, None),
    ],
)
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_the_requeue_signal_is_the_one_of_lightnings_environment(environment, expected):
    trainer = SimpleNamespace(strategy=SimpleNamespace(cluster_environment=environment()))
    assert stop_on_signal.requeue_signal_of(trainer) is expected


def test_a_signal_while_all_ranks_are_asked_is_for_the_next_question(monkeypatch):
    """The other ranks continue with the next step, so this rank may neither stop alone nor forget the signal."""
    callback = StopOnSignal()
    trainer = SimpleNamespace(
        world_size=2,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        precision_plugin=None,
    )

    def interrupted(asked, op):
        callback._on_signal(trainer, stop_on_signal.REQUEUE, signal.SIGUSR1, None)

    monkeypatch.setattr(stop_on_signal.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(stop_on_signal.dist, "all_reduce", interrupted)
    callback._stop_if_asked(trainer)
    with pytest.raises(SIGTERMException):
        callback._stop_if_asked(trainer)
