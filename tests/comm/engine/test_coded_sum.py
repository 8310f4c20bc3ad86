"""All-reduce between nodes in 8 and 4 bits: equal bits on every rank under any transport, and the expected bytes."""

import warnings

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan, HookState, average_bucket
from lightning_hybrid.comm.codec import codec as codecs
from lightning_hybrid.comm.codec.block_format import BLOCK, OF_A_SUM
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.codec.philox import random_signs
from lightning_hybrid.comm.codec.torch_passes import TorchPasses
from tests.comm.engine.test_cuda_streams import cuda, engine_of, fake_world, in_small_pieces  # noqa: F401  fixtures
from tests.comm.layouts import (
    Bucket,
    engine_over,
    error_of_another_order,
    integers,
    is_even,
    layouts,
    name,
    reals,
)
from tests.scenes import same
from tests.stand_in.recording_cuda import Cuda

BITS = pytest.mark.parametrize("bits", [8, 4])
BLOCKS = 40
PLANS = {
    "flat": CommPlan(algorithm="flat"),
    "parallel_flat": CommPlan(algorithm="parallel_flat", chunk_bytes=8 * BLOCK),
    "hierarchical": CommPlan(algorithm="hierarchical", chunk_bytes=8 * BLOCK),
    "two_level": CommPlan(algorithm="two_level", chunk_bytes=8 * BLOCK, check_order=False),
}
LAYOUTS = [nodes for world_size in (2, 3, 4) for nodes in layouts(world_size) if len(nodes) > 1]


def sums_on_rank(nodes, plans, bits, make, numels, steps=(0,), dtype=torch.float32):
    results = []
    for plan in plans:
        engine = engine_over(nodes, plan, dtype_across_nodes=Codec(bits=bits, seed=3))
        for step in steps:
            engine.coder.begin_step(step)
            results += sums_of(engine, [make(dist.get_rank(), numel, dtype) for numel in numels])
        engine.close()
    return results


def sums_of(engine, flats):
    """All-reduce one bucket after the other."""
    sums = []
    for index, flat in enumerate(flats):
        is_last = index == len(flats) - 1
        sums.append(engine.submit(flat, bucket_index=index, is_last=is_last).wait())
    return sums


def encoded(values, bits, *, sender, step=0, turn=0):
    message = torch.empty(Codec(bits=bits).message_bytes(values.numel()), dtype=torch.uint8)
    ids = torch.arange(-(-values.numel() // BLOCK), dtype=torch.int32)
    passes_of(bits).encode(values, ids, (3, step, sender, turn), message, None)
    return message


def passes_of(bits):
    return TorchPasses(bits, random_signs(BLOCK, 3) / 16 if bits == 4 else None)


def expected_sum(node_sums, bits, **when):
    """Add the messages in rank order. With more than two messages, encode the sum once more."""
    total = torch.empty_like(node_sums[0])
    messages = [
        encoded(values, bits, sender=sender, **when) for sender, values in enumerate(node_sums)
    ]
    passes_of(bits).add(torch.stack(messages), total)
    if len(node_sums) > 2:
        passes_of(bits).add(encoded(total.clone(), bits, sender=OF_A_SUM, **when)[None], total)
    return total


@BITS
@pytest.mark.sampled(12)
@pytest.mark.parametrize("nodes", LAYOUTS, ids=name)
def test_every_rank_holds_the_bits_of_the_definition_under_every_plan(rank_pool, nodes, bits):
    """With integers the sums inside a node are exact, so algorithm, chunks and shards do not change the result."""
    world_size = sum(map(len, nodes))
    names = ["hierarchical", *(["two_level"] if is_even(nodes) else [])]
    names += ["flat", "parallel_flat"] if len(nodes) == world_size else []
    numels = [1, 300, BLOCKS * BLOCK + 17]
    per_rank = rank_pool.ranks(world_size).run(
        sums_on_rank, nodes, [PLANS[n] for n in names], bits, integers, numels
    )
    for results in per_rank:
        for index, numel in enumerate(numels * len(names)):
            addends = [sum(integers(rank, numel, torch.float32) for rank in node) for node in nodes]
            assert torch.equal(results[index], expected_sum(addends, bits))


@BITS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_summed_as_float32_and_rounded_once(two_ranks, dtype, bits):
    nodes = ((0,), (1,))
    ranks = two_ranks.run(sums_on_rank, nodes, [PLANS["flat"]], bits, integers, [5000], (0,), dtype)
    expected = expected_sum([integers(rank, 5000, torch.float32) for rank in range(2)], bits)
    for (result,) in ranks:
        assert result.dtype is dtype
        assert torch.equal(result, expected.to(dtype))


def test_noise_is_a_function_of_the_step_and_of_the_sum_in_it(two_ranks):
    nodes = ((0,), (1,))
    plans = [PLANS["flat"], PLANS["flat"]]
    rank_0, rank_1 = two_ranks.run(sums_on_rank, nodes, plans, 8, same_reals, [300], (4, 5, 5))
    assert all(map(torch.equal, rank_0, rank_1))
    assert all(map(torch.equal, rank_0[:3], rank_0[3:]))
    values = [same_reals(0, 300, torch.float32)] * 2
    assert torch.equal(rank_0[2], expected_sum(values, 8, step=5, turn=1))
    assert not torch.equal(rank_0[1], rank_0[2])


def same_reals(rank, numel, dtype):
    return reals(0, numel, dtype)


@BITS
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0,), (1,), (2,))], ids=name)
def test_the_checksum_of_the_order_is_exact(rank_pool, nodes, bits):
    """The checksum of the order is sent without the codec, which would change it.

    Next to gradients of 1e30, the ones of the checksum would be rounded to zeros, and a rotation would change its
    zeros.
    """
    ranks = rank_pool.ranks(sum(map(len, nodes)))
    ranks.run(sums_on_rank, nodes, [PLANS["hierarchical"]], bits, huge, [300, 5000], (0, 1))
    errors = ranks.run(another_order, nodes, bits)
    assert all("rank 2 submitted bucket 1 (40 x float32" in error for error in errors)


def huge(rank, numel, dtype):
    return 1e30 * reals(rank, numel, dtype)


def another_order(nodes, bits):
    return error_of_another_order(
        engine_over(nodes, PLANS["hierarchical"], dtype_across_nodes=Codec(bits=bits))
    )


def test_on_one_node_there_is_nothing_to_do_and_that_is_said_once(two_ranks):
    said = (
        "`between_nodes.dtype` (='int8') has no effect, because all ranks are on one node, where gradients "
        "are summed in their own dtype. Leave `between_nodes.dtype` out, or use several nodes."
    )
    for rank, (result, warned) in enumerate(two_ranks.run(sum_on_one_node)):
        assert torch.equal(result, sum(reals(rank, 300, torch.float32) for rank in range(2)))
        assert warned == ([] if rank else [said])


def sum_on_one_node():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_over(((0, 1),), CommPlan(), dtype_across_nodes=Codec(bits=8))
    (result,) = sums_of(engine, [reals(dist.get_rank(), 300, torch.float32)])
    engine.close()
    return result, [str(warning.message) for warning in caught]


def torch_passes(device, codec):
    """Return torch operations with the same bits as the GPU kernels, because this mock CUDA uses CPU tensors."""
    return TorchPasses(codec.bits, codec.signs("cpu"))


def sums_by_streams(algorithm, nodes, bits, numels):
    with pytest.MonkeyPatch.context() as patch:
        Cuda().installed(patch)
        in_small_pieces(patch)
        patch.setattr(codecs, "_passes_for", torch_passes)
        engine = engine_of(algorithm, nodes, dtype_across=Codec(bits=bits, seed=3))
        flats = [integers(dist.get_rank(), numel, torch.float32) for numel in numels]
        result = sums_of(engine, flats)
        engine.close()
    return result


@pytest.mark.parametrize(
    ("algorithm", "nodes", "bits"),
    [
        ("two_level", ((0, 2), (1, 3)), 8),
        ("flat", ((0,), (1,), (2,), (3,)), 8),
        ("hierarchical", ((0, 1), (2,), (3,)), 4),
    ],
)
def test_collectives_of_the_backend_give_the_same_bits_as_messages_of_our_own(
    four_ranks, algorithm, nodes, bits
):
    """The backend's collectives pad shards and rows to equal sizes, and the padding must not change the result."""
    numels = [3, 70_001, 300_000]
    expected = []
    for numel in numels:
        sums_of_nodes = []
        for node in nodes:
            sums_of_nodes.append(sum(integers(rank, numel, torch.float32) for rank in node))
        expected.append(expected_sum(sums_of_nodes, bits))
    for rank, flats in enumerate(four_ranks.run(sums_by_streams, algorithm, nodes, bits, numels)):
        assert same(flats, expected), f"rank {rank}"


@BITS
@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "two_level"])
def test_every_tensor_that_crosses_streams_is_ordered_and_kept(cuda, monkeypatch, algorithm, bits):  # noqa: F811
    monkeypatch.setattr(codecs, "_passes_for", torch_passes)
    engine = engine_of(algorithm, dtype_across=Codec(bits=bits))
    for _ in range(2):
        flats = [torch.zeros(numel).add_(1) for numel in (70_001, 5)]
        futures = [
            engine.submit(flat, bucket_index=index, is_last=index == 1)
            for index, flat in enumerate(flats)
        ]
        for future in futures:
            future.wait().mul_(0.1)
    del flats, futures
    torch.zeros(1)  # another operation detects memory that was freed too early
    assert cuda.violations == []
    assert cuda.host_waits == []


def steps_with_feedback(engine, *, divisors=(1.0, 0.5, 0.5, 4.0), skipped=(1,)):
    """All-reduce in several steps, with a different loss scale in each, of which some are skipped."""
    parameters = [torch.zeros(numel) for numel in (3_001, 5)]
    state = HookState(engine=engine, parameters=parameters)
    state.feedback.may_skip = True
    results = []
    for step, divisor in enumerate(divisors):
        state.feedback.begin_step(torch.tensor(1024.0) / divisor)
        buffers = [
            reals(dist.get_rank() + 10 * step, parameter.numel(), torch.float32) / divisor
            for parameter in parameters
        ]
        futures = [
            average_bucket(state, Bucket(index, buffer, parameters[index], is_last=index == 1))
            for index, buffer in enumerate(buffers)
        ]
        for future, buffer in zip(futures, buffers, strict=True):
            future.wait()
            results.append(buffer.mul(divisor))
        state.feedback.end_step(torch.tensor(step in skipped) & (buffers[0][0] == buffers[0][0]))
    num_blocks = state.blocks.num_blocks
    results.append(state.feedback.share(0, num_blocks, torch.device("cpu")))
    return results


def feedback_on_rank(algorithm, nodes, bits, on_streams):
    codec = Codec(bits=bits, seed=3, error_feedback=True)
    if not on_streams:
        plan = CommPlan(algorithm=algorithm, chunk_bytes=2**12)
        engine = engine_over(nodes, plan, dtype_across_nodes=codec)
        result = steps_with_feedback(engine)
        engine.close()
        return result
    with pytest.MonkeyPatch.context() as patch:
        cuda = Cuda().installed(patch)
        patch.setattr(codecs, "_passes_for", torch_passes)
        engine = engine_of(algorithm, nodes, dtype_across=codec)
        with cuda:
            result = steps_with_feedback(engine)
        engine.close()
        assert cuda.violations == []
        assert cuda.host_waits == []
    return result


@pytest.mark.parametrize("algorithm", ["two_level", "hierarchical"])
def test_error_feedback_on_streams_gives_the_bits_of_threads_and_asks_the_device_nothing(
    four_ranks, algorithm
):
    nodes = ((0, 1), (2, 3))
    by_threads = four_ranks.run(feedback_on_rank, algorithm, nodes, 4, False)
    by_streams = four_ranks.run(feedback_on_rank, algorithm, nodes, 4, True)
    sums_of_rank_0 = by_threads[0][:-1]
    residuals = []
    for rank, result in enumerate(by_threads):
        *sums, residual = result
        assert same(result, by_streams[rank]), f"rank {rank}"
        assert same(sums, sums_of_rank_0), f"rank {rank}"
        residuals.append(residual.view(-1, BLOCK))
    # For each block, one rank of the node holds the residual.
    is_on_rank_0 = residuals[0].abs().amax(1) > 0
    is_on_rank_1 = residuals[1].abs().amax(1) > 0
    assert bool((is_on_rank_0 ^ is_on_rank_1).all())
