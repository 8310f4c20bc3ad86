from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.engine import gloo_p2p
from lightning_hybrid.comm.engine.node_exchange import collect_
from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.engine.stages import STAGES, stage_scopes
from lightning_hybrid.comm.message_pattern import SCATTER_BYTES
from lightning_hybrid.comm.topology import Topology
from tests.comm.layouts import (
    engine_over,
    integers,
    is_even,
    layouts,
    name,
    reals,
    sum_,
    sum_of_integers,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NUMELS = [0, 1, 2, 3, 5, 4096, 10007]
CASES = [
    pytest.param(world_size, algorithm, nodes, id=f"{algorithm}-{name(nodes)}")
    for world_size in (1, 2, 3, 4)
    for algorithm in STAGES
    for nodes in layouts(world_size)
    if algorithm != "two_level" or is_even(nodes)
]


@contextmanager
def groups_of(nodes, algorithm):
    topology = Topology(rank=dist.get_rank(), nodes=nodes)
    groups = CommGroups(topology=topology, timeout=timedelta(seconds=20))
    groups.add(stage_scopes({algorithm: 1}))
    try:
        yield groups
    finally:
        dist.barrier()
        groups.destroy()


def sums_on_rank(nodes, algorithm, make, cases):
    results = []
    with groups_of(nodes, algorithm) as groups:
        for numel, dtype in cases:
            flat = make(dist.get_rank(), numel, dtype)
            where = flat.data_ptr()
            assert sum_(flat, groups, algorithm) is flat
            assert flat.data_ptr() == where
            results.append(flat)
    return results


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("world_size", "algorithm", "nodes"), CASES)
def test_every_sum_is_the_sum_bit_for_bit_on_every_rank(rank_pool, world_size, algorithm, nodes):
    cases = [(numel, dtype) for numel in NUMELS for dtype in DTYPES]
    per_rank = rank_pool.ranks(world_size).run(sums_on_rank, nodes, algorithm, integers, cases)
    for index, (numel, dtype) in enumerate(cases):
        expected = sum_of_integers(world_size, numel, dtype)
        for rank, results in enumerate(per_rank):
            assert results[index].dtype == dtype, f"rank {rank}"
            assert torch.equal(results[index], expected), f"{numel} of {dtype}, rank {rank}"


def num_roundings(algorithm, nodes, num_bytes):
    """Return the number of roundings of an element in 16 bits: one in fp32, or one per hop in Gloo's ring."""
    num_nodes = len(nodes)
    is_ring = num_bytes > SCATTER_BYTES and len(nodes) > 2
    if algorithm == "flat" or (algorithm == "parallel_flat" and (num_nodes < 4 or is_ring)):
        return 3
    if num_nodes == 4:
        if is_ring:
            return 3
        return 1
    return 1 if num_nodes == 1 else 2  # in the node, and between two nodes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("numel", [5003, 90_001])
@pytest.mark.parametrize("algorithm", STAGES)
@pytest.mark.parametrize(
    "nodes", [((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,))], ids=name
)
def test_the_error_against_float64_is_that_of_the_roundings_stated(
    four_ranks, algorithm, nodes, numel
):
    """|error| <= gamma_n * sum |x| with gamma_n = n u / (1 - n u). Every algorithm rounds fp32 three times.

    16-bit sums that are rounded once have the smallest possible error.
    """
    cases = [(numel, torch.float16), (numel, torch.bfloat16), (numel, torch.float32)]
    per_rank = four_ranks.run(sums_on_rank, nodes, algorithm, reals, cases)
    for index, (_, dtype) in enumerate(cases):
        addends = torch.stack([reals(rank, numel, dtype).double() for rank in range(4)])
        if dtype is torch.float32:
            count = 3
        else:
            count = num_roundings(algorithm, nodes, numel * dtype.itemsize)
        unit_roundoff = torch.finfo(dtype).eps / 2
        bound = (gamma(count, unit_roundoff) + 2 * gamma(3, 2**-24)) * addends.abs().sum(0)
        sum_on_rank_0 = per_rank[0][index]
        for rank, results in enumerate(per_rank):
            assert torch.equal(results[index], sum_on_rank_0), f"{dtype}, rank {rank}"
        assert ((sum_on_rank_0.double() - addends.sum(0)).abs() <= bound).all(), dtype
        if count == 1:
            assert torch.equal(sum_on_rank_0, addends.float().sum(0).to(dtype)), dtype


@pytest.mark.parametrize("flat", [torch.zeros(2, 2), torch.zeros(4)[::2]])
def test_a_tensor_that_is_not_flat_is_refused(flat):
    engine = engine_over(((0,),), CommPlan())
    with pytest.raises(ValueError, match=r"^`flat` .* must be one-dimensional and contiguous"):
        engine.submit(flat, bucket_index=0)
    engine.close()


def test_stage_names_are_unique():
    names = []
    for stages in STAGES.values():
        names += [stage.name for stage in stages]
    assert len(set(names)) == len(names)


def sum_in_halves_across(nodes, algorithm, numel):
    engine = engine_over(nodes, CommPlan(algorithm=algorithm), dtype_across_nodes=torch.float16)
    flat = reals(dist.get_rank(), numel, torch.float32)
    total = engine.submit(flat, bucket_index=0, is_last=True).wait()
    engine.close()
    return total


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algorithm", STAGES)
@pytest.mark.parametrize(
    "nodes", [((0, 2), (1, 3)), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))], ids=name
)
def test_halves_across_nodes_cost_the_roundings_between_nodes_and_no_more(
    four_ranks, algorithm, nodes
):
    """N node sums are rounded once each, and N - 1 times as they are added: gamma_N of fp16, and gamma_4 of fp32.

    For ``flat``, every rank's tensor counts as a node sum. On one node, everything is in single precision.
    """
    addends = torch.stack([reals(rank, 5003, torch.float32).double() for rank in range(4)])
    if algorithm in ("hierarchical", "two_level"):
        num_addends = len(nodes)
    else:
        num_addends = 4
    if len(nodes) == 1:
        num_addends = 0
    relative = gamma(num_addends, 2**-11) + 2 * gamma(4, 2**-24)
    bound = relative * addends.abs().sum(0) + num_addends * 2**-25
    results = four_ranks.run(sum_in_halves_across, nodes, algorithm, 5003)
    error = (results[0].double() - addends.sum(0)).abs()
    for rank, result in enumerate(results):
        assert torch.equal(result, results[0]), f"rank {rank}"
    assert (error <= bound).all()
    assert error.max() > 1e-4 or len(nodes) == 1  # the narrow wire dtype was used


def gamma(count, unit_roundoff):
    return count * unit_roundoff / (1 - count * unit_roundoff)


COLLECTIVES = (
    "reduce_to_first_",
    "broadcast_",
    "scatter_reduce_",
    "gather_parts_",
    "collect_parts_",
    "exchange_",
)


def sent_as_it_was(name):
    """Return whether each sent tensor is unchanged when its send is waited for. None: no one waited for the send."""
    results = []

    class Send:
        def __init__(self, tensor, rank, group):
            self.tensor = tensor
            self.before = tensor.clone()
            self.index = len(results)
            self.work = group.send([self.before], rank, 0)
            results.append(None)

        def wait(self):
            results[self.index] = torch.equal(self.tensor, self.before)
            self.work.wait()

    def send(links, tensor, receiver):
        return Send(tensor, receiver, links._group)

    with patch.object(gloo_p2p._Links, "send", send):
        flat = integers(dist.get_rank(), 100, torch.float32)
        if name == "collect_parts_":
            flat = flat.tensor_split(dist.get_world_size())
        getattr(gloo_p2p, name)(flat, dist.group.WORLD)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_send_is_through_before_its_memory_changes_or_goes_back_to_the_caller(
    rank_pool, name, world_size
):
    results = rank_pool.ranks(world_size).run(sent_as_it_was, name)
    assert any(results)
    for rank, are_unchanged in enumerate(results):
        assert all(are_unchanged), f"rank {rank}"


def facts_of_groups():
    """Return members, timeouts and number of the stages' groups over nodes (0, 1) and (2, 3), and of leaked groups."""
    before = len(dist.distributed_c10d._world.pg_map)
    topology = Topology.from_ranks_per_node(rank=dist.get_rank(), world_size=4, ranks_per_node=2)
    results = []
    for share in (False, True):
        groups = CommGroups(topology=topology, timeout=timedelta(seconds=3), share=share)
        groups.add({"a": "node", "b": "node", "c": "leaders", "d": "world"})
        members = {}
        timeouts = set()
        ids = set()
        for stage, group in groups.by_stage.items():
            if group is not None:
                members[stage] = dist.get_process_group_ranks(group)
                timeouts.add(group._get_backend(torch.device("cpu")).options._timeout)
                ids.add(id(group))
        results.append((members, timeouts, len(ids)))
        groups.destroy()
        groups.destroy()
    return *results, len(dist.distributed_c10d._world.pg_map) - before


def test_every_stage_has_its_own_group_with_the_users_timeout(four_ranks):
    for rank, (separate, shared, num_left) in enumerate(four_ranks.run(facts_of_groups)):
        node = [0, 1] if rank < 2 else [2, 3]
        expected = {"a": node, "b": node, "d": [0, 1, 2, 3]}
        if rank in (0, 2):
            expected["c"] = [0, 2]  # the leaders
        assert separate == (expected, {timedelta(seconds=3)}, len(expected)), f"rank {rank}"
        members, _, num_groups = shared
        assert members == expected, f"rank {rank}"
        assert num_groups == len(expected) - 1, f"rank {rank}: `a` and `b` share one"
        assert num_left == 0, f"rank {rank}"


def destroy_after_the_default_group():
    topology = Topology.from_ranks_per_node(rank=dist.get_rank(), world_size=2, ranks_per_node=2)
    groups = CommGroups(topology=topology, timeout=timedelta(seconds=3))
    groups.add({"a": "world"})
    dist.destroy_process_group()
    groups.destroy()


def test_groups_may_be_destroyed_after_the_default_group(two_ranks):
    two_ranks.run(destroy_after_the_default_group)


def collected_by_backend():
    """Collect two shards in a group whose ranks do not begin at 0, as in the second set of a pipeline."""
    members = [1, 2]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    rank = dist.get_rank(group)
    topology = Topology.from_ranks_per_node(rank=rank, world_size=2, ranks_per_node=2)
    flat = torch.zeros(4)
    flat.chunk(2)[rank].fill_(rank + 1.0)
    collect_(SimpleNamespace(flat=flat, topology=topology, by_backend=True), group)
    return flat.tolist()


def test_shards_are_collected_in_a_group_that_does_not_contain_rank_zero(rank_pool):
    _, first, _ = rank_pool.ranks(3).run(collected_by_backend)
    assert first == [1.0, 1.0, 2.0, 2.0]
