"""Recipes on the emulated cluster, which run as on a real one and know its links."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "allreduce.max_bytes=1024",
    "allreduce.num_rounds=2",
    "allreduce.dtypes=[float32]",
    "steps=null",
]


@pytest.mark.long
def test_one_command_benches_an_emulated_cluster(cluster_or_skip, tmp_path):
    options = [
        "--hosts",
        "2",
        "--ranks",
        "1",
        "--mbit",
        "800",
        "--delay-us",
        "5000",
        "--limit-s",
        "100",
    ]
    command = [
        sys.executable,
        "-m",
        "tests.netlab.bench",
        *options,
        f"hydra.run.dir={tmp_path}",
        *SMALL,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert head["config"]["link_bytes_per_s"] == 1e8
    assert "2 ranks = 2 nodes x 1" in head["title"]
    assert "emulated: 2 hosts x 1 ranks host by host, 800 Mbit/s, 5000 us" in head["title"]
    assert min(min(row["times_s"]) for row in rows) > 0.010  # the round trip takes 10 ms
    assert "sent by each host: " in done.stdout


@pytest.mark.long
def test_tune_finds_the_links_that_were_built(cluster_or_skip, tmp_path):
    """The links have 800 Mbit/s and a one-way delay of 5 ms.

    The measured half round trip exceeds the delay by the overhead of hosts and emulator. It is far below 10 ms, the
    time of a whole round trip.
    """
    options = [
        "--recipe",
        "tune",
        "--hosts",
        "2",
        "--ranks",
        "1",
        "--mbit",
        "800",
        "--delay-us",
        "5000",
    ]
    small = [
        "measure.limit_s=20",
        "measure.max_bytes=4194304",
        "model=alexnet_bn",
        "image_shape=[1,16,16]",
    ]
    command = [sys.executable, "-m", "tests.netlab.bench", *options, "--limit-s", "150"]
    command += [f"hydra.run.dir={tmp_path}", "measure.algorithms=[parallel_flat]", *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "summary.json").read_text())
    across = told["calibration"]["links"]["across"]
    assert 0.005 <= across["latency_s"] < 0.0075
    assert 0.7e8 < across["bytes_per_s"] < 1.1e8
    assert told["calibration"]["consent_s"]["across"] == pytest.approx(0.005, rel=0.5)
    assert told["world"]["num_shared_cores"] >= 1
