"""`Mean(dtype="int8")` and `"int4"` in whole fits: identical bits, resumed runs, skipped steps, errors."""

import gc
from functools import partial

import pytest
import torch.distributed as dist

from lightning_hybrid import Comm, LocalSteps, Mean
from lightning_hybrid.callbacks import TrainingMetrics
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.codec.coded_plan import plan_for_codec
from lightning_hybrid.comm.codec.padded_bucket import PaddedBucket
from tests import toy
from tests.scenes import Spoiled, fit, same

CASES = [("int8", "16-true"), ("int8", "32-true"), ("int4", "32-true"), ("int4", "16-true")]


LOW_RATE = partial(toy.Toy, lr=0.05)


def scene(codec, **settings):
    return {"module": LOW_RATE, "between_nodes": Mean(dtype=codec), "ranks_per_node": 1, **settings}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("codec", "precision"), CASES)
def test_no_bit_depends_on_rank_buckets_chunks_or_groups(two_ranks, codec, precision):
    """Blocks and their noise depend only on the gradient, so other buckets do not change the result."""
    small = CommPlan(
        bucket_bytes=512, chunk_bytes=256, num_parallel_groups=1, algorithm="flat", num_buckets=1
    )
    with_defaults = fit(two_ranks, precision=precision, **scene(codec))
    with_small_buckets = fit(two_ranks, precision=precision, comm=Comm(plan=small), **scene(codec))
    expected = with_defaults[0].parameters
    for seen in [*with_defaults, *with_small_buckets]:
        assert same(seen.parameters, expected), f"rank {seen.rank}"
    losses = with_defaults[0].losses
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("codec", ["int8", pytest.param("int4", marks=pytest.mark.long)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks, codec):
    settings = scene(codec, precision="16-true", max_epochs=1)
    settings["module"] = partial(Spoiled, batches=(3,), lr=0.05)
    for seen in fit(two_ranks, **settings):
        assert all(value.isfinite().all() for value in seen.parameters.values())
        assert (seen.num_skipped, seen.loss_scale) == (1, 2.0**15), f"rank {seen.rank}"


def test_the_error_of_rounding_is_logged(four_ranks):
    """In rotated blocks of a few elements, the error is a few per cent of the gradient in 4 bits and tiny in 8 bits."""
    settings = {
        "callbacks": [TrainingMetrics(skip_steps=0)],
        "log_every_n_steps": 1,
        "max_epochs": 1,
        "ranks_per_node": 2,
    }
    int8 = fit(four_ranks, **scene("int8", **settings))[0].metrics
    int4 = fit(four_ranks, **scene("int4", **settings))[0].metrics
    assert 1e-6 < int8["comm/quantization_nmse"] < 1e-3
    assert 1e-3 < int4["comm/quantization_nmse"] < 0.1
    assert int8["comm/link_bytes"] > int4["comm/link_bytes"]


def test_a_shared_update_with_a_codec_has_the_bits_of_a_whole_one(four_ranks):
    settings = scene("int8", precision="16-true", max_epochs=1, ranks_per_node=2)
    whole = fit(four_ranks, shard_update="off", **settings)
    for seen in fit(four_ranks, shard_update="node", **settings):
        assert same(seen.parameters, whole[0].parameters), f"rank {seen.rank}"


def num_buckets_in_memory():
    gc.collect()
    return sum(isinstance(item, PaddedBucket) for item in gc.get_objects())


def fit_and_count_buckets():
    """Return the number of steps of a fit, and the number of buckets left in memory after it."""
    before = num_buckets_in_memory()
    num_steps = fit(None, max_epochs=1, **scene("int8")).global_step
    return num_steps, num_buckets_in_memory() - before


def test_after_a_fit_nothing_holds_the_memory_of_its_buckets(two_ranks):
    """A fit frees its buckets, which are as large as all gradients, because a later validation may need the memory."""
    assert two_ranks.run(fit_and_count_buckets) == [(4, 0)] * 2


@pytest.mark.parametrize("algorithm", ["flat", "parallel_flat"])
def test_an_algorithm_without_a_sum_of_each_node_is_refused_before_training(four_ranks, algorithm):
    comm = Comm(plan=CommPlan(algorithm=algorithm))
    beginning = (
        f"ValueError: `algorithm` (='{algorithm}') has no stage between nodes, so it cannot be"
    )
    advice = "and `comm.plan` out, or set comm=Comm(algorithm='hierarchical')."
    for seen in fit(four_ranks, raises=True, comm=comm, **scene("int8", ranks_per_node=2)):
        assert seen.error.startswith(beginning), f"rank {seen.rank}"
        assert advice in seen.error, f"rank {seen.rank}"
        assert not seen.losses, f"rank {seen.rank}"


def error_with_values_of_ranks(values):
    seen = fit(None, raises=True, between_nodes=values[dist.get_rank()], ranks_per_node=1)
    return seen.error, seen.losses


FEEDBACK = Mean(dtype="int4", error_feedback=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((Mean(dtype="int8"), Mean(dtype="int4")), ["`dtype_across_nodes`"]),
        ((Mean(dtype="int4"), Mean()), ["`dtype_across_nodes`"]),
        (
            (FEEDBACK, Mean(dtype="int4")),
            [str(Codec(bits=4, error_feedback=True)), str(Codec(bits=4))],
        ),
        ((LocalSteps(every=3), LocalSteps(every=2)), ["`between_nodes` is Loc"]),
    ],
    ids=["codecs", "codec and none", "feedback", "periods"],
)
def test_ranks_with_other_settings_are_named_on_all_before_training(two_ranks, values, words):
    beginning = "ValueError: The communication plan must be the same on all ranks: "
    results = two_ranks.run(error_with_values_of_ranks, values)
    for rank, (error, losses) in enumerate(results):
        assert error.startswith(beginning), f"rank {rank}"
        for word in words:
            assert word in error, f"rank {rank}"
        assert not losses, f"rank {rank}"


EQUAL_NODES = Topology(rank=0, nodes=((0, 1), (2, 3)))
UNEQUAL_NODES = Topology(rank=0, nodes=((0, 1), (2,)))
ONE_RANK_PER_NODE = Topology(rank=0, nodes=((0,), (1,)))
ONE_NODE = Topology(rank=0, nodes=((0, 1),))


def algorithm_with_codec(algorithm, topology, on_cuda=False):
    plan = CommPlan(algorithm=algorithm)
    return plan_for_codec(plan, topology, bits=4, on_cuda=on_cuda).algorithm


def test_on_cuda_auto_becomes_an_algorithm_with_a_sum_of_each_node():
    assert algorithm_with_codec("auto", EQUAL_NODES, on_cuda=True) == "two_level"
    assert algorithm_with_codec("auto", UNEQUAL_NODES, on_cuda=True) == "hierarchical"


@pytest.mark.parametrize("topology", [ONE_RANK_PER_NODE, ONE_NODE], ids=["lone ranks", "one node"])
def test_nodes_that_have_nothing_to_sum_keep_every_algorithm(topology):
    assert algorithm_with_codec("auto", topology, on_cuda=True) == "auto"
    assert algorithm_with_codec("flat", topology) == "flat"


@pytest.mark.parametrize("algorithm", ["auto", "hierarchical", "two_level"])
def test_an_algorithm_with_a_sum_of_each_node_is_kept(algorithm):
    assert algorithm_with_codec(algorithm, EQUAL_NODES) == algorithm


def test_two_level_on_nodes_of_unequal_size_is_refused_with_the_codec_in_the_message():
    message = (
        r"^`algorithm` \(='two_level'\) requires the same number of ranks on every node, .*'int4'"
    )
    with pytest.raises(ValueError, match=message):
        algorithm_with_codec("two_level", UNEQUAL_NODES)
