"""What grows is distinguished from what does not, and a short run holds what it held."""

from __future__ import annotations

import itertools
import mmap
import random
from collections import Counter

import pytest

from lightning_hybrid.callbacks.run_report.curve import MAX_POINTS, Curve
from tests.evidence.endurance import growth_report, process_watch
from tests.evidence.endurance.process_watch import process_state
from tests.evidence.outcomes import ran


@pytest.mark.parametrize(
    ("slope", "verdict"), [(0.0, "steady"), (100.0, "steady"), (600.0, "grows"), (-600.0, "steady")]
)
def test_growth_is_distinguished_from_noise(slope, verdict):
    """100 bytes a step are allowed, 256 are the limit; the noise is as large as the growth of a thousand steps."""
    draw = random.Random(0)
    samples = [{"step": step, "private_bytes": 1e8 + slope * step + draw.gauss(0, 2e5)} for step in range(25, 5001, 25)]
    trend = growth_report.trend_of(samples, rank=0, quantity="private_bytes")
    assert trend.verdict == verdict
    assert trend.slope_low < slope < trend.slope_high


def test_one_jump_of_a_count_is_not_a_slope_and_the_warm_up_is_not_judged():
    jumped = [{"step": step, "num_fds": 60.0 + (step > 2000)} for step in range(25, 2501, 25)]
    warming = [{"step": step, "num_fds": min(step, 1000)} for step in range(25, 2001, 25)]
    for samples, warmup_steps, verdict in ((jumped, 0, "steady"), (warming, 0, "grows"), (warming, 1000, "steady")):
        assert [each.verdict for each in growth_report.trends_of({0: samples}, warmup_steps=warmup_steps)] == [verdict]


def test_what_is_held_is_counted_but_for_pages_of_files_that_the_kernel_may_drop(monkeypatch):
    garbage = [b"x" * 2**25]
    garbage.append(garbage)
    del garbage  # not yet collected, as after a fit
    before = process_state()
    with open("/dev/null") as _, mmap.mmap(-1, 2**25) as held:  # pages that no process had before
        held[:: mmap.PAGESIZE] = bytes(2**25 // mmap.PAGESIZE)
        during = process_state()
    assert during["num_fds"] - before["num_fds"] == 1
    assert during["private_bytes"] - before["private_bytes"] > 0.9 * 2**25
    fields = process_watch._fields
    for name, is_counted in (("Private_Clean", False), ("Private_Dirty", True), ("SwapPss", True)):
        more = Counter({name: 2**20})
        monkeypatch.setattr(process_watch, "_fields", lambda path, more=more: Counter(fields(path)) + more)
        assert (process_state()["private_bytes"] - before["private_bytes"] > 2**29) == is_counted


def test_a_curve_stays_small_and_keeps_its_ends_and_its_best():
    curve = Curve()
    for step in range(10 * MAX_POINTS):
        curve.append(step, -1.0 if step == 4321 else step % 7)
    assert len(curve) <= MAX_POINTS
    assert (curve[0][0], curve[-1][0]) == (0, 10 * MAX_POINTS - 1)
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
