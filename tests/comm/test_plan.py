import dataclasses
import json
import os
import socket

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.comm import topology as topology_module
from lightning_hybrid.comm.plan import LEAST_CHUNK_BYTES, MIB, CommPlan
from lightning_hybrid.comm.topology import Topology, host_identity, validate_ranks_per_node


def spread(*sizes):
    ranks = iter(range(sum(sizes)))
    return Topology(rank=0, nodes=tuple(tuple(next(ranks) for _ in range(size)) for size in sizes))


plans = st.builds(
    CommPlan,
    algorithm=st.sampled_from(["auto", "flat", "parallel_flat", "hierarchical", "two_level"]),
    bucket_bytes=st.integers(1, 2**40),
    last_bucket_bytes=st.integers(1, 2**40),
    num_buckets=st.none() | st.integers(1, 100),
    hierarchical_below_bytes=st.integers(0, 2**40),
    chunk_bytes=st.integers(1, 2**40),
    num_parallel_groups=st.integers(1, 16),
    check_order=st.booleans(),
)


@pytest.mark.parametrize(
    ("sizes", "small", "large"),
    [
        ((1,), "flat", "flat"),
        ((8,), "hierarchical", "two_level"),
        ((1, 1, 1), "parallel_flat", "parallel_flat"),
        ((2, 2), "hierarchical", "two_level"),
        ((2, 1), "hierarchical", "hierarchical"),
    ],
)
def test_auto_chooses_the_algorithm_of_its_rule(sizes, small, large):
    plan = CommPlan()
    topology = spread(*sizes)
    assert plan.algorithm_for(MIB - 1, topology) == small
    assert plan.algorithm_for(MIB, topology) == large
    single = "flat" if sizes == (8,) else large  # on one host
    assert plan.algorithm_for(MIB, topology, is_half=False) == single
    assert plan.algorithm_for(MIB - 1, topology, is_half=False) == small
    assert set(plan.algorithms(topology)) == {small, large, single}
    assert plan.fallback(topology) is None


@given(
    plans, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**41), st.booleans()
)
def test_the_algorithm_for_any_bucket_is_among_those_announced(plan, sizes, num_bytes, is_half):
    topology = spread(*sizes)
    algorithm = plan.algorithm_for(num_bytes, topology, is_half=is_half)
    assert algorithm in plan.algorithms(topology)


@given(plans)
def test_json_and_back_is_the_same_plan(plan):
    assert CommPlan.from_json(plan.to_json()) == plan
    assert set(json.loads(plan.to_json())) == {field.name for field in dataclasses.fields(CommPlan)}


@given(plans, plans)
def test_the_hash_tells_plans_apart(first, second):
    assert (first.plan_hash == second.plan_hash) == (first == second)
    assert len(first.plan_hash) == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bucket_size": 3}', r"`bucket_size` \(=3\) is not an option of a plan"),
        ("[]", "must be a JSON object"),
    ],
)
def test_a_plan_file_with_an_error_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        CommPlan.from_json(text)


BAD = {
    "algorithm": ["ring"],
    "bucket_bytes": [0, 1.5, True],
    "last_bucket_bytes": [0],
    "hierarchical_below_bytes": [-1],
    "chunk_bytes": [0],
    "num_buckets": [0],
    "num_parallel_groups": [0, 17],
    "check_order": [1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_values_outside_the_rules_are_refused(name, value):
    message = rf"^`{name}` \(={value!r}\) must be"
    with pytest.raises(ValueError, match=message):
        CommPlan(**{name: value})
    with pytest.raises(ValueError, match=message):
        CommPlan.from_json(json.dumps({name: value}))


@given(plans, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**41))
def test_chunks_are_never_smaller_than_the_least_nor_made_for_nothing(plan, sizes, num_bytes):
    topology = spread(*sizes)
    sizes_of_bucket = {"index": 0, "numel": num_bytes, "dtype": "uint8", "num_bytes": num_bytes}
    bucket = plan.bucket(**sizes_of_bucket, topology=topology)
    assert bucket.num_chunks >= 1
    assert bucket.num_chunks == 1 or num_bytes // bucket.num_chunks >= LEAST_CHUNK_BYTES
    if bucket.algorithm == "flat" or topology.world_size == 1:
        assert bucket.num_chunks == 1
    assert bucket == plan.bucket(**sizes_of_bucket, topology=topology)


def test_one_host_cuts_nothing_and_on_cuda_is_the_backends_own():
    for num_bytes in (0, 1, MIB, 2**30):
        for on_cuda in (False, True):
            bucket = CommPlan().bucket(
                index=0,
                numel=1,
                dtype="float16",
                num_bytes=num_bytes,
                topology=spread(8),
                on_cuda=on_cuda,
            )
            assert bucket.num_chunks == 1
            assert (bucket.algorithm == "flat") == on_cuda
    assert CommPlan().algorithms(spread(8), on_cuda=True) == ("flat",)


def test_chunks_grow_with_the_nodes_that_a_ring_cuts_them_for():
    for sizes, num_chunks in (((2, 2), 16), ((2,) * 4, 8), ((2,) * 32, 1)):
        bucket = CommPlan(algorithm="two_level", chunk_bytes=MIB // 4).bucket(
            index=0, numel=1, dtype="float32", num_bytes=8 * MIB, topology=spread(*sizes)
        )
        assert bucket.num_chunks == num_chunks


@given(
    plans,
    st.lists(st.integers(1, 1000), max_size=40),
    st.integers(1, 2000),
    st.integers(1, 500),
    st.integers(1, 9),
)
def test_small_tensors_are_fused_and_large_ones_travel_alone(
    plan, sizes, bucket_bytes, last_bucket_bytes, num_nodes
):
    plan = dataclasses.replace(
        plan, bucket_bytes=bucket_bytes, last_bucket_bytes=last_bucket_bytes, num_buckets=1
    )
    remaining = iter(sizes)
    buckets = []
    # Every bucket ends at the end of a tensor.
    for cap in plan.bucket_caps(sizes, num_nodes=num_nodes):
        buckets.append([])
        while sum(buckets[-1]) < cap:
            buckets[-1].append(next(remaining))
        assert sum(buckets[-1]) == cap
    assert not list(remaining)
    for index, bucket in enumerate(buckets):
        assert len(bucket) == 1 or sum(bucket) <= bucket_bytes
        if index < len(buckets) - 2:  # full: the next tensor would not have fitted
            assert sum(bucket) + buckets[index + 1][0] > bucket_bytes
    if buckets:
        assert len(buckets[-1]) == 1 or sum(buckets[-1]) <= min(last_bucket_bytes, bucket_bytes)


@pytest.mark.parametrize("sizes", [[0], [8 * MIB, 0], [0, 8 * MIB, 0, 0], [8 * MIB, 0, 8 * MIB]])
def test_tensors_without_elements_have_no_bucket_of_their_own(sizes):
    caps = CommPlan().bucket_caps(sizes, num_nodes=2)
    assert caps == [size for size in sizes if size]


def discover_with(hosts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology_module, "host_identity", lambda: (hosts[dist.get_rank()],))
        return Topology.discover()


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("baab", ((0, 3), (1, 2))),
        ("aaba", ((0, 1, 3), (2,))),
        ("abcd", ((0,), (1,), (2,), (3,))),
    ],
)
def test_ranks_with_one_identity_share_a_node_whatever_their_order(four_ranks, hosts, nodes):
    for rank, topology in enumerate(four_ranks.run(discover_with, hosts)):
        assert topology == Topology(rank=rank, nodes=nodes)


def test_real_processes_of_one_machine_share_a_node(one_rank, three_ranks):
    assert three_ranks.run(Topology.discover) == [
        Topology(rank=rank, nodes=((0, 1, 2),)) for rank in range(3)
    ]
    assert one_rank.run(Topology.discover) == [Topology(rank=0, nodes=((0,),))]


def test_the_identity_of_this_host_says_more_than_its_name():
    name, boot_id, network_namespace = host_identity()
    assert name == socket.gethostname()
    assert len(boot_id) == 36
    assert network_namespace.startswith("net:[")


def test_an_unreadable_proc_leaves_the_host_name(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(os, "readlink", refuse)
    assert host_identity() == (socket.gethostname(), "", "")


def test_uneven_nodes_have_leaders_but_no_equal_local_ranks():
    topology = Topology(rank=2, nodes=((0, 1), (2,)))
    assert topology.ranks_per_node is None
    assert topology.partition("leaders") == ((0, 2),)
    with pytest.raises(
        ValueError,
        match=r"^`nodes` \(=\(\(0, 1\), \(2,\)\)\) must have the same number of ranks on every node",
    ):
        topology.partition("across")


def test_a_node_size_that_does_not_divide_is_refused():
    with pytest.raises(
        ValueError, match=r"^`ranks_per_node` \(=8\) must divide `world_size` \(=12\), because "
    ):
        validate_ranks_per_node(world_size=12, ranks_per_node=8)


@pytest.mark.parametrize("ranks_per_node", [0, -1, 2.0, "2", True])
def test_a_node_size_that_is_no_count_is_refused(ranks_per_node):
    with pytest.raises(ValueError, match=r"^`ranks_per_node` \(=.*must be an integer"):
        Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=ranks_per_node)


NO_PARTITION = r"^`nodes` .*exactly once"
OUT_OF_ORDER = r"^`nodes` .*ascending"


@pytest.mark.parametrize(
    ("rank", "nodes", "message"),
    [
        *(
            (0, nodes, NO_PARTITION)
            for nodes in [(), ((),), ((0,), ()), ((0, 1), (1, 2)), ((1, 2),), ((0, 2),)]
        ),
        *((0, nodes, OUT_OF_ORDER) for nodes in [((1, 0),), ((1,), (0,))]),
        *((rank, ((0, 1),), rf"^`rank` \(={rank}\)") for rank in (-1, 2)),
    ],
)
def test_what_is_no_topology_is_refused(rank, nodes, message):
    with pytest.raises(ValueError, match=message):
        Topology(rank=rank, nodes=nodes)
