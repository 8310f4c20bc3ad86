"""A challenger wins where it takes less time beyond noise, and by nothing else."""

import math

import pytest

from lightning_hybrid.comm.tuning.paired_comparison import PairedComparison


def run_comparison(comparison, time_of):
    orders = []
    while order := comparison.order():
        orders.append(order)
        comparison.record([time_of(arm) for arm in order])
    return orders


def test_rounds_are_mirrored_losers_are_tried_no_more_and_the_fastest_wins():
    comparison = PairedComparison("a", ["b", "c", "d"])
    orders = run_comparison(comparison, {"a": 1.0, "b": 0.9, "c": 2.0, "d": 0.8}.get)
    assert orders[:2] == [("a", "b", "c", "d"), ("d", "c", "b", "a")]
    assert orders[4:6] == [("a", "b", "d"), ("d", "b", "a")]
    assert len(orders) == 10
    assert comparison.winner == "d"
    assert comparison.ratio("d") == pytest.approx(0.8)


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
