"""A machine with a GPU need not have what only the recipes' command line needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.without import ROOT, environment_without


@pytest.mark.long
def test_the_gpu_tests_can_be_collected_without_hydra_wandb_and_simplejpeg(tmp_path):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    there = environment_without(tmp_path)
    assert subprocess.run([sys.executable, "-c", "import hydra"], capture_output=True, env=there).returncode == 1
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=there)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(found) >= 40
    assert {"tests/precision/test_optimizer_protocol.py", "tests/checkpoint/test_host_copy.py"} <= {
        line.partition("::")[0] for line in found
    }
