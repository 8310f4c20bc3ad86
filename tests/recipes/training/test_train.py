"""Main training job as a user starts it, with real processes and real files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkout import ROOT
from tests.programs import run_program
from tests.scenes import same

TRAIN = ["recipes/train.py"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
QUIET = ["logger=none", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]
# 2 epochs of 9 steps.
SHORT = [
    *QUIET,
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "warmup_epochs=0.5",
]
PROBE = "+callbacks.probe={_target_: tests.recipes.probe.Probe, directory: ${run_dir}}"


def run(*overrides: str, command: list[str] = TRAIN) -> subprocess.CompletedProcess[str]:
    """Run the command in a clean shell environment and in its own session."""
    left = (
        "LOCAL_RANK",
        "NODE_RANK",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PL_GLOBAL_SEED",
    )
    env = {name: value for name, value in os.environ.items() if name not in left}
    return run_program(
        *command, *overrides, cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT)}, timeout_s=240
    )


def succeed(*overrides: str, command: list[str] = TRAIN) -> str:
    done = run(*overrides, command=command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last_checkpoint(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)


def assert_one_rank_warns_of_few_steps(log: Path) -> None:
    (line,) = log.read_text().splitlines()
    assert "which is too few for most networks" in line


@pytest.mark.long
def test_a_sweep_gives_each_job_one_directory_for_all_its_ranks(tmp_path):
    note = "callbacks.probe.note='two words, a \"comma\" = trouble'"
    probe = PROBE.replace("}}", "}, note: null}")
    succeed(
        "-m",
        "optim.lr=1.0,2.0",
        probe,
        note,
        *SHORT,
        "trainer.fast_dev_run=true",
        f"hydra.sweep.dir={tmp_path}",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "multirun.yaml"]
    for job, lr in (("0", 1.0), ("1", 2.0)):
        written = sorted(path.name for path in (tmp_path / job).iterdir())
        assert written == [".hydra", "rank0.json", "rank1.json", "train.log"]
        assert_one_rank_warns_of_few_steps(tmp_path / job / "train.log")
        probes = [json.loads((tmp_path / job / f"rank{rank}.json").read_text()) for rank in (0, 1)]
        assert probes[0] == probes[1]
        assert probes[0]["directory"] == str(tmp_path / job)
        assert probes[0]["lr"] == lr
        assert probes[0]["note"] == 'two words, a "comma" = trouble'
        assert probes[0]["num_threads"] == "1"


@pytest.mark.long
def test_ranks_started_by_torchrun_share_one_directory(tmp_path):
    out = succeed(PROBE, *SHORT, "trainer.max_epochs=1", command=[*TORCHRUN, "recipes/train.py"])
    (where,) = set(re.findall(r"^run directory +(\S+)$", out, flags=re.MULTILINE))
    run_dir = Path(where)
    try:
        probes = [json.loads((run_dir / f"rank{rank}.json").read_text()) for rank in (0, 1)]
        assert probes[0] == probes[1]
        assert run_dir.name.startswith("torchrun-")
        written = sorted(path.name for path in run_dir.iterdir() if path.suffix != ".json")
        assert written == [".hydra", "checkpoints", "run.html", "run.png", "train.log"]
        assert_one_rank_warns_of_few_steps(run_dir / "train.log")
    finally:
        for path in sorted(run_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run_dir.rmdir()


@pytest.mark.long
def test_a_run_goes_on_where_there_is_no_home_no_compiler_no_utf8_and_nobody_who_reads(tmp_path):
    """The run is a separate process, because some variables are read when torch is imported."""
    places = dict.fromkeys(
        ("XDG_CACHE_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "TMPDIR"), "/proc/none"
    )
    environment = places | {"PATH": "/none", "CXX": "none", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    run_dir = tmp_path / "ä ☃ b"
    few = [
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=3",
        "trainer.devices=1",
        f"hydra.run.dir='{run_dir}'",
    ]
    with open("/dev/full", "w") as full:
        command = [sys.executable, "recipes/train.py", *SHORT, *few]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, timeout=240
        )
    assert done.returncode == 0, done.stderr.decode()
    assert b"Standard output cannot be written (No space left on device)" in done.stderr
    assert (run_dir / "summary.json").exists()


@pytest.mark.long
def test_fsdp2_trains_as_ddp_and_goes_on_where_it_was(tmp_path):
    """Two processes train two epochs, and repeat the second from the first's file. BatchNorm validates as in DDP.

    Results are bit-identical. On two ranks, both strategies add two gradients. No weight is large enough (32,768
    elements) for its norm to be added in fp32, where training would turn another order into differences of 1e-5 in 18
    steps.
    """
    common = [*SHORT, "precision=32-true", "model.width=0.04"]
    for name in ("fsdp2", "ddp"):
        succeed(*common, f"strategy={name}", f"hydra.run.dir={tmp_path / name}")
    fsdp2 = last_checkpoint(tmp_path / "fsdp2")
    ddp = last_checkpoint(tmp_path / "ddp")
    assert same(fsdp2["state_dict"], ddp["state_dict"])
    for key in ("val/acc", "val/loss"):
        curve = fsdp2["callbacks"]["RunReport"]["curves"][key]
        expected = ddp["callbacks"]["RunReport"]["curves"][key]
        for point, expected_point in zip(curve, expected, strict=True):
            assert point == pytest.approx(expected_point, rel=1e-5), key
    kill = [
        "+callbacks.kill={_target_: tests.recipes.probe.Kill, after_step: 12}",
        "strategy.checkpoint_io.in_background=false",
    ]
    killed = run(*common, *kill, "strategy=fsdp2", f"hydra.run.dir={tmp_path / 'killed'}")
    assert killed.returncode == -9
    assert last_checkpoint(tmp_path / "killed")["global_step"] == 9
    resumed = tmp_path / "resumed"
    succeed(
        *common,
        "strategy=fsdp2",
        f"resume={tmp_path}/killed/checkpoints/last.ckpt",
        f"hydra.run.dir={resumed}",
    )
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert same(fsdp2[part], last_checkpoint(resumed)[part]), part
