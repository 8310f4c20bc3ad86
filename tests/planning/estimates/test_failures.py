"""Failures of a run: Daly's interval against all others, and expected times against simulated runs."""

import math
import statistics

import pytest

from lightning_hybrid.planning.estimates.failures import Failures

DAY_S = 86400.0
JOBS = [(64, 5.0, 300.0, 7), (1024, 10.0, 600.0, 30), (16384, 30.0, 900.0, 5)]  # GPUs, checkpoint, restart, days


@pytest.mark.parametrize(("gpus", "checkpoint_s", "restart_s", "days"), JOBS)
def test_no_other_interval_loses_a_tenth_less_than_dalys(gpus, checkpoint_s, restart_s, days):
    failures = Failures(checkpoint_s=checkpoint_s, restart_s=restart_s)
    best_s, work_s = failures.interval_s(gpus), days * DAY_S
    tried = [failures.restarted_s(work_s, gpus, best_s * 1.1**power) for power in range(-20, 21)]
    assert failures.restarted_s(work_s, gpus) - work_s <= 1.1 * (min(tried) - work_s)


@pytest.mark.parametrize(("gpus", "checkpoint_s", "restart_s", "days"), JOBS)
@pytest.mark.parametrize("elastic", [False, True])
def test_the_expected_time_is_the_mean_of_simulated_runs(gpus, checkpoint_s, restart_s, days, elastic):
    failures = Failures(checkpoint_s=checkpoint_s, restart_s=restart_s, detection_s=30.0)
    found_s = failures.simulated_s(days * DAY_S, gpus, elastic=elastic)
    expected_s = (failures.elastic_s if elastic else failures.restarted_s)(days * DAY_S, gpus)
    assert statistics.fmean(found_s) == pytest.approx(expected_s, rel=0.005)
    assert found_s == sorted(found_s)


def test_a_run_without_failures_takes_its_work_and_its_checkpoints():
    """Of 1,000 s with checkpoints of 1 s: as many as there are intervals."""
    never = Failures(gpu_hours=1e12, checkpoint_s=1.0)
    assert never.restarted_s(1000.0, 1, every_s=100.0) == pytest.approx(1010.0)
    assert never.elastic_s(1000.0, 1) == pytest.approx(1000.0)


def test_a_job_that_fails_faster_than_it_restarts_never_ends():
    often = Failures(gpu_hours=1.0, restart_s=36000.0, rejoin_s=36000.0)
    assert often.simulated_s(DAY_S, 8) == [math.inf] * 200
    assert often.elastic_s(DAY_S, 8) == math.inf


@pytest.mark.parametrize("name", ["gpu_hours", "checkpoint_s", "restart_s"])
def test_times_that_cannot_be_are_refused(name):
    with pytest.raises(ValueError, match=rf"`{name}` \(=-1.0\)"):
        Failures(**{name: -1.0})
