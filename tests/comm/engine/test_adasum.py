"""Adasum between nodes: compared with the formula in float64, and its effect on buckets, checksums and bytes."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.adasum import combine as adasum
from lightning_hybrid.comm.adasum.combine import refuse_odd_nodes
from tests.comm.layouts import engine_over, integers, name, reals
from tests.reference.adasum import of_buckets
from tests.stand_in.fake_cuda import Launches
from tests.stand_in.recording_cuda import CUDA, Cuda
from tests.toy import error_of

PLAN = CommPlan(algorithm="hierarchical", chunk_bytes=2**50)
TWO_NODES = [((0,), (1,)), ((0, 1), (2, 3)), ((0, 2), (1, 3))]
FOUR_NODES = ((0,), (1,), (2,), (3,))
NODES = [*TWO_NODES, FOUR_NODES]
# Sizes that halving and quartering a bucket cuts, sizes that stay whole, and an empty one.
NUMELS = (3, 0, 1000, 1, 517, 70_000, 5)


def world_of(nodes):
    return sum(map(len, nodes))


def combine(nodes, buckets, *, like_cuda=False):
    """Combine buckets of (flat, numels), all in flight at once, and return the resulting values on this rank."""
    if not like_cuda:
        return combined_by(engine_over(nodes, PLAN), nodes, buckets)
    with pytest.MonkeyPatch.context() as patch:
        cuda = Cuda().installed(patch)
        patch.setattr(adasum, "_takes_segments", lambda flat: True)
        engine = engine_over(nodes, PLAN, device=CUDA)  # compares plans on the host
        with cuda:
            sums = combined_by(engine, nodes, buckets)
        assert cuda.violations == []
    return sums


def combined_by(engine, nodes, buckets):
    # The checksum shifts the position at which a bucket is halved.
    buckets = [*buckets, (torch.ones(8), (8,))]
    last = len(buckets) - 1
    futures = []
    for index, (flat, numels) in enumerate(buckets):
        future = engine.submit(
            flat, bucket_index=index, is_last=index == last, adasum_numels=numels
        )
        futures.append(future)
    *sums, ones = [future.wait().clone() for future in futures]
    assert torch.equal(ones, torch.full((8,), float(len(nodes[0]))))
    engine.close()
    return sums


def combine_reals(nodes, dtype, like_cuda=False):
    rank = dist.get_rank()
    buckets = [(reals(rank, sum(NUMELS), dtype), NUMELS) for _ in range(2)]
    return combine(nodes, buckets, like_cuda=like_cuda)


def largest_relative_error(bucket, expected):
    errors = []
    for part, expected_part in zip(bucket.double().split(NUMELS), expected, strict=True):
        if part.numel():
            errors.append(float((part - expected_part).norm() / expected_part.norm()))
    return max(errors)


def formula_in_float64(nodes, dtype):
    inputs = [reals(rank, sum(NUMELS), dtype) for rank in range(world_of(nodes))]
    return of_buckets(inputs, NUMELS, nodes)


# One rounding to the wire dtype of each node's sum and one per level give at most 4 u, partly random.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 4 * 2**-11)], ids=str
)
@pytest.mark.parametrize("nodes", NODES, ids=name)
def test_every_rank_holds_the_tree_of_the_formula_in_float64(rank_pool, nodes, dtype, bound):
    per_rank = rank_pool.ranks(world_of(nodes)).run(combine_reals, nodes, dtype)
    expected = formula_in_float64(nodes, dtype)
    first_bucket_of_rank_0 = per_rank[0][0]
    for rank, buckets in enumerate(per_rank):
        for bucket in buckets:
            assert torch.equal(bucket, first_bucket_of_rank_0), f"rank {rank}"
            assert largest_relative_error(bucket, expected) < bound, f"rank {rank}"


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="slices of a fake CUDA tensor need a build for CUDA"
)
def test_on_cuda_the_launches_of_a_level_do_not_grow_with_tensors(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(adasum, "_swap", lambda *args: None)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    counts = {}
    for num_nodes, num_tensors in ((2, 2), (2, 200), (8, 200)):
        monkeypatch.setattr(dist, "get_world_size", lambda group, num_nodes=num_nodes: num_nodes)
        with FakeTensorMode(), Launches() as launches:
            flat = torch.empty(1000 * num_tensors, dtype=torch.float16, device="cuda")
            del launches.names[:]
            adasum.adasum_(flat, [1000] * num_tensors, None, sum_=lambda table, group: None)
        counts[num_nodes, num_tensors] = len(launches.names)
    assert counts[2, 2] == counts[2, 200] <= 40
    assert counts[8, 200] <= 3 * counts[2, 200]


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), FOUR_NODES], ids=name)
def test_by_collectives_of_the_backend_as_on_cuda_it_is_the_same(four_ranks, nodes):
    expected = formula_in_float64(nodes, torch.float32)
    per_rank = four_ranks.run(combine_reals, nodes, torch.float32, True)
    for rank, buckets in enumerate(per_rank):
        for bucket in buckets:
            assert largest_relative_error(bucket, expected) < 1e-6, f"rank {rank}"


def combine_rows(nodes, rows, numels):
    return combine(nodes, [(row[dist.get_rank()].clone(), numels) for row in rows])


def rows_of(dtype):
    """Return (name, gradients of four nodes, combined gradient) of a parameter of 80 elements. All values are exact."""
    apart = torch.stack(
        [integers(rank, 80, dtype) * (torch.arange(80) % 4 == rank) for rank in range(4)]
    )
    grad = integers(7, 80, dtype)
    parallel = torch.stack([grad, 3 * grad, 3 * grad, grad])
    return [
        ("orthogonal: the sum", apart, apart.sum(0)),
        ("equal: the mean", grad.expand(4, -1).clone(), grad),
        ("parallel: the mean", parallel, 2 * grad),
        ("one alone: itself", torch.stack([0 * grad, 0 * grad, grad, 0 * grad]), grad),
        ("zero: zero", torch.zeros(4, 80, dtype=dtype), torch.zeros(80, dtype=dtype)),
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_orthogonal_gives_the_sum_and_parallel_the_mean_to_the_bit(four_ranks, dtype):
    cases = rows_of(dtype)
    inputs = [grads for _, grads, _ in cases]
    for rank, result in enumerate(four_ranks.run(combine_rows, FOUR_NODES, inputs, (80,))):
        for (case, _, expected), bucket in zip(cases, result, strict=True):
            assert torch.equal(bucket, expected), f"{case}, on rank {rank}"


def test_what_follows_the_parameters_is_summed(four_ranks):
    """The checksum of a step's order is summed over ranks and not combined."""
    rows = torch.stack([integers(rank, 128, torch.float16) for rank in range(4)])
    for nodes in (((0, 1), (2, 3)), FOUR_NODES):
        for rank, (bucket,) in enumerate(four_ranks.run(combine_rows, nodes, [rows], (50,))):
            assert torch.equal(bucket[50:], rows.sum(0)[50:]), f"rank {rank}"


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 64.0), (torch.float32, 2.0**83)], ids=str
)
def test_a_scale_passes_through_to_the_bit(four_ranks, dtype, scale):
    """A loss scale passes through exactly, as does a scale at which squares of gradients exceed float32."""
    rows = torch.stack([reals(rank, 300, dtype) for rank in range(4)])
    results = four_ranks.run(combine_rows, FOUR_NODES, [rows, rows * scale], (100, 200))
    for rank, (plain, scaled) in enumerate(results):
        assert torch.equal(scale * plain, scaled), f"rank {rank}"


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), FOUR_NODES], ids=name)
def test_what_overflowed_on_one_rank_is_not_finite_on_any(four_ranks, nodes, value):
    rows = torch.stack([integers(rank, 96, torch.float16) for rank in range(4)])
    bad = rows.clone()
    bad[3, 40] = value
    results = four_ranks.run(combine_rows, nodes, [bad, rows], (32, 32, 32))
    for rank, (result, plain) in enumerate(results):
        assert not result[32:64].isfinite().any(), f"rank {rank}"
        assert torch.equal(result[:32], plain[:32]), f"rank {rank}"
        assert torch.equal(result[64:], plain[64:]), f"rank {rank}"


def large_last_bucket():
    engine = engine_over(((0,), (1,)), PLAN)
    flat = torch.ones(1_200_000)
    engine.submit(flat, bucket_index=0, is_last=True, adasum_numels=(500_000, 700_000)).wait()
    engine.close()
    return flat.unique()


def test_a_large_last_bucket_is_not_cut_for_its_checksum(two_ranks):
    """Adasum would treat the part that is split off for the checksum as a separate tensor, or add it."""
    for rank, values in enumerate(two_ranks.run(large_last_bucket)):
        assert values.tolist() == [1.0], f"rank {rank}"


def with_other_steps(numels_of_rank_3):
    """Submit a bucket of two parameters, with other `adasum_numels` on rank 3."""
    engine = engine_over(FOUR_NODES, PLAN)
    numels = numels_of_rank_3 if dist.get_rank() == 3 else (40, 40)

    def submit_and_wait():
        future = engine.submit(torch.ones(80), bucket_index=0, is_last=True, adasum_numels=numels)
        future.wait()

    text = error_of(submit_and_wait)
    engine.close()
    return text


@pytest.mark.parametrize("numels_of_rank_3", [(), (80,)], ids=["mean", "other parameters"])
def test_a_rank_that_combines_otherwise_is_an_error_on_all(four_ranks, numels_of_rank_3):
    for rank, text in enumerate(four_ranks.run(with_other_steps, numels_of_rank_3)):
        assert "rank 3" in text, f"on rank {rank}: {text}"
        assert "Adasum of 2 tensors" in text, f"on rank {rank}: {text}"


@pytest.mark.parametrize("nodes", [((0,), (1,), (2,)), ((0, 1), (2,)), ((0, 1, 2), (3,))], ids=name)
def test_nodes_that_no_tree_fits_are_refused(nodes):
    with pytest.raises(
        ValueError, match=r"`between_nodes` \(=Adasum\(\)\) requires .* between_nodes=Mean\(\)"
    ):
        refuse_odd_nodes(Topology(rank=0, nodes=nodes))
