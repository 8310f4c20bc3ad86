"""Costs by counting: what must hold for any number of bytes, ranks and any link."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.planning.cost import (
    Cost,
    Link,
    best_num_pieces,
    double_tree,
    doubling,
    halving_doubling,
    hierarchical,
    in_network,
    least_s,
    levels,
    pipelined_s,
    ring,
)
from tests.planning.clusters import BYTES, FAST, LINKS, NODES, RANKS, SLOW

FLAT = {f.__name__: f for f in (ring, halving_doubling, doubling, double_tree)}
A_LITTLE_LESS = 1 - 1e-9  # the sums are of floats, in different orders


@pytest.mark.parametrize("name", FLAT)
@settings(max_examples=25)
@given(few=BYTES, more=BYTES, num_ranks=NODES, link=LINKS)
def test_more_bytes_never_take_less_time(name, few, more, num_ranks, link):
    few, more = sorted((few, more))
    assert FLAT[name](few, num_ranks, link).total_s <= FLAT[name](more, num_ranks, link).total_s


@pytest.mark.parametrize("name", FLAT)
@settings(max_examples=25)
@given(num_bytes=BYTES, num_ranks=NODES, link=LINKS)
def test_nothing_beats_the_bound_between_nodes(name, num_bytes, num_ranks, link):
    bound_s = least_s(num_bytes, num_nodes=num_ranks, across=link)
    assert FLAT[name](num_bytes, num_ranks, link).total_s >= bound_s * A_LITTLE_LESS


@pytest.mark.parametrize("name", FLAT)
def test_one_rank_has_nothing_to_do(name):
    assert FLAT[name](1e6, 1, SLOW, add_bytes_per_s=1.0) == Cost()


@settings(max_examples=25)
@given(num_bytes=BYTES, num_nodes=NODES, inside=LINKS, across=LINKS)
def test_with_one_rank_per_node_every_hierarchy_is_the_ring(num_bytes, num_nodes, inside, across):
    flat = ring(num_bytes, num_nodes, across, add_bytes_per_s=1e9)
    assert levels(num_bytes, [(1, inside), (num_nodes, across)], add_bytes_per_s=1e9) == flat
    paper = hierarchical(
        num_bytes, num_nodes=num_nodes, ranks_per_node=1, inside=inside, across=across, add_bytes_per_s=1e9
    )
    assert paper == flat


@settings(max_examples=25)
@given(num_bytes=BYTES, num_nodes=NODES, ranks=RANKS, across=LINKS)
def test_two_levels_send_what_the_bound_says_when_each_rank_has_its_rail(num_bytes, num_nodes, ranks, across):
    """Each of k ranks sends 2 (N - 1) / N of its k-th; the node with k cards is at its bound."""
    free = Link(latency_s=0.0, bytes_per_s=math.inf)
    cost = levels(num_bytes, [(ranks, free), (num_nodes, across)])
    silent = Link(latency_s=0.0, bytes_per_s=across.bytes_per_s)
    bound_s = least_s(num_bytes, num_nodes=num_nodes, across=silent, nics_per_node=ranks)
    assert cost.transfer_s == pytest.approx(bound_s, rel=1e-9)


def test_hops_are_those_of_the_paper():
    """1,024 ranks: 2,046 hops round one ring; 4 (k - 1) + 2 (P / k - 1) = 186 with 16 to a node, counted both ways."""
    hop = Link(latency_s=1.0, bytes_per_s=1.0)
    assert ring(0, 1024, hop).latency_s == 2046
    found = hierarchical(0, num_nodes=64, ranks_per_node=16, inside=hop, across=hop).latency_s
    assert found == 2 * 15 + 2 * 63  # the paper counts messages in and out of a rank, hence twice the first
    assert halving_doubling(0, 1024, hop).latency_s == double_tree(0, 1024, hop).latency_s == 20
    assert doubling(0, 1024, hop).latency_s == 10


def test_odd_ranks_cost_halving_two_rounds_more():
    assert halving_doubling(8.0, 4, SLOW).latency_s == 4 * SLOW.latency_s
    assert halving_doubling(8.0, 5, SLOW).latency_s == 6 * SLOW.latency_s
    assert halving_doubling(8.0, 5, SLOW).transfer_s > 2 * halving_doubling(8.0, 4, SLOW).transfer_s


def test_switches_that_add_halve_the_bytes():
    many = 10**6  # ranks, so that (P - 1) / P is as good as 1
    assert in_network(1e9, many, FAST).transfer_s == pytest.approx(ring(1e9, many, FAST).transfer_s / 2, rel=1e-5)


def test_additions_are_counted_once_for_each_rank_but_the_first():
    assert ring(4e6, 4, FAST, add_bytes_per_s=1e6).add_s == 3.0
    assert hierarchical(1e6, num_nodes=1, ranks_per_node=4, inside=FAST, across=SLOW, add_bytes_per_s=1e6).add_s == 3.0


@settings(max_examples=25)
@given(
    latencies_s=st.lists(st.floats(1e-6, 1e-3), min_size=2, max_size=4),
    bytes_s=st.lists(st.floats(1e-3, 1.0), min_size=4, max_size=4),
)
def test_the_best_number_of_pieces_is_no_worse_than_its_neighbours(latencies_s, bytes_s):
    """By the formula it minimises: sum a + (m - 1) max a + (sum b - max b) / m + max b."""
    stages = [Cost(latency_s=a, transfer_s=b) for a, b in zip(latencies_s, bytes_s, strict=False)]
    latency = [s.latency_s for s in stages]
    work = [s.transfer_s for s in stages]

    def time_s(m):
        return sum(latency) + (m - 1) * max(latency) + (sum(work) - max(work)) / m + max(work)

    best = best_num_pieces(stages)
    assert time_s(best) <= min(time_s(best + 1), time_s(2 * best), time_s(max(1, best - 1))) * (1 + 1e-9)


def test_pieces_overlap_all_but_the_slowest_stage():
    assert pipelined_s([1.0, 2.0, 1.0], 1) == 4.0
    assert pipelined_s([1.0, 2.0, 1.0], 10) == 22.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Link(latency_s=-1.0, bytes_per_s=1.0), r"`latency_s` \(=-1.0\) must not be negative"),
        (lambda: Link(latency_s=0.0, bytes_per_s=0.0), r"`bytes_per_s` \(=0.0\) must be positive"),
        (lambda: ring(-1.0, 2, FAST), r"`num_bytes` \(=-1.0\) must not be negative"),
        (lambda: ring(1.0, 0, FAST), r"`num_ranks` \(=0\) must be a whole number"),
        (lambda: pipelined_s([1.0], 0), r"`num_pieces` \(=0\) must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
