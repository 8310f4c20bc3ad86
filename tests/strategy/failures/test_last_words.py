"""Last lines of output after an error, a killed rank or full shared memory, and errors at launch."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator as FabricAccelerator
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator as PytorchAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.data.order import batch_size_per_rank
from lightning_hybrid.strategy import rendezvous
from lightning_hybrid.strategy.failures.error_summary import RULE, shared_memory_cure, summary_of
from tests import toy
from tests.scenes import fit

FULL = "unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)"


class Breaks(toy.Toy):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise RuntimeError(FULL)
        return super().training_step(batch, batch_idx)


def test_an_error_ends_in_the_users_line_and_the_cure(one_rank):
    (seen,) = fit(one_rank, Breaks, max_epochs=1, raises=True)
    box, _, cure = seen.error.removeprefix(f"RuntimeError: {FULL}\n").partition(
        "in training_step\n"
    )
    assert box.startswith(f"{RULE}\nOn rank 0 (host ")
    assert box.endswith(f", line {Breaks.training_step.__code__.co_firstlineno + 2}, ")
    assert cure.startswith("`/dev/shm` (=")
    assert "--shm-size" in cure


def box_of_torchrun(path):
    """Return the box that torchrun prints if a rank fails, without its last two lines."""
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=1, error_file=str(path))
    return str(ChildFailedError("train.py", {1: failure}))


def fit_under_torchrun(path):
    """Run a fit that fails, and then another fit."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = path
    try:
        with contextlib.suppress(RuntimeError):
            toy.trainer(max_epochs=1).fit(Breaks(), toy.loader())
        box = box_of_torchrun(path)
        toy.trainer(max_epochs=1).fit(toy.Toy(), toy.loader())
    finally:
        os.environ.pop("TORCHELASTIC_ERROR_FILE")
    return box, os.path.exists(path)


def test_the_box_of_torchrun_names_rank_and_cause(one_rank, tmp_path):
    ((box, exists),) = one_rank.run(fit_under_torchrun, str(tmp_path / "error.json"))
    root_cause = box.partition("Root Cause")[2]
    assert "On rank 0 (host " in root_cause
    assert f"RuntimeError: {FULL}" in root_cause
    assert (
        f"line {Breaks.training_step.__code__.co_firstlineno + 2}, in training_step" in root_cause
    )
    assert "To enable traceback" not in box
    assert not exists, "an error that was caught is not that of the rank"


@pytest.mark.parametrize(
    ("words", "is_full"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", True),
        (
            "unable to open shared memory object </torch_7_1_0> in read-write mode: Too many open files (24)",
            False,
        ),
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
    result = summary_of(ProcessRaisedException(CHILD, 1, 7))
    assert (
        result
        == 'ValueError: label 7 is out of range\n  File "/home/me/train.py", line 8, in training_step'
    )


def test_a_line_of_this_package_is_not_that_of_the_user():
    """With `pip install -e`, the package does not lie in `site-packages`."""
    with pytest.raises(ValueError, match="global_batch_size") as caught:
        batch_size_per_rank(global_batch_size=3, world_size=2)
    result = summary_of(caught.value)
    assert result.endswith(", in test_a_line_of_this_package_is_not_that_of_the_user")


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


EACH = pytest.mark.parametrize(
    ("kind", "name"),
    [(Trainer, "hybrid_allreduce"), (Trainer, "hybrid_pipeline"), (Fabric, "hybrid_allreduce")],
)


@EACH
@pytest.mark.parametrize("device", ["mps", "xla", "hpu", "xpu"])
def test_devices_that_are_neither_cpus_nor_of_cuda_are_refused_before_any_work(
    monkeypatch, kind, name, device
):
    """Devices other than CPUs and CUDA raise an error early. A patched accelerator reports two such devices."""
    devices = [torch.device(device, index) for index in (0, 1)]
    for accelerator in (PytorchAccelerator, FabricAccelerator):
        monkeypatch.setattr(accelerator, "get_parallel_devices", lambda _: devices)
    with pytest.raises(
        MisconfigurationException, match=f"'{device}' devices. must be 'cpu' or 'cuda'"
    ):
        kind(strategy=name, devices=2, accelerator="cpu")


@EACH
def test_a_notebook_is_told_our_name_for_notebooks_and_a_fork_is_not_refused(
    monkeypatch, kind, name
):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(MisconfigurationException, match=f"Set strategy='{name}_notebook'"):
        kind(strategy=name, devices=2, accelerator="cpu")
    assert (
        kind(strategy=f"{name}_notebook", devices=2, accelerator="cpu").strategy._start_method
        == "fork"
    )
    strategy = HybridAllReduceStrategy(start_method="fork")
    assert (
        Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False).strategy is strategy
    )


class Lacks(toy.Blobs):
    def __getitem__(self, index):
        raise KeyError("no\nsuch sample")


def test_the_key_error_of_a_worker_keeps_its_lines():
    train = DataLoader(Lacks(), num_workers=1)
    error = fit(train=train, max_epochs=1, raises=True, warns=True).error
    assert "KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal Traceback" in error
    box = error.partition(RULE)[2]
    assert box.startswith("\nOn rank 0 (host ")
    assert ", in __getitem__" in box
