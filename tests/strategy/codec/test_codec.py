"""`Mean(dtype="int8")` and `"int4"` in whole fits: the same bits, resumed runs, skipped steps, errors."""

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
    """Blocks and their noise belong to a gradient: DDP's buckets in a resumed step change nothing."""
    small = CommPlan(
        bucket_bytes=512, chunk_bytes=256, num_parallel_groups=1, algorithm="flat", num_buckets=1
    )
    ranks = [
        fit(two_ranks, precision=precision, comm=Comm(plan=plan), **scene(codec))
        for plan in (None, small)
    ]
    first = ranks[0][0]
    assert all(same(first.parameters, other.parameters) for rank in ranks for other in rank)
    assert first.losses[-1] < first.losses[0] / 2


@pytest.mark.parametrize("codec", ["int8", pytest.param("int4", marks=pytest.mark.long)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks, codec):
    module = {
        "module": partial(Spoiled, batches=(3,), lr=0.05),
        "precision": "16-true",
        "max_epochs": 1,
    }
    for seen in fit(two_ranks, **scene(codec) | module):
        assert all(value.isfinite().all() for value in seen.parameters.values())
        assert (seen.num_skipped, seen.loss_scale) == (1, 2.0**15)


def test_what_rounding_costs_is_logged(four_ranks):
    """Of blocks with a few elements each, rotated: the error is some per cent of the gradient, and in 8 bits none."""
    settings = {
        "callbacks": [TrainingMetrics(skip_steps=0)],
        "log_every_n_steps": 1,
        "max_epochs": 1,
    }
    results = [
        fit(four_ranks, **scene(codec, **settings) | {"ranks_per_node": 2})[0].metrics
        for codec in ("int8", "int4")
    ]
    assert 1e-6 < results[0]["comm/quantisation_nmse"] < 1e-3
    assert 1e-3 < results[1]["comm/quantisation_nmse"] < 0.1
    assert results[0]["comm/link_bytes"] > results[1]["comm/link_bytes"]


def test_the_shared_update_goes_with_a_codec_to_the_bit(four_ranks):
    settings = scene("int8", precision="16-true", max_epochs=1) | {"ranks_per_node": 2}
    whole, shared = (fit(four_ranks, shard_update=each, **settings) for each in ("off", "node"))
    assert all(same(whole[0].parameters, seen.parameters) for seen in shared)


def buckets_held():
    gc.collect()
    return sum(isinstance(get_object, PaddedBucket) for get_object in gc.get_objects())


def more_buckets_after_a_fit():
    before = buckets_held()
    return fit(None, max_epochs=1, **scene("int8")).global_step, buckets_held() - before


def test_after_a_fit_nothing_holds_the_memory_of_its_buckets(two_ranks):
    """It is that of all gradients once more: a validation that follows may need it."""
    assert two_ranks.run(more_buckets_after_a_fit) == [(4, 0)] * 2


@pytest.mark.parametrize("algorithm", ["flat", "parallel_flat"])
def test_an_algorithm_without_a_sum_of_each_node_is_refused_before_training(four_ranks, algorithm):
    comm = Comm(plan=CommPlan(algorithm=algorithm))
    for seen in fit(four_ranks, raises=True, comm=comm, **scene("int8") | {"ranks_per_node": 2}):
        assert seen.error.startswith(
            f"ValueError: `algorithm` (='{algorithm}') has no stage between nodes, so it cannot be"
        )
        assert "and `comm.plan` out, or set comm=Comm(algorithm='hierarchical')." in seen.error
        assert not seen.losses


def error_of_ranks_with(values):
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
    for error, losses in two_ranks.run(error_of_ranks_with, values):
        assert error.startswith(
            "ValueError: the communication plan must be the same on all ranks: "
        )
        assert all(word in error for word in words)
        assert not losses


def test_plans_in_which_nodes_add_up_first_are_taken_and_auto_makes_one_on_cuda():
    even = Topology(rank=0, nodes=((0, 1), (2, 3)))
    uneven = Topology(rank=0, nodes=((0, 1), (2,)))
    lone = Topology(rank=0, nodes=((0,), (1,)))
    one = Topology(rank=0, nodes=((0, 1),))

    def chosen(algorithm, topology, on_cuda=False):
        return plan_for_codec(
            CommPlan(algorithm=algorithm), topology, bits=4, on_cuda=on_cuda
        ).algorithm

    assert [chosen("auto", each, on_cuda=True) for each in (even, uneven)] == [
        "two_level",
        "hierarchical",
    ]
    assert [chosen("auto", each, on_cuda=True) for each in (lone, one)] == ["auto", "auto"]
    assert [chosen("flat", each) for each in (lone, one)] == ["flat", "flat"]
    assert [chosen(each, even) for each in ("auto", "hierarchical", "two_level")] == [
        "auto",
        "hierarchical",
        "two_level",
    ]
    with pytest.raises(
        ValueError, match=r"^`algorithm` \(='two_level'\) needs nodes of equal size, and .*'int4'"
    ):
        chosen("two_level", uneven)
