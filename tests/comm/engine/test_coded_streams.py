"""The sum through the codec as CUDA carries it, on a CPU: its collectives over Gloo, and what is ordered after what."""

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan, HookState, average_bucket
from lightning_hybrid.comm.codec import codec as codecs
from lightning_hybrid.comm.codec.block_format import BLOCK
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.codec.torch_passes import TorchPasses
from tests.comm.engine.test_coded_sum import BITS, expected_sum, sums_of
from tests.comm.engine.test_cuda_streams import cuda, engine_of, fake_world, in_small_pieces  # noqa: F401  fixtures
from tests.comm.layouts import Bucket, engine_over, integers, reals
from tests.stand_in.recording_cuda import Cuda


def torch_passes(device, codec):
    """The kernels need a GPU; torch gives the same bits. The tensors of this CUDA are the CPU's."""
    return TorchPasses(codec.bits, codec.signs("cpu"))


def sums_by_streams(algorithm, nodes, bits, numels):
    with pytest.MonkeyPatch.context() as patch:
        Cuda().installed(patch)
        in_small_pieces(patch)
        patch.setattr(codecs, "_passes_for", torch_passes)
        engine = engine_of(algorithm, nodes, dtype_across=Codec(bits=bits, seed=3))
        found = sums_of(engine, [integers(dist.get_rank(), numel, torch.float32) for numel in numels])
        engine.close()
    return found


@pytest.mark.parametrize(
    ("algorithm", "nodes", "bits"),
    [
        ("two_level", ((0, 2), (1, 3)), 8),
        ("flat", ((0,), (1,), (2,), (3,)), 8),
        ("hierarchical", ((0, 1), (2,), (3,)), 4),
    ],
)
def test_collectives_of_the_backend_give_the_same_bits_as_messages_of_our_own(four_ranks, algorithm, nodes, bits):
    """Shards there are padded to equal size, and parts have rows of equal size: what is unused changes nothing."""
    numels = [3, 70_001, 300_000]
    addends = [[sum(integers(rank, numel, torch.float32) for rank in node) for node in nodes] for numel in numels]
    expected = [expected_sum(values, bits) for values in addends]
    for flats in four_ranks.run(sums_by_streams, algorithm, nodes, bits, numels):
        assert all(map(torch.equal, flats, expected))


@BITS
@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "two_level"])
def test_every_tensor_that_crosses_streams_is_ordered_and_kept(cuda, monkeypatch, algorithm, bits):  # noqa: F811
    monkeypatch.setattr(codecs, "_passes_for", torch_passes)
    engine = engine_of(algorithm, dtype_across=Codec(bits=bits))
    for _ in range(2):
        flats = [torch.zeros(numel).add_(1) for numel in (70_001, 5)]
        futures = [engine.submit(flat, bucket_index=index, is_last=index == 1) for index, flat in enumerate(flats)]
        for future in futures:
            future.wait().mul_(0.1)
    del flats, futures
    torch.zeros(1)  # an operation more: what was given back is seen
    assert cuda.found == []
    assert cuda.host_waits == []


def steps_with_feedback(engine, plans, *, divisors=(1.0, 0.5, 0.5, 4.0), skipped=(1,)):
    """Sums over several steps, of which some are skipped, with another loss scale and another plan in each."""
    parameters = [torch.zeros(numel) for numel in (3_001, 5)]
    state = HookState(engine=engine, parameters=parameters)
    state.feedback.may_skip = True
    found = []
    for step, divisor in enumerate(divisors):
        engine.adopt(plans[step % len(plans)])
        state.feedback.begin_step(torch.tensor(1024.0) / divisor)
        buffers = [reals(dist.get_rank() + 10 * step, one.numel(), torch.float32) / divisor for one in parameters]
        futures = [
            average_bucket(state, Bucket(index, buffer, parameters[index], is_last=index == 1))
            for index, buffer in enumerate(buffers)
        ]
        for future, buffer in zip(futures, buffers, strict=True):
            future.wait()
            found.append(buffer.mul(divisor))
        state.feedback.end_step(torch.tensor(step in skipped) & (buffers[0][0] == buffers[0][0]))
    num_blocks = state.blocks.num_blocks
    found.append(state.feedback.share(0, num_blocks, torch.device("cpu")))
    return found


PLANS = [CommPlan(algorithm=algorithm, chunk_bytes=2**12) for algorithm in ("two_level", "hierarchical")]


def feedback_on_rank(nodes, bits, on_streams):
    codec = Codec(bits=bits, seed=3, error_feedback=True)
    with pytest.MonkeyPatch.context() as patch:
        if on_streams:
            cuda = Cuda().installed(patch)
            patch.setattr(codecs, "_passes_for", torch_passes)
            engine = engine_of("two_level", nodes, dtype_across=codec)
        else:
            engine = engine_over(nodes, PLANS[0], dtype_across_nodes=codec)
        engine.prepare(PLANS)
        found = steps_with_feedback(engine, PLANS)
        assert not on_streams or (cuda.found, cuda.host_waits) == ([], [])
        engine.close()
    return found


def test_error_feedback_on_streams_gives_the_bits_of_threads_and_asks_the_device_nothing(four_ranks):
    nodes = ((0, 1), (2, 3))
    by_threads, by_streams = (four_ranks.run(feedback_on_rank, nodes, 4, on) for on in (False, True))
    for found, other in zip(by_threads, by_streams, strict=True):
        assert all(map(torch.equal, found, other))
        assert all(map(torch.equal, found[:-1], by_threads[0][:-1]))
    # Of each block one rank of the node holds the residual.
    first, second = (found[-1].view(-1, BLOCK).abs().amax(1) > 0 for found in by_threads[:2])
    assert bool((first ^ second).all())
