"""What grows is distinguished from what does not, and a short run holds what it held."""

from __future__ import annotations

import itertools
import json
import mmap
import random
from collections import Counter

import pytest

from lightning_hybrid.callbacks.run_report.curve import MAX_POINTS, Curve
from tests.evidence.endurance import growth_report, process_watch
from tests.evidence.endurance.process_watch import ProcessWatch, process_state
from tests.evidence.outcomes import ran


def sampled(slope_per_step, *, noise=0.0, begin=1e8, num_steps=5000):
    draw = random.Random(0)
    return [
        {"step": step, "private_bytes": begin + slope_per_step * step + draw.gauss(0, noise)}
        for step in range(25, num_steps + 1, 25)
    ]


@pytest.mark.parametrize(
    ("slope", "verdict"), [(0.0, "steady"), (100.0, "steady"), (600.0, "grows"), (-600.0, "steady")]
)
def test_growth_is_distinguished_from_noise(slope, verdict):
    """100 bytes a step are allowed, 256 are the limit; the noise is as large as the growth of a thousand steps."""
    trend = growth_report.trend_of(sampled(slope, noise=2e5), rank=0, quantity="private_bytes")
    assert trend.verdict == verdict
    assert trend.slope_low < slope < trend.slope_high


def test_one_jump_of_a_count_is_not_a_slope_and_one_each_hundred_steps_is():
    jumped = [{"step": step, "num_fds": 60.0 + (step > 2000)} for step in range(25, 2501, 25)]
    leaking = [{"step": step, "num_fds": 60.0 + step // 100} for step in range(25, 2501, 25)]
    assert growth_report.trend_of(jumped, rank=0, quantity="num_fds").verdict == "steady"
    assert growth_report.trend_of(leaking, rank=0, quantity="num_fds").verdict == "grows"


def test_a_run_is_judged_without_its_warm_up(tmp_path):
    rows = [{"step": step, "num_fds": min(step, 1000)} for step in range(25, 5001, 25)]
    (tmp_path / "rank-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = growth_report.read_samples(tmp_path)
    assert [trend.verdict for trend in growth_report.trends_of(samples, warmup_steps=0)] == ["steady"]
    assert [t.slope for t in growth_report.trends_of(samples, warmup_steps=1000)] == [0.0]
    table = growth_report.write_report(tmp_path / "out", samples, warmup_steps=1000, head={})
    assert "num_fds" in table
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"endurance.json", "table.md"}


def test_torn_or_missing_samples_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"must hold the samples of a run"):
        growth_report.read_samples(tmp_path)
    (tmp_path / "rank-0.jsonl").write_text('{"step": 25}\n{"st')
    with pytest.raises(ValueError, match=r"rank-0.jsonl \(samples of a run\) must be a JSON object a line"):
        growth_report.read_samples(tmp_path)
    with pytest.raises(ValueError, match=r"`warmup_steps` must leave two samples of num_fds"):
        growth_report.trend_of([{"step": 1, "num_fds": 2}], rank=0, quantity="num_fds")


def test_a_watch_needs_a_whole_number_of_steps(tmp_path):
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match=r"`every_n_steps` \(="):
            ProcessWatch(directory=str(tmp_path), every_n_steps=wrong)


def test_what_is_held_is_counted():
    garbage = [b"x" * 2**25]
    garbage.append(garbage)
    del garbage  # not yet collected, as after a fit
    before = process_state()
    with open("/dev/null") as _, mmap.mmap(-1, 2**25) as held:  # pages that no process had before
        held[:: mmap.PAGESIZE] = bytes(2**25 // mmap.PAGESIZE)
        during = process_state()
    assert during["num_fds"] - before["num_fds"] == 1
    assert during["private_bytes"] - before["private_bytes"] > 0.9 * 2**25


def test_pages_of_files_that_the_kernel_may_drop_are_not_held(monkeypatch):
    fields, before = process_watch._fields, process_state()
    for name, is_counted in (("Private_Clean", False), ("Private_Dirty", True), ("SwapPss", True)):
        monkeypatch.setattr(
            process_watch, "_fields", lambda path, name=name: Counter(fields(path)) + Counter({name: 2**20})
        )
        assert (process_state()["private_bytes"] - before["private_bytes"] > 2**29) == is_counted


def test_a_curve_stays_small_and_keeps_its_ends_and_its_best():
    curve = Curve()
    for step in range(10 * MAX_POINTS):
        curve.append(step, -1.0 if step == 4321 else step % 7)
    assert len(curve) <= MAX_POINTS
    assert curve[0][0] == 0
    assert curve[-1][0] == 10 * MAX_POINTS - 1
    assert (4321, -1.0) in curve
    assert list(curve) == sorted(curve)
    assert max(b - a for (a, _), (b, _) in itertools.pairwise(curve)) < 10 * MAX_POINTS / 100  # of the run


@pytest.mark.long
def test_two_hundred_steps_hold_as_many_descriptors_and_groups_at_the_end(tmp_path):
    train = "trainer.devices=2 trainer.max_steps=200 trainer.max_epochs=-1 logger=csv global_batch_size=64".split()
    train += ["callbacks=[default,endurance]", "model.width=0.0625", "trainer.enable_progress_bar=false"]
    options = ["warmup_steps=75", f"train=[{','.join(map(repr, train))}]"]
    trends = ran("endurance", tmp_path, *options, file="endurance.json")["trends"]
    counts = [t for t in trends if t["quantity"] in ("num_threads", "num_fds", "num_sockets", "num_groups")]
    assert len(counts) == 8
    assert {trend["verdict"] for trend in counts} == {"steady"}
