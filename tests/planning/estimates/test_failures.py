"""Failures of a run: Daly's interval compared with all others, and expected times compared with simulations."""

import math
import statistics

import pytest

from lightning_hybrid.planning.estimates.failures import Failures

DAY_S = 86400.0
# GPUs, checkpoint, restart, days.
JOBS = [
    (64, 5.0, 300.0, 7),
    (1024, 10.0, 600.0, 30),
    (16384, 30.0, 900.0, 5),
]


@pytest.mark.parametrize(("gpus", "checkpoint_s", "restart_s", "days"), JOBS)
def test_no_other_interval_loses_a_tenth_less_than_dalys(gpus, checkpoint_s, restart_s, days):
    failures = Failures(checkpoint_s=checkpoint_s, restart_s=restart_s)
    best_s = failures.interval_s(gpus)
    work_s = days * DAY_S
    tried = [failures.restarted_s(work_s, gpus, best_s * 1.1**power) for power in range(-20, 21)]
    assert failures.restarted_s(work_s, gpus) - work_s <= 1.1 * (min(tried) - work_s)


@pytest.mark.parametrize(("gpus", "checkpoint_s", "restart_s", "days"), JOBS)
@pytest.mark.parametrize("elastic", [False, True])
def test_the_expected_time_is_the_mean_of_simulated_runs(
    gpus, checkpoint_s, restart_s, days, elastic
):
    failures = Failures(checkpoint_s=checkpoint_s, restart_s=restart_s, detection_s=30.0)
    work_s = days * DAY_S
    if elastic:
        expected_s = failures.elastic_s(work_s, gpus)
    else:
        expected_s = failures.restarted_s(work_s, gpus)
    simulated_s = failures.simulated_s(work_s, gpus, elastic=elastic)
    assert statistics.fmean(simulated_s) == pytest.approx(expected_s, rel=0.005)
    assert simulated_s == sorted(simulated_s)


def test_a_run_without_failures_takes_its_work_and_its_checkpoints():
    """1,000 s of work contain one checkpoint of 1 s per interval."""
    never = Failures(gpu_hours=1e12, checkpoint_s=1.0)
    assert never.restarted_s(1000.0, 1, every_s=100.0) == pytest.approx(1010.0)
    assert never.elastic_s(1000.0, 1) == pytest.approx(1000.0)


OFTEN_S = 600.0  # between two failures of one GPU


def often(**seconds):
    return Failures(gpu_hours=OFTEN_S / 3600, checkpoint_s=10.0, **seconds)


def test_a_second_of_detection_costs_what_a_second_of_the_way_back_costs():
    late = often(detection_s=120.0, restart_s=0.0, rejoin_s=0.0)
    slow = often(detection_s=0.0, restart_s=120.0, rejoin_s=120.0)
    at_once = often(detection_s=0.0, restart_s=0.0, rejoin_s=0.0)
    for name in ("restarted_s", "elastic_s"):
        assert getattr(late, name)(DAY_S, 1) == pytest.approx(getattr(slow, name)(DAY_S, 1))
        assert getattr(late, name)(DAY_S, 1) > 1.2 * getattr(at_once, name)(DAY_S, 1)
    for elastic in (False, True):
        assert late.simulated_s(DAY_S, 1, elastic=elastic) == slow.simulated_s(
            DAY_S, 1, elastic=elastic
        )
        lost_s = statistics.fmean(late.simulated_s(DAY_S, 1, elastic=elastic)) - DAY_S
        assert lost_s > 1.2 * (
            statistics.fmean(at_once.simulated_s(DAY_S, 1, elastic=elastic)) - DAY_S
        )


def test_failures_within_a_restart_are_simulated():
    """They increase each recovery from b to M (exp(b / M) - 1) seconds, here by a factor of 1.3."""
    failures = often(detection_s=0.0, restart_s=300.0)
    simulated_s = statistics.fmean(failures.simulated_s(DAY_S, 1))
    assert simulated_s == pytest.approx(failures.restarted_s(DAY_S, 1), rel=0.02)


def test_a_checkpoint_that_takes_longer_than_two_failures_are_apart_is_made_once_a_failure():
    """Daly's series holds for costs below twice the time between failures. Above, his interval equals that time."""
    slow = Failures(gpu_hours=100 / 3600, checkpoint_s=1000.0)
    assert slow.interval_s(1) == pytest.approx(100.0)


def test_work_that_is_shorter_than_an_interval_ends_with_one_checkpoint():
    never = Failures(gpu_hours=1e12, checkpoint_s=5.0)
    assert never.restarted_s(10.0, 1) == pytest.approx(15.0)


def test_a_job_that_fails_faster_than_it_restarts_never_ends():
    often = Failures(gpu_hours=1.0, restart_s=36000.0, rejoin_s=36000.0)
    assert often.simulated_s(DAY_S, 8) == [math.inf] * 200
    assert often.elastic_s(DAY_S, 8) == math.inf


@pytest.mark.parametrize("gpu_hours", [1e-3, 1.0])
def test_failures_every_few_seconds_or_less_leave_no_end_and_no_overflow(gpu_hours):
    always = Failures(gpu_hours=gpu_hours)
    assert always.restarted_s(DAY_S, 1024) == math.inf
    assert always.simulated_s(DAY_S, 1024) == [math.inf] * 200


def test_a_run_shorter_than_its_checkpoint_has_an_end():
    never = Failures(gpu_hours=1e12, checkpoint_s=10.0)
    assert never.simulated_s(0.001, 1) == pytest.approx([10.001] * 200)


@pytest.mark.parametrize("name", ["gpu_hours", "checkpoint_s", "restart_s"])
def test_times_that_cannot_be_are_refused(name):
    with pytest.raises(ValueError, match=rf"`{name}` \(=-1.0\)"):
        Failures(**{name: -1.0})
