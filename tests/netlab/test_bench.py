"""The recipe runs on the emulated cluster as it does on a real one, and knows its links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netlab.phases import Marks

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["allreduce.max_bytes=1024", "allreduce.num_rounds=2", "allreduce.dtypes=[float32]", "steps=null"]


@pytest.mark.long
def test_one_command_benches_an_emulated_cluster(cluster_or_skip, tmp_path):
    options = ["--hosts", "2", "--ranks", "1", "--mbit", "800", "--delay-us", "5000", "--limit-s", "100"]
    command = [sys.executable, "-m", "tests.netlab.bench", *options, f"hydra.run.dir={tmp_path}", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert head["config"]["link_bytes_per_s"] == 1e8
    assert "2 ranks = 2 nodes x 1" in head["title"]
    assert "emulated: 2 hosts x 1 ranks host by host, 800 Mbit/s, 5000 us" in head["title"]
    assert min(min(row["times_s"]) for row in rows) > 0.010  # there and back is 10 ms
    assert "sent by each host: " in done.stdout


@pytest.mark.long
def test_a_mistake_ends_it_with_the_recipes_own_words(cluster_or_skip):
    command = [sys.executable, "-m", "tests.netlab.bench", "--ranks", "1", "allreduce.dtypes=[int8]"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "`dtypes` (=int8) must be some of" in done.stderr


@pytest.mark.long
def test_tune_finds_the_links_that_were_built(cluster_or_skip, tmp_path):
    """800 Mbit/s and 5 ms one way. Half a round trip is above what was built, by what hosts and emulator take, and far
    below a whole one, or one with consent: 10 ms."""
    options = ["--recipe", "tune", "--hosts", "2", "--ranks", "1", "--mbit", "800", "--delay-us", "5000"]
    small = ["measure.limit_s=20", "measure.max_bytes=4194304", "model=alexnet_bn", "image_shape=[1,16,16]"]
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


def event(row, begin_s, end_s):
    return {"row": row, "ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}


def test_phases_follow_each_other_and_add_up_to_the_step(tmp_path):
    marks, before = Marks(tmp_path), {"end": 10.0, "processor": 1.0, "main": 1.0}
    step = {"batch": 11.0, "forward": 13.0, "averaged": 30.0, "end": 32.0, "processor": 9.0, "main": 5.0}
    marks.events = [event("two_level.0 shard_all_reduce", 4.0, 9.0)]  # of the step before
    *parts, processor, main = marks._phases_of(before, step).items()
    assert parts == [("step", 22.0), ("batch", 1.0), ("forward", 2.0), ("backward", 17.0), ("update", 2.0)]
    assert (processor, main) == (("processor", 8.0), ("main", 4.0))
    marks.events += [event("buckets", 14.0, 29.0), event("two_level.0 scatter_reduce", 14.0, 16.0)]
    marks.events += [event("two_level.0 shard_all_reduce", 16.0, 20.0), event("hierarchical.1 ring", 17.0, 27.0)]
    marks.events += [event("two_level.0 gather", 20.0, 29.0)]
    parts = dict(list(marks._phases_of(before, step).items())[1:-2])
    names = ("batch", "forward", "backward", "in node", "between", "last", "update")
    assert parts == dict(zip(names, (1.0, 2.0, 1.0, 2.0, 11.0, 3.0, 2.0), strict=True))
