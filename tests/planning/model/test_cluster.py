"""Stages of every algorithm on a cluster: bytes as counted by traffic.py, and NCCL's own model."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.comm import Topology, traffic_of
from lightning_hybrid.comm.engine.in_flight import InFlightBucket
from lightning_hybrid.planning.model import workload
from lightning_hybrid.planning.model.cluster_costs import OURS, PEERS
from lightning_hybrid.planning.model.cost import (
    Cost,
    Link,
    double_tree,
    halving_doubling,
    least_s,
    levels,
    ring,
)
from lightning_hybrid.planning.model.cost_gloo import Gloo
from lightning_hybrid.planning.model.cost_nccl import Nccl
from tests.planning.model.clusters import (
    BYTES,
    FAST,
    FREE_GLOO,
    LINKS,
    NCCL,
    NODES,
    RANKS,
    SLOW,
    cluster,
)

MIB = 2**20


def topology_of(cluster):
    num_ranks = cluster.world_size
    num_nodes = cluster.num_nodes
    if cluster.is_interleaved:
        nodes = [tuple(range(node, num_ranks, num_nodes)) for node in range(num_nodes)]
        return Topology(rank=0, nodes=tuple(nodes))
    return Topology.from_ranks_per_node(
        rank=0, world_size=num_ranks, ranks_per_node=cluster.ranks_per_node
    )


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "two_level"])
@pytest.mark.parametrize("is_interleaved", [False, True])
@settings(max_examples=25)
@given(num_nodes=st.integers(2, 6), ranks=st.integers(2, 6))
def test_links_carry_the_bytes_that_an_emulated_cluster_counts(
    algorithm, is_interleaved, num_nodes, ranks
):
    """tests/netlab compares traffic.py with kernel counters. This test compares the model with traffic.py."""
    result = cluster(num_nodes, ranks, is_interleaved=is_interleaved)
    size = 64.0 * MIB
    stages = result.stages(algorithm, size)
    across = sum(stage.work_s for stage in stages if stage.level == "across")
    counted = traffic_of(algorithm, topology_of(result), size).across
    assert across * result.node_bytes_per_s == pytest.approx(counted, rel=1e-12)


OVER = [(FREE_GLOO, name) for name in (*OURS, *PEERS) if not name.startswith("nccl")]
OVER += [(NCCL, name) for name in (*OURS, *PEERS) if not name.startswith("gloo")]


@pytest.mark.parametrize(
    ("transport", "algorithm"), OVER, ids=lambda value: value if isinstance(value, str) else ""
)
@settings(max_examples=25)
@given(num_bytes=BYTES, num_nodes=NODES, ranks=RANKS, across=LINKS)
def test_nothing_beats_the_bytes_that_must_leave_a_node(
    transport, algorithm, num_bytes, num_nodes, ranks, across
):
    """For NCCL only the bandwidth is compared, because it has its own latencies."""
    if transport is NCCL:
        across = Link(latency_s=0.0, bytes_per_s=max(across.bytes_per_s, 1e8))
    result = cluster(num_nodes, ranks, transport=transport, across=across)
    assert result.alone_s(algorithm, num_bytes) >= result.least_s(num_bytes) * (1 - 1e-9)


@pytest.mark.parametrize("transport", [FREE_GLOO, NCCL], ids=["gloo", "nccl"])
@settings(max_examples=25)
@given(num_bytes=BYTES, num_nodes=st.integers(2, 300))
def test_with_one_rank_per_node_all_hierarchies_are_one(transport, num_bytes, num_nodes):
    result = cluster(num_nodes, 1, transport=transport)
    hierarchies = ("parallel_flat", "hierarchical", "two_level")
    times_s = {result.alone_s(name, num_bytes) for name in hierarchies}
    assert len(times_s) == 1


def test_of_rings_side_by_side_one_sends_while_another_waits():
    """One ring of these shards waits for consent half of the time. Four rings fill the link."""
    slow = Link(latency_s=2e-3, bytes_per_s=12.5e6)
    result = cluster(4, 4, across=slow)
    (one_ring,) = cluster(4, 1, across=slow).stages("hierarchical", MIB / 4)
    (four_rings,) = [stage for stage in result.stages("two_level", MIB) if stage.level == "across"]
    assert 0.5 < one_ring.share < 0.8
    assert four_rings.share == 1.0
    assert four_rings.work_s == pytest.approx(result.least_s(MIB))


def test_chunks_are_those_of_the_engine():
    for numel in (1, 17, 1000, 12345, 10**6):
        flat = torch.empty(numel, dtype=torch.half)
        for num_chunks in (1, 2, 3, 4, 7, 30):
            bucket = InFlightBucket(flat=flat, plan=None, finish=None)
            bucket.split(lambda part: None, num_chunks, checksum=None)
            of_engine = [chunk.num_bytes for chunk in bucket.chunks]
            assert workload.chunk_sizes_bytes(2 * numel, num_chunks, 2) == of_engine


def test_before_its_model_nccl_took_ll_up_to_a_size():
    old = Nccl(inside="pci", protocols=("ll", "simple"), ll_up_to_bytes=16384)
    ask = {"num_nodes": 2, "ranks_per_node": 8, "inside": SLOW, "across": SLOW, "algorithm": "ring"}
    simple = Nccl(inside="pci", protocols=("simple",))
    assert old.all_reduce(16385, **ask) == simple.all_reduce(16385, **ask)
    assert old.all_reduce(16384, **ask).total_s < simple.all_reduce(16384, **ask).total_s


def test_a_link_slower_than_nccl_thinks_counts():
    fast = Link(latency_s=0.0, bytes_per_s=1e9)
    slow = Link(latency_s=1e-3, bytes_per_s=1e9)
    ask = {"num_nodes": 3, "ranks_per_node": 1, "inside": fast, "algorithm": "ring"}
    fast_s = NCCL.all_reduce(4, across=fast, **ask).latency_s
    slow_s = NCCL.all_reduce(4, across=slow, **ask).latency_s
    assert slow_s - fast_s == pytest.approx(4 * (1e-3 - 2.7e-6), rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cluster(0), r"`num_nodes` \(=0\)"),
        (lambda: cluster(2, 0), r"`ranks_per_node` \(=0\)"),
        (lambda: cluster(nics_per_node=0), r"`nics_per_node` \(=0\)"),
        (lambda: cluster().stages("star", 1.0), r"`algorithm` \(='star'\) must be one of flat"),
        (
            lambda: cluster().stages("nccl", 1.0),
            r"`algorithm` \(='nccl'\) must be a Gloo algorithm",
        ),
        (lambda: cluster(transport=NCCL).stages("gloo_ring", 1.0), r"must be an NCCL algorithm"),
        (
            lambda: Nccl(inside="ethernet"),
            r"`inside` \(=\['ethernet'\]\) must be one or more of nvlink, pci",
        ),
        (lambda: Nccl(inside="pci", algorithms=()), r"`algorithms` \(=\[\]\)"),
        (
            lambda: Gloo(stage_s=0, message_s=0, segment_s=0, ring_share=1.5),
            r"`ring_share` \(=1.5\)",
        ),
        (
            lambda: Link(latency_s=-1.0, bytes_per_s=1.0),
            r"`latency_s` \(=-1.0\) must be a number in \[0, inf\)",
        ),
        (lambda: Link(latency_s=0.0, bytes_per_s=0.0), r"`bytes_per_s` \(=0.0\) must be positive"),
        (lambda: ring(-1.0, 2, FAST), r"`num_bytes` \(=-1.0\) must be 0 or more"),
        (lambda: ring(1.0, 0, FAST), r"`num_ranks` \(=0\) must be an integer"),
    ],
)
def test_impossible_clusters_links_and_algorithms_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


FLAT = {f.__name__: f for f in (ring, halving_doubling, double_tree)}
A_LITTLE_LESS = 1 - 1e-9  # floats are added in different orders


@pytest.mark.parametrize("name", FLAT)
@settings(max_examples=25)
@given(sizes=st.tuples(BYTES, BYTES), num_ranks=NODES, link=LINKS)
def test_more_bytes_never_take_less_time_and_nothing_beats_the_bound_between_nodes(
    name, sizes, num_ranks, link
):
    few, many = sorted(sizes)
    few_s = FLAT[name](few, num_ranks, link).total_s
    many_s = FLAT[name](many, num_ranks, link).total_s
    assert few_s <= many_s
    assert many_s >= least_s(many, num_nodes=num_ranks, across=link) * A_LITTLE_LESS
    assert FLAT[name](many, 1, link) == Cost(), "one rank has nothing to do"


@settings(max_examples=25)
@given(num_bytes=BYTES, num_nodes=NODES, ranks=RANKS, across=LINKS)
def test_two_levels_send_what_the_bound_says_when_each_rank_has_its_rail(
    num_bytes, num_nodes, ranks, across
):
    """Each of k ranks sends 2 (N - 1) / N of its k-th part, so a node with k cards reaches its bound."""
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
