"""Bytes on the links, as arithmetic; tests/netlab/test_bytes.py holds them against what a kernel counted."""

from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_hybrid.comm import Topology, traffic_of
from lightning_hybrid.comm.plan import Algorithm

ALGORITHMS = get_args(Algorithm)


@st.composite
def topologies(draw):
    hosts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    return Topology.from_identities(rank=0, identities=hosts)


@given(st.sampled_from(ALGORITHMS), topologies(), st.integers(0, 10**9), st.sampled_from([None, 0.5]))
def test_no_algorithm_claims_less_than_the_least_and_two_send_no_more(algorithm, topology, num_bytes, narrow):
    assume(algorithm != "two_level" or topology.ranks_per_node is not None)
    across = None if narrow is None else num_bytes * narrow
    found = traffic_of(algorithm, topology, num_bytes, num_bytes_across=across)
    least = 2 * (topology.num_nodes - 1) / topology.num_nodes * (num_bytes if across is None else across)
    assert found.least_across == pytest.approx(least)
    assert found.across >= found.least_across * (1 - 1e-12)
    if algorithm in ("hierarchical", "two_level"):
        assert found.across == found.least_across
    # All that ranks of a node have to send one another: each but one its bytes to another, and back; a ring less.
    most = 2 * (max(map(len, topology.nodes)) - 1) * num_bytes
    assert found.inside == most if algorithm in ("hierarchical", "two_level") else found.inside <= most


def test_shards_need_nodes_of_equal_size():
    with pytest.raises(ValueError, match=r"`algorithm` \(='two_level'\) needs nodes of equal size, and these hold \[2"):
        traffic_of("two_level", Topology(rank=0, nodes=((0, 1), (2,))), 100)
