"""The recipe runs on the emulated cluster as it does on a real one, and knows its links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["allreduce.max_bytes=1024", "allreduce.num_rounds=2", "allreduce.dtypes=[float32]", "steps=null"]


@pytest.mark.long
def test_one_command_benches_an_emulated_cluster(cluster_or_skip, tmp_path):
    options = ["--hosts", "2", "--ranks", "1", "--mbit", "800", "--delay-us", "5000", "--limit-s", "100"]
    command = [sys.executable, "-m", "tests.netlab.bench", *options, f"hydra.run.dir={tmp_path}", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "bench.json").read_text())
    assert told["config"]["link_bytes_per_s"] == 1e8
    assert "2 ranks = 2 nodes x 1" in told["title"]
    assert "emulated: 2 hosts x 1 ranks host by host, 800 Mbit/s, 5000 us" in told["title"]
    assert min(min(row["times_s"]) for row in told["rows"]) > 0.010  # there and back is 10 ms
    assert "sent by each host: " in done.stdout


@pytest.mark.long
def test_a_mistake_ends_it_with_the_recipes_own_words(cluster_or_skip):
    command = [sys.executable, "-m", "tests.netlab.bench", "--ranks", "1", "allreduce.dtypes=[int8]"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "`dtypes` (=int8) must be some of" in done.stderr
