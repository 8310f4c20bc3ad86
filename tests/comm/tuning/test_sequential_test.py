"""A challenger wins where it takes less time beyond noise, and by nothing else."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.comm.tuning.sequential_test import SIGN_TEST, PairedComparison, SequentialSignTest


def run_comparison(comparison, time_of):
    """Rounds until the comparison is decided; every order that it gave."""
    orders = []
    while order := comparison.order():
        orders.append(order)
        comparison.record([time_of(arm) for arm in order])
    return orders


def simulated_wins(share_faster, num_comparisons=4000):
    generator = random.Random(0)
    wins = pairs = 0
    for _ in range(num_comparisons):
        num_faster = num_slower = 0
        while (has_won := SIGN_TEST.decide(num_faster, num_slower)) is None:
            if generator.random() < share_faster:
                num_faster += 1
            else:
                num_slower += 1
        wins += has_won
        pairs += num_faster + num_slower
    return wins / num_comparisons, pairs / num_comparisons


@pytest.mark.parametrize("share_faster", [0.5, 0.7, 0.9])
def test_the_outcome_is_what_simulated_comparisons_come_to(share_faster):
    wins, pairs = SIGN_TEST.outcome(share_faster)
    seen_wins, seen_pairs = simulated_wins(share_faster)
    # Four standard deviations of a share of 4,000; of at most 48 pairs it is at most 24 / sqrt(4000).
    assert abs(wins - seen_wins) <= 4 * math.sqrt(wins * (1 - wins) / 4000)
    assert abs(pairs - seen_pairs) <= 4 * 24 / math.sqrt(4000)


def test_an_equal_challenger_wins_in_one_comparison_of_a_hundred_at_most():
    assert SIGN_TEST.outcome(0.5)[0] <= 0.01
    assert SIGN_TEST.outcome(0.8)[0] >= 0.9


def test_what_is_always_slower_costs_four_steps_and_what_is_always_faster_ten():
    assert SIGN_TEST.outcome(0.0) == (0.0, 4.0)
    assert SIGN_TEST.outcome(1.0)[1] == pytest.approx(10.0)


@given(st.integers(0, 48), st.integers(0, 48))
@settings(deadline=None)
def test_more_faster_pairs_never_turn_a_win_into_a_loss(num_faster, num_slower):
    rank = {False: 0, None: 1, True: 2}
    test = SequentialSignTest(most_pairs=1000)
    assert rank[test.decide(num_faster, num_slower)] <= rank[test.decide(num_faster + 1, num_slower)]
    assert rank[test.decide(num_faster, num_slower)] >= rank[test.decide(num_faster, num_slower + 1)]


def test_rounds_are_mirrored_and_losers_are_tried_no_more():
    orders = run_comparison(PairedComparison("a", ["b", "c"]), {"a": 1.0, "b": 0.9, "c": 2.0}.get)
    assert orders[:2] == [("a", "b", "c"), ("c", "b", "a")]
    assert orders[4] == ("a", "b")
    assert orders[5] == ("b", "a")
    assert len(orders) == 10


def test_of_several_that_are_faster_the_fastest_wins():
    comparison = PairedComparison("a", ["b", "c", "d"])
    run_comparison(comparison, {"a": 1.0, "b": 0.9, "c": 0.7, "d": 0.8}.get)
    assert comparison.winner == "c"
    assert comparison.ratio("c") == pytest.approx(0.7)


def test_with_a_steady_change_no_challenger_wins():
    """A machine that gets 1 % faster with every step favours the arm that comes last: in mirrored rounds none does."""
    clock = [1.0]

    def time_of(arm):
        clock[0] *= 0.99
        return clock[0]

    comparison = PairedComparison("a", ["b", "c"])
    run_comparison(comparison, time_of)
    assert comparison.winner == "a"


def test_a_gain_below_the_least_is_none():
    for gain, winner in ((0.004, "a"), (0.006, "b")):
        comparison = PairedComparison("a", ["b"])
        run_comparison(comparison, {"a": 1.0, "b": 1.0 - gain}.get)
        assert comparison.winner == winner


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_none_helps_no_challenger(bad):
    comparison = PairedComparison("a", ["b"])
    run_comparison(comparison, {"a": 1.0, "b": bad}.get)
    assert (comparison.winner, comparison.ratio("b")) == ("a", 1.0)


def test_a_round_must_have_a_time_for_each_arm():
    with pytest.raises(ValueError, match=r"^`times_s` \(=\[1.0\]\) must hold a time for each of"):
        PairedComparison("a", ["b"]).record([1.0])


@pytest.mark.parametrize(
    ("name", "value"), [("error", 0.5), ("miss", 0.0), ("share_if_faster", 0.5), ("least_gain", 1.0), ("most_pairs", 0)]
)
def test_a_value_that_cannot_work_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"^`{name}` \(={value}\) must be"):
        SequentialSignTest(**{name: value})
