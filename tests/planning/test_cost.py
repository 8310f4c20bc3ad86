"""Costs by counting: what must hold for any number of bytes, ranks and any link."""

import math

import pytest
from hypothesis import given, settings

from lightning_hybrid.planning.cost import Cost, Link, double_tree, halving_doubling, least_s, levels, ring
from tests.planning.clusters import BYTES, FAST, LINKS, NODES, RANKS, SLOW

FLAT = {f.__name__: f for f in (ring, halving_doubling, double_tree)}
A_LITTLE_LESS = 1 - 1e-9  # the sums are of floats, in different orders


@pytest.mark.parametrize("name", FLAT)
@settings(max_examples=25)
@given(few=BYTES, more=BYTES, num_ranks=NODES, link=LINKS)
def test_more_bytes_never_take_less_time_and_nothing_beats_the_bound_between_nodes(name, few, more, num_ranks, link):
    times_s = [FLAT[name](num_bytes, num_ranks, link).total_s for num_bytes in sorted((few, more))]
    assert times_s[0] <= times_s[1]
    assert times_s[1] >= least_s(max(few, more), num_nodes=num_ranks, across=link) * A_LITTLE_LESS
    assert FLAT[name](more, 1, link) == Cost(), "one rank has nothing to do"


@settings(max_examples=25)
@given(num_bytes=BYTES, num_nodes=NODES, inside=LINKS, across=LINKS)
def test_with_one_rank_per_node_every_hierarchy_is_the_ring(num_bytes, num_nodes, inside, across):
    assert levels(num_bytes, [(1, inside), (num_nodes, across)]) == ring(num_bytes, num_nodes, across)


@settings(max_examples=25)
@given(num_bytes=BYTES, num_nodes=NODES, ranks=RANKS, across=LINKS)
def test_two_levels_send_what_the_bound_says_when_each_rank_has_its_rail(num_bytes, num_nodes, ranks, across):
    """Each of k ranks sends 2 (N - 1) / N of its k-th; the node with k cards is at its bound."""
    free = Link(latency_s=0.0, bytes_per_s=math.inf)
    cost = levels(num_bytes, [(ranks, free), (num_nodes, across)])
    silent = Link(latency_s=0.0, bytes_per_s=across.bytes_per_s)
    bound_s = least_s(num_bytes, num_nodes=num_nodes, across=silent, nics_per_node=ranks)
    assert cost.transfer_s == pytest.approx(bound_s, rel=1e-9)


def test_hops_are_counted_by_hand():
    hop = Link(latency_s=1.0, bytes_per_s=1.0)
    assert ring(0, 1024, hop).latency_s == 2046
    assert halving_doubling(0, 1024, hop).latency_s == double_tree(0, 1024, hop).latency_s == 20


def test_odd_ranks_cost_halving_two_rounds_more():
    assert halving_doubling(8.0, 4, SLOW).latency_s == 4 * SLOW.latency_s
    assert halving_doubling(8.0, 5, SLOW).latency_s == 6 * SLOW.latency_s
    assert halving_doubling(8.0, 5, SLOW).transfer_s > 2 * halving_doubling(8.0, 4, SLOW).transfer_s


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Link(latency_s=-1.0, bytes_per_s=1.0), r"`latency_s` \(=-1.0\) must be a number in \[0, inf\)"),
        (lambda: Link(latency_s=0.0, bytes_per_s=0.0), r"`bytes_per_s` \(=0.0\) must be positive"),
        (lambda: ring(-1.0, 2, FAST), r"`num_bytes` \(=-1.0\) must not be negative"),
        (lambda: ring(1.0, 0, FAST), r"`num_ranks` \(=0\) must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
