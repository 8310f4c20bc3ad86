"""Whole steps of a small ResNet are timed on one device, arm by arm in rounds."""

from pathlib import Path

import pytest
import torch

from recipes.benchmarks import training as bench_training
from recipes.benchmarks import updates
from recipes.benchmarks.training import TrainingBench

ROOT = Path(__file__).resolve().parents[3]


def rows_of(**settings):
    quick = {"batch_sizes": [2], "image_size": 16, "depth": 18, "num_steps": 2, "num_warmup_steps": 1, "num_rounds": 2}
    bench = TrainingBench(arms=["mixed_sgd", "ours_lars"], **{**quick, **settings})
    return list(bench.run(torch.device("cpu")))


@pytest.mark.long
@pytest.mark.slow
def test_every_arm_is_timed_in_every_round(one_rank):
    (rows,) = one_rank.run(rows_of)
    assert [(row.batch_size, row.arm, len(row.images_per_s)) for row in rows] == [
        (2, "mixed_sgd", 2),
        (2, "ours_lars", 2),
    ]
    assert all(rate > 0 for row in rows for rate in row.images_per_s)
    assert bench_training.markdown(rows).splitlines()[2].endswith("| 1.00 |")


def test_an_arm_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"`training.arms` \(=theirs\) must be one of mixed_sgd, ours_sgd, ours_lars"):
        TrainingBench(arms=["theirs"])


def test_a_copy_has_a_rate():
    """Of a mebibyte: more than a disk, less than any memory there is."""
    assert 1e8 < updates.copy_rate(torch.device("cpu"), num_bytes=2**20) < 1e13


class FakeCuda:
    """Writes down what is queued, and counts a millisecond of the device for each step between two events."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append(name)

    def Event(self, enable_timing):
        fake = self

        class Event:
            def record(self):
                fake.calls.append("record")
                self.num_steps = fake.calls.count("step")

            def elapsed_time(self, end):
                assert fake.calls[-1] == "synchronize"
                return float(end.num_steps - self.num_steps)

        return Event()


def test_updates_on_cuda_are_queued_behind_a_sleep_and_timed_between_two_events(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    seconds, host_s = updates.time_one(lambda: fake.calls.append("step"), torch.device("cuda"), num_in_a_row=3)
    timed = ["_sleep", "record", *["step"] * 3, "record", "synchronize"]
    assert fake.calls == ["synchronize", "step", "synchronize", *timed]
    assert seconds == pytest.approx(1e-3)
    assert 0 < host_s < 1
    row = {"case": "x", "arm": "lars_fused", "num_params": 1, "num_tensors": 1, "times_s": (seconds, seconds)}
    table = updates.markdown([updates.UpdateRow(**row, host_times_s=(0.005, 0.005))])
    assert [cell.strip() for cell in table.splitlines()[-1].split("|")][3:-1:5] == ["1.00", "5.00"]
