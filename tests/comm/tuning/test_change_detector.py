"""A change of communication's time is noticed soon; noise, small changes and single stalls are not changes."""

from __future__ import annotations

import math
import random

import pytest

from lightning_hybrid.comm.tuning.change_detector import NUM_LEARNED, Baseline, ChangeDetector


def steps_until_noticed(detector, times_s):
    for number, time_s in enumerate(times_s, 1):
        detector.add(time_s)
        if detector.has_changed:
            return number
    return None


def noisy(level_s, sigma, num, seed=0):
    generator = random.Random(seed)
    return [level_s * math.exp(generator.gauss(0, sigma)) for _ in range(num)]


@pytest.mark.parametrize(("factor", "most"), [(2.0, 3), (0.5, 3), (1.2, 10), (0.8, 10), (1.1, 40)])
def test_a_change_is_noticed_within_so_many_steps(factor, most):
    for seed in range(10):
        detector = ChangeDetector(Baseline(seconds=0.1, sigma=0.05))
        assert steps_until_noticed(detector, noisy(0.1, 0.05, 1000, seed)) is None
        assert steps_until_noticed(detector, noisy(0.1 * factor, 0.05, 200, seed)) <= most
        assert detector.ratio == pytest.approx(factor, rel=0.2)  # a median of three steps that scatter by 5 %


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_noise_alone_is_no_change_in_ten_thousand_steps(sigma, seed):
    detector = ChangeDetector()
    assert steps_until_noticed(detector, noisy(0.1, sigma, NUM_LEARNED + 10_000, seed)) is None
    assert detector.baseline.seconds == pytest.approx(0.1, rel=4 * 1.2533 * sigma / math.sqrt(NUM_LEARNED))


def test_steps_that_hang_now_and_then_are_no_change():
    detector = ChangeDetector(Baseline(seconds=1.0, sigma=0.01))
    assert steps_until_noticed(detector, ([1.0] * 20 + [100.0]) * 100) is None


def test_changes_below_five_percent_are_left_alone():
    assert steps_until_noticed(ChangeDetector(Baseline(seconds=1.0, sigma=0.0)), [1.045] * 10_000) is None


@pytest.mark.parametrize("time_s", [0.0, math.nan, math.inf, -1.0])
def test_a_step_without_a_time_says_nothing(time_s):
    detector = ChangeDetector(Baseline(seconds=1.0, sigma=0.0))
    assert steps_until_noticed(detector, [time_s] * 100) is None
