"""Defaults on CUDA: the backend's all-reduce in the buckets of DDP, unless a plan says otherwise."""

from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import _compute_bucket_assignment_by_size

from lightning_hybrid.comm.bucket_sizes import ddp_buckets
from lightning_hybrid.comm.engine.cuda_carrier import CudaCarrier
from lightning_hybrid.comm.engine.in_flight import InFlightBucket
from lightning_hybrid.comm.engine.job import Job
from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.comm.topology import Topology
from lightning_hybrid.planning.model.cost_nccl import Nccl
from lightning_hybrid.planning.model.plan_search import (
    CLEARLY_LESS_BY_HIERARCHY,
    FLAT_ON_CUDA,
    candidates,
    choose_plan,
)
from lightning_hybrid.planning.model.simulate import simulate
from lightning_hybrid.planning.model.workload import StepWorkload
from lightning_hybrid.strategy.comm_setup import CommSetup
from lightning_hybrid.strategy.fit_plan import bucket_caps_for_ddp
from lightning_hybrid.strategy.option_classes import Mean
from lightning_hybrid.strategy.strategy_options import StrategyOptions

pytest.importorskip("hydra", reason="the clusters are described in conf/")

from tests.checkout import tracked_in
from tests.evidence.planner.known_clusters import CLUSTERS, cluster_of, network

NUM_NODES = (1, 2, 16, 256)


@cache
def gradients():
    """Return the sizes of ResNet-50's gradients in the order in which they become ready."""
    numels = []
    for layer in reversed(network("resnet50")):
        numels += reversed(layer.numels)
    return tuple(numels)


def step_of(numels, cluster, plan=None, **options):
    """Simulate a step whose fp16 gradients are all ready at once."""
    work = StepWorkload(forward_s=0.0, gradients=tuple((numel, 0.0) for numel in numels))
    return simulate(work, cluster, plan or CommPlan(), itemsize=2, **options)


@pytest.mark.parametrize("name", ["hgx_h200", "dgx_h100", "dgx_a100", "cloud_100gbe", "p40_roce"])
def test_auto_costs_no_more_than_the_backends_own_sum_in_ddps_buckets(name):
    """The reference uses the buckets that torch builds for ResNet-50's gradients."""
    tensors = [torch.empty(numel, dtype=torch.float16, device="meta") for numel in gradients()]
    buckets, _ = _compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
    of_ddp = {"algorithm": "nccl", "cuts": [max(bucket) + 1 for bucket in buckets]}
    for num_nodes in NUM_NODES:
        cluster = cluster_of(name, num_nodes)
        ddp_s = step_of(gradients(), cluster, **of_ddp).step_s
        assert step_of(gradients(), cluster).step_s <= ddp_s, f"{num_nodes} nodes"


@pytest.mark.long
def test_a_hierarchy_is_chosen_where_it_clearly_wins():
    def best_of(cluster):
        work = StepWorkload(forward_s=0.0, gradients=tuple((numel, 0.0) for numel in gradients()))
        results = candidates(work, cluster, itemsize=2)
        flat = [result for result in results if result.plan.algorithm in FLAT_ON_CUDA]
        return results[0], min(result.step_s for result in flat)

    best, flat_s = best_of(cluster_of("cloud_100gbe", 4))
    assert best.plan.algorithm == "two_level"
    assert best.step_s <= (1 - CLEARLY_LESS_BY_HIERARCHY) * flat_s
    for num_nodes in NUM_NODES:
        cluster = cluster_of("dgx_h100", num_nodes)
        best, _ = best_of(cluster)
        assert best.plan.algorithm in FLAT_ON_CUDA
        assert best.step_s <= step_of(gradients(), cluster).step_s


def pieces_of(plan, numels, cluster):
    """Return algorithm and bytes of each piece that the engine puts on the streams."""
    sizes = [2 * numel for numel in numels]
    caps = plan.bucket_caps(sizes, num_nodes=cluster.num_nodes, on_cuda=True)
    world_size = cluster.num_nodes * cluster.ranks_per_node
    topology = Topology.from_ranks_per_node(
        rank=0, world_size=world_size, ranks_per_node=cluster.ranks_per_node
    )
    carrier = SimpleNamespace(_groups=SimpleNamespace(topology=topology))
    results = []
    for index, size in enumerate(caps):
        flat = torch.empty(size // 2, dtype=torch.float16, device="meta")
        planned = plan.bucket(
            index=index,
            numel=len(flat),
            dtype="float16",
            num_bytes=size,
            topology=topology,
            on_cuda=True,
        )
        bucket = InFlightBucket(flat=flat, plan=planned, finish=lambda flat: flat)
        CudaCarrier.accept(carrier, bucket, partial(Job, topology=topology), None)
        results += [(planned.algorithm, chunk.num_bytes) for chunk in bucket.chunks]
    return results


IN_PIECES = [
    CommPlan(algorithm="two_level"),
    CommPlan(algorithm="hierarchical"),
    CommPlan(algorithm="parallel_flat"),
    CommPlan(algorithm="two_level", bucket_bytes=64 * MIB, num_buckets=1),
    CommPlan(algorithm="two_level", bucket_bytes=1024 * MIB, num_buckets=1),
]


@pytest.mark.parametrize(
    "num_nodes",
    [
        2,
        pytest.param(4, marks=pytest.mark.long),
        pytest.param(16, marks=pytest.mark.long),
        pytest.param(256, marks=pytest.mark.long),
    ],
)
def test_what_the_planner_prices_is_what_the_engine_puts_on_the_streams(num_nodes):
    """Prices match for all GPU clusters in conf/, and a chosen plan is never slower than flat in these pieces."""
    numels = gradients()
    described = [cluster_of(path.stem, num_nodes) for path in tracked_in(CLUSTERS, "*.yaml")]
    clusters = [cluster for cluster in described if isinstance(cluster.transport, Nccl)]
    assert len(clusters) > 6
    if num_nodes == 2:
        clusters = clusters[::3]
    for cluster in clusters:
        flat = CommPlan(algorithm="flat")
        chosen = choose_plan(numels, cluster)
        for plan in [flat, chosen, *IN_PIECES]:
            priced = step_of(numels, cluster, plan).first.spans
            pieces = pieces_of(plan, numels, cluster)
            num_stages = sum(len(cluster.stages(*piece)) for piece in pieces)
            assert len(priced) == num_stages, (cluster, plan)
            assert len(pieces) <= 4 * len({span.chunk.bucket for span in priced})
        chosen_s = time_in_turn_s(cluster, pieces_of(chosen, numels, cluster))
        flat_s = time_in_turn_s(cluster, pieces_of(flat, numels, cluster))
        assert chosen_s <= 1.001 * flat_s, cluster


def time_in_turn_s(cluster, pieces):
    return sum(cluster.alone_s(algorithm, num_bytes) for algorithm, num_bytes in pieces)


def test_on_cuda_only_large_buckets_of_hierarchies_are_cut_and_into_four_at_most():
    topology = Topology.from_ranks_per_node(rank=0, world_size=16, ranks_per_node=8)
    for mib, num_chunks in ((0, 1), (25, 1), (32, 2), (63, 3), (64, 4), (1024, 4)):
        cut = CommPlan().num_chunks_for(mib * MIB, "two_level", topology, on_cuda=True)
        assert cut == num_chunks, f"{mib} MiB"
    coarse = CommPlan(chunk_bytes=512 * MIB)
    assert coarse.num_chunks_for(1024 * MIB, "two_level", topology, on_cuda=True) == 1
    assert CommPlan().num_chunks_for(1024 * MIB, "parallel_flat", topology, on_cuda=True) == 1


@settings(max_examples=50)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60), st.integers(1, 5000))
def test_ddps_buckets_are_those_that_torch_makes(kib, cap_kib):
    tensors = [torch.empty(512 * size, dtype=torch.float16, device="meta") for size in kib]
    limits = [min(MIB, 1024 * cap_kib), 1024 * cap_kib]
    buckets, _ = _compute_bucket_assignment_by_size(tensors, limits)
    sizes = [1024 * size for size in kib]
    sizes_of_torch = [sum(sizes[index] for index in bucket) for bucket in buckets]
    assert ddp_buckets(sizes, 1024 * cap_kib) == sizes_of_torch


@pytest.mark.parametrize(
    ("device", "algorithm", "shares_update", "across_nodes", "is_said"),
    [
        ("cuda", "auto", False, None, False),
        ("cuda", "two_level", False, None, True),
        ("cuda", "auto", True, None, True),
        ("cuda", "auto", False, torch.float16, True),
        ("cpu", "two_level", True, torch.float16, False),
    ],
)
def test_what_was_asked_for_by_name_on_cuda_says_at_start_that_no_gpu_has_shown_it(
    device, algorithm, shares_update, across_nodes, is_said
):
    topology = Topology.from_ranks_per_node(rank=0, world_size=16, ranks_per_node=8)
    if across_nodes is None:
        between_nodes = Mean()
    else:
        between_nodes = Mean(dtype="float16")
    setup = CommSetup(StrategyOptions.parse({}, argument_names=(), between_nodes=between_nodes))
    setup.device = torch.device(device)
    setup.topology = topology
    setup.engine_options = {"shares_update": shares_update}
    setup.note_plan(CommPlan(algorithm=algorithm))
    assert ("not yet measured on a GPU" in setup.communication_plan) is is_said


@pytest.mark.parametrize(
    ("plan", "limits"),
    [
        (CommPlan(), [1.0, 25.0]),
        (CommPlan(bucket_bytes=MIB // 2), [0.5, 0.5]),
        # Requested by a user or a planner.
        (CommPlan(bucket_bytes=8 * MIB, num_buckets=1), [8.0, 8.0, 1.0]),
    ],
)
def test_on_cuda_ddp_gets_its_own_sizes_unless_others_are_asked_for(plan, limits):
    """DDP gets its own sizes for 17 parameters of 1 MiB. On the CPU it gets one size per bucket."""
    assert sizes_for_ddp(plan, is_cuda=True) == limits
    if plan.num_buckets is not None:
        assert sizes_for_ddp(plan, is_cuda=False) == limits


def test_a_planner_may_put_all_gradients_into_one_bucket_that_is_larger_than_the_default():
    limits = {"bucket_bytes": 64 * MIB, "last_bucket_bytes": 64 * MIB, "num_buckets": 1}
    module = SimpleNamespace(parameters=lambda: [_half_parameter(is_cuda=False)] * 30)
    caps = bucket_caps_for_ddp(module, CommPlan(**limits), {"bucket_cap_mb": 25.0}, num_nodes=2)
    assert caps == {"bucket_cap_mb": 64.0}


def sizes_for_ddp(plan, *, is_cuda):
    module = SimpleNamespace(parameters=lambda: [_half_parameter(is_cuda=is_cuda)] * 17)
    return bucket_caps_for_ddp(module, plan, {}, num_nodes=2)["bucket_cap_mb_list"]


def _half_parameter(*, is_cuda):
    """Return the properties of a parameter of 1 MiB."""
    return SimpleNamespace(
        requires_grad=True,
        is_cuda=is_cuda,
        dtype=torch.float16,
        numel=lambda: MIB // 2,
        element_size=lambda: 2,
    )
