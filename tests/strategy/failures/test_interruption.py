"""Interrupted runs: every rank ends soon, and a message says where the run stopped and how to resume it."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_hybrid.callbacks import StopOnSignal, stop_on_signal
from tests import toy
from tests.scenes import at


class Module(toy.Toy):
    """Module without BatchNorm, because DDP's wait for its buffers would only end with the missing process."""

    def __init__(self):
        super().__init__()
        self.net[2] = nn.Identity()


def signal_itself(rank, number, trainer, module):
    if trainer.global_step == 9 and dist.get_rank() == rank:
        os.kill(os.getpid(), number)


def signalled(rank, number, folder, stops=False):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    callbacks = [at(on_after_backward=partial(signal_itself, rank, number))]
    callbacks.append(ModelCheckpoint(folder))
    if stops:
        callbacks.append(StopOnSignal(folder))
    trainer = toy.trainer(max_epochs=5, callbacks=callbacks, enable_checkpointing=True)
    handlers = {
        signal_number: signal.getsignal(signal_number)
        for signal_number in (signal.SIGINT, signal.SIGTERM)
    }
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        trainer.fit(Module(), toy.loader())
        end = "went on"
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        end = f"{type(error).__name__}: {error} {' '.join(notes)} {getattr(error, 'code', '')}"
    finally:
        logger.removeHandler(handler)
        for signal_number, signal_handler in handlers.items():
            signal.signal(signal_number, signal_handler)
    return end, messages


def test_ctrl_c_without_a_callback_logs_where_the_run_stopped_and_the_checkpoint_to_resume_from(
    one_rank, tmp_path
):
    ((end, messages),) = one_rank.run(signalled, 0, signal.SIGINT, str(tmp_path))
    assert end.startswith("SystemExit: 1")
    (message,) = [message for message in messages if message.startswith("The run stopped")]
    assert (
        f"in epoch 1 after step 9; `fit(..., ckpt_path='{tmp_path}/epoch=0-step=8.ckpt')` resumes"
        in message
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_with_the_callback_a_checkpoint_of_that_step_is_written_and_named(
    two_ranks, tmp_path, number
):
    rank_0, rank_1 = two_ranks.run(signalled, 1, number, str(tmp_path), True)
    end_0, messages = rank_0
    end_1, _ = rank_1
    assert end_0.split()[-1] == str(128 + number), end_0
    assert end_1.split()[-1] == "0", f"as a rank that Lightning started: {end_1}"
    (message,) = [message for message in messages if message.startswith("stopped by ")]
    assert f"To resume, call `fit(..., ckpt_path='{tmp_path}/stopped.ckpt')`" in message
    assert (tmp_path / "stopped.ckpt").exists()


def test_a_second_ctrl_c_ends_at_once_unless_it_is_torchruns_copy_of_the_first(monkeypatch):
    stop = StopOnSignal()
    now_s = [0.0]
    monkeypatch.setattr(stop_on_signal, "monotonic", lambda: now_s[0])
    trainer = toy.trainer(callbacks=[stop])
    for now_s[0] in (0.0, 0.5):
        stop._on_signal(trainer, 0, signal.SIGINT, None)
    now_s[0] = 3.0
    with pytest.raises(KeyboardInterrupt):
        stop._on_signal(trainer, 0, signal.SIGINT, None)


PROGRAM = """
import os, sys, time
from lightning_hybrid.callbacks import StopOnSignal
from tests import toy

class Slow(toy.Toy):
    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        if self.global_step == 2:
            open(f"{sys.argv[1]}/{self.global_rank}.tmp", "w").write(str(os.getpid()))
            os.rename(f"{sys.argv[1]}/{self.global_rank}.tmp", f"{sys.argv[1]}/{self.global_rank}.pid")
        return super().training_step(batch, batch_idx)

callbacks = [StopOnSignal(sys.argv[1])] if sys.argv[2] == "stops" else []
toy.trainer(devices=2, max_epochs=1000, callbacks=callbacks).fit(Slow(), toy.loader())
"""


def is_alive(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads the states of processes in /proc"
)
@pytest.mark.parametrize(
    ("launcher", "callback", "number", "target", "words"),
    [
        ("lightning", "none", signal.SIGINT, "all", "no checkpoint was written to resume from"),
        (
            "lightning",
            "none",
            signal.SIGINT,
            "rank 1",
            "rank 1 gave up: it was interrupted by Ctrl-C",
        ),
        ("lightning", "stops", signal.SIGINT, "all", "stopped.ckpt"),
        ("torchrun", "stops", signal.SIGINT, "launcher", "stopped.ckpt"),
        ("torchrun", "none", signal.SIGTERM, "rank 1", "rank 1 gave up: it received SIGTERM"),
    ],
)
def test_every_process_ends_within_seconds(tmp_path, launcher, callback, number, target, words):
    program = tmp_path / "program.py"
    log = tmp_path / "log"
    program.write_text(PROGRAM)
    command = [sys.executable]
    if launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(program), str(tmp_path), callback]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    with log.open("w") as out:
        # A background job of a shell ignores SIGINT, and the programs that it starts would inherit this.
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    try:
        files = [tmp_path / "0.pid", tmp_path / "1.pid"]
        deadline = time.monotonic() + 120
        while (
            not all(file.exists() for file in files)
            and process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        ranks = [int(file.read_text()) for file in files]
        for pid in {"all": ranks, "rank 1": ranks[1:], "launcher": [process.pid]}[target]:
            os.kill(pid, number)
        deadline = time.monotonic() + 45
        while (process.poll() is None or any(map(is_alive, ranks))) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert process.poll() is not None, log.read_text()[-3000:]
        assert not any(map(is_alive, ranks)), log.read_text()[-3000:]
        assert words in log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
