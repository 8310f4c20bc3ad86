"""The strategy under every launcher: a real script, real processes, the same weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.programs import run_program

SCRIPT = Path(__file__).with_name("launch_me.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
LAUNCHES = {
    "popen": ([], "hybrid_allreduce"),
    "spawn": ([], "hybrid_allreduce_spawn"),
    "fork": ([], "hybrid_allreduce_fork"),
    "torchrun": (TORCHRUN, "hybrid_allreduce"),
}


def launch(name, folder):
    command, strategy = LAUNCHES[name]
    arguments = [*command, str(SCRIPT), strategy, str(folder)]
    where = {"cwd": folder, "env": {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}}
    if name == "spawn":  # its ranks import the main module again, and a fork has none
        done = subprocess.run([sys.executable, *arguments], **where, capture_output=True, text=True, timeout=180)
    else:
        done = run_program(*arguments, **where)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def by_popen(tmp_path_factory):
    return launch("popen", tmp_path_factory.mktemp("popen"))


NAMES = [pytest.param(name, marks=[pytest.mark.long] * (name in ("spawn", "torchrun"))) for name in LAUNCHES]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_launcher_trains_the_same_model(name, tmp_path, by_popen):
    ranks = by_popen if name == "popen" else launch(name, tmp_path)
    for rank, result in enumerate(ranks):
        assert result["strategy"] == "HybridAllReduceStrategy"
        assert result["precision"] == "MasterWeightPrecision"
        assert result["world_size"] == 2
        assert result["half"] is torch.float16
        assert result["losses"] == by_popen[rank]["losses"]
    assert ranks[0]["losses"] != ranks[1]["losses"], "ranks must see different data"
    parameters = [key for key in ranks[0]["weights"] if "running" not in key]
    assert all(torch.equal(ranks[0]["weights"][key], ranks[1]["weights"][key]) for key in parameters)
    assert all(torch.equal(ranks[0]["weights"][key], by_popen[0]["weights"][key]) for key in parameters)
    if name != "popen":
        after_fit = torch.load(tmp_path / "after_fit_0.pt", weights_only=True)
        assert {value.dtype for value in after_fit.values()} == {torch.float32, torch.int64}
