"""What a user reads last: after an error, a rank that was killed, no shared memory; and what a notebook is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.strategy import rendezvous
from lightning_hybrid.strategy.error_summary import RULE, shared_memory_cure, summary_of
from tests import toy
from tests.programs import run_program

FULL = "unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)"


class Breaks(toy.Toy):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise RuntimeError(FULL)
        return super().training_step(batch, batch_idx)


def notes_of_a_fit_without_shared_memory():
    with pytest.raises(RuntimeError) as caught:
        toy.trainer(max_epochs=1).fit(Breaks(), toy.loader())
    return caught.value.__notes__


def test_an_error_ends_in_the_users_line_and_the_cure(one_rank):
    (box, cure, *_) = one_rank.run(notes_of_a_fit_without_shared_memory)[0]
    assert box.startswith(f"{RULE}\nOn rank 0 (host ")
    assert box.endswith(f", line {Breaks.training_step.__code__.co_firstlineno + 2}, in training_step")
    assert cure.startswith("`/dev/shm` (=")
    assert "--shm-size" in cure


@pytest.mark.parametrize(
    ("words", "is_full"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", True),
        ("Error while creating shared memory segment /dev/shm/nccl-a (size 9), error: No space left on device", True),
        ("process 1 terminated with signal SIGBUS", True),
        ("unable to open shared memory object </torch_7_1_0> in read-write mode: Too many open files (24)", False),
        ("[Errno 28] No space left on device: 'last.ckpt'", False),
    ],
)
def test_only_what_shared_memory_causes_has_its_cure(words, is_full):
    assert bool(shared_memory_cure(RuntimeError(words))) == is_full


CHILD = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
  File "/home/me/train.py", line 8, in training_step
    raise ValueError("label 7 is out of range")
  File "/env/lib/python3.11/site-packages/lightning/pytorch/core/module.py", line 9, in log
    raise ValueError
ValueError: label 7 is out of range
"""


def test_the_error_of_a_forked_rank_is_its_own_and_not_the_parents():
    found = summary_of(ProcessRaisedException(CHILD, 1, 7))
    assert found == 'ValueError: label 7 is out of range\n  File "/home/me/train.py", line 8, in training_step'


# ---- a rank that was killed ------------------------------------------------------------------------------------------


def test_lightning_kills_the_other_ranks_only_after_they_had_time_to_report(monkeypatch):
    seen = []
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(sleep=seen.append))
    monkeypatch.setattr(_ChildProcessObserver, "_terminate_all", lambda self: seen.append("killed"))
    ended = subprocess.Popen(["false"])
    ended.wait()
    observer = _ChildProcessObserver(main_pid=0, child_processes=[ended], sleep_period=0)
    monkeypatch.setattr(rendezvous.threading, "enumerate", lambda: [observer])
    for _ in range(2):  # a second fit of the same ranks waits no longer
        rendezvous.let_ranks_report()
    observer.run()
    assert seen == [rendezvous.REPORT_S, "killed"]


SCRIPT = """
import os, signal, sys, torch
import lightning.pytorch as pl
import lightning_hybrid
from torch import nn

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and self.global_rank == 1:
            if sys.argv[2] == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("label 7 is out of range")
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=1, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
"""


def last_words(folder, *arguments):
    (folder / "train.py").write_text(SCRIPT)
    done = run_program("train.py", *arguments, cwd=folder)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.long
def test_a_killed_rank_is_named_by_our_error_and_not_by_lightnings_launcher(tmp_path):
    said = last_words(tmp_path, "hybrid_allreduce", signal.SIGKILL.name)
    *_, error, where, end = said.strip().splitlines()
    assert "comm: rank 1 does not answer: its process is dead" in error + where
    assert "zombies" not in said
    assert "The run stopped in epoch 0 after step 2" in end


@pytest.mark.long
def test_an_error_of_a_forked_rank_ends_in_a_box(tmp_path):
    *_, line, error, place = last_words(tmp_path, "hybrid_allreduce_fork", "raise").strip().splitlines()
    assert line == RULE
    assert error.startswith("On rank 1 (host ")
    assert error.endswith("): ValueError: label 7 is out of range")
    assert place.startswith(f'  File "{Path(tmp_path, "train.py")}", line ')


# ---- a notebook ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hybrid_allreduce", "hybrid_pipeline"])
def test_a_notebook_is_told_our_name_for_notebooks(monkeypatch, name):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(MisconfigurationException, match=f"Write strategy='{name}_notebook'"):
        Trainer(strategy=name, devices=2, accelerator="cpu")
    trainer = Trainer(strategy=f"{name}_notebook", devices=2, accelerator="cpu", logger=False)
    assert trainer.strategy._start_method == "fork"


def test_fabric_in_a_notebook_is_told_so_too_and_a_fork_is_not_refused(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(MisconfigurationException, match="Write strategy='hybrid_allreduce_notebook'"):
        Fabric(strategy="hybrid_allreduce", devices=2, accelerator="cpu")
    strategy = HybridAllReduceStrategy(start_method="fork")
    assert Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False).strategy is strategy
    assert torch.device("cpu") in strategy.parallel_devices
