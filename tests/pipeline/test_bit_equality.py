"""Bitwise equality of pipelines and accumulation: weights, BatchNorm statistics and counts, optimizer state."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from lightning_hybrid import Comm
from lightning_hybrid.callbacks import ReplicaCheck
from lightning_hybrid.optim import LAMB, LARS
from tests import toy
from tests.pipeline.cases import accumulated, in_stages, joined
from tests.scenes import at, fit, same


def assert_same(piped, expected):
    for seen in piped:
        assert same(seen.weights, expected.weights), f"rank {seen.rank}"
        assert seen.num_skipped == expected.num_skipped, f"rank {seen.rank}"
    assert same(joined(piped), expected.states[0])


def assert_equal(ranks, plain, module=toy.Toy, *, options=None, **scene):
    """Assert that a fit in stages ends like a fit with accumulation, and return the latter."""
    expected = fit(plain, module, **accumulated(**scene))[0]
    piped = fit(ranks, module, **in_stages(**scene, **options or {}))
    assert_same(piped, expected)
    return expected


class WithLars(toy.Toy):
    optimizer = LARS
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "trust_coefficient": 0.02}

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WithLamb(WithLars):
    optimizer = LAMB
    options = {"lr": 0.01, "weight_decay": 0.01}


class Overflows(toy.Toy):
    """Module whose gradients overflow in one step, in the layer `index` and all layers before it."""

    def __init__(self, index):
        super().__init__()
        self.net[index].register_full_backward_pre_hook(self.to_inf)
        self.num_calls = 0

    def to_inf(self, module, gradients):
        self.num_calls += 1
        if self.num_calls == 6:
            return tuple(gradient * float("inf") for gradient in gradients)
        return gradients


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_stages_train_as_accumulation(one_rank, two_ranks, schedule):
    assert_equal(two_ranks, one_rank, options={"schedule": schedule})


def test_four_stages_in_fp16_with_lars_and_a_schedule_train_as_accumulation(one_rank, four_ranks):
    assert_equal(four_ranks, one_rank, WithLars, options={"num_stages": 4}, precision="16-true")


def test_interleaved_stages_in_bf16_with_lamb_and_activation_checkpoints_train_as_accumulation(
    one_rank, two_ranks
):
    options = {"schedule": "interleaved", "checkpoint_activations": True}
    assert_equal(two_ranks, one_rank, WithLamb, options=options, precision="bf16-true")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("module", "precision"), [(WithLamb, "16-true"), (WithLars, "32-true")])
def test_a_schedule_with_a_separate_backward_of_weights_trains_as_accumulation(
    one_rank, two_ranks, module, precision
):
    assert_equal(
        two_ranks, one_rank, module, options={"schedule": "zero_bubble"}, precision=precision
    )


def weights_and_gradients(trainer, module, *_):
    """Return weights and gradients of this rank's stages."""
    return {
        name: (parameter.detach().clone(), parameter.grad.clone())
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
    }


@pytest.mark.parametrize("schedule", ["interleaved", "1f1b"])
def test_hooks_see_fp32_weights_and_unscaled_fp32_gradients_of_the_whole_batch(
    one_rank, two_ranks, schedule
):
    look = weights_and_gradients
    hooks = [at(on_after_backward=look, on_before_optimizer_step=look)]
    scene = {"precision": "16-true", "callbacks": hooks, "max_epochs": 1}
    (plain,) = fit(one_rank, **accumulated(**scene))
    rank_0, rank_1 = fit(two_ranks, **in_stages(schedule=schedule, **scene))
    expected = {
        "on_after_backward": plain.looks["on_after_backward"][3::4],  # of the last micro-batch
        "on_before_optimizer_step": plain.looks["on_before_optimizer_step"],
    }
    for hook, expected_looks in expected.items():
        pairs = zip(rank_0.looks[hook], rank_1.looks[hook], strict=True)
        looks = [of_rank_0 | of_rank_1 for of_rank_0, of_rank_1 in pairs]
        assert len(looks) == 8, hook
        assert same(looks, expected_looks), hook
        dtypes = {tensor.dtype for pair in looks[0].values() for tensor in pair}
        assert dtypes == {torch.float32}, hook


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("index", [5, 1, 8], ids=["in the middle", "in the first", "in the last"])
def test_overflow_in_one_stage_skips_the_step_of_all(one_rank, four_ranks, index):
    module = partial(Overflows, index)
    options = {"num_stages": 4}
    seen = assert_equal(four_ranks, one_rank, module, options=options, precision="16-true")
    assert seen.num_skipped == 1


def test_data_ranks_average_and_clipping_by_norm_counts_all_stages(two_ranks, four_ranks):
    assert_equal(four_ranks, two_ranks, precision="16-true", gradient_clip_val=0.3)


class Wide(Overflows, WithLars):
    """Module whose stages have tensors of several blocks, so that data ranks can shard their update."""

    options = WithLars.options | {"fused": True}

    def __init__(self, is_to_overflow=False):
        super().__init__(0)
        self.is_to_overflow = is_to_overflow
        ends = (toy.NUM_FEATURES, 1500)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [
                nn.Linear(*ends),
                nn.LayerNorm(1500),
                nn.Tanh(),
                nn.Linear(*ends[::-1]),
                nn.Tanh(),
            ]
            self.net = nn.Sequential(*layers, nn.Linear(*ends), nn.Linear(*ends[::-1]))
        self.net[0].register_full_backward_pre_hook(self.to_inf)  # only in the first stage

    def to_inf(self, module, gradients):
        is_second = self.trainer.fit_loop.total_batch_idx == 1  # also in a resumed run
        if is_second and self.is_to_overflow:
            return tuple(gradient * float("inf") for gradient in gradients)
        return gradients


class WideTied(Wide):
    """Module with a weight in both stages, of which the data ranks of each stage have different shards."""

    optimizer = LAMB
    options = WithLamb.options | {"fused": True}

    def __init__(self):
        super().__init__()
        self.net[6].weight = self.net[3].weight


NODE = {"shard_update": "node"}
WORLD = {"shard_update": "world", "ranks_per_node": 2}
SHARED = {
    "overflow": (partial(Wide, True), "16-true", NODE),
    "clipped": (Wide, "32-true", NODE | {"gradient_clip_val": 0.01}),
    "tied": (
        WideTied,
        "bf16-true",
        NODE | {"comm": Comm(algorithm="two_level", bucket_bytes=1 << 14)},
    ),
    "world": (Wide, "16-true", WORLD | {"gradient_clip_val": 0.01, "schedule": "interleaved"}),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", SHARED)
def test_data_ranks_share_the_update_of_their_stage(four_ranks, tmp_path, case):
    """A sharded update gives the same bits in memory and in files. A run resumes with and without it."""
    module, precision, shared = SHARED[case]
    whole = {**shared, "shard_update": "off"}

    def fit_and_load(name, options, **scene):
        """Fit two pipelines. Return the results of their ranks, and the content of the saved file."""
        scene |= {"precision": precision, "save_to": str(tmp_path / name), **options}
        scene["callbacks"] = [partial(ReplicaCheck, 1)]
        results = fit(four_ranks, module, **in_stages(**scene))
        has_whole_states = same(joined(results[:2]), joined(results[2:]))
        assert has_whole_states == (options is whole), "the second pipeline has parts of the state"
        saved = torch.load(tmp_path / name, weights_only=True)
        return results, [saved["state_dict"], saved["optimizer_states"]]

    expected, expected_file = fit_and_load("whole", whole)
    weights = [seen.weights for seen in expected]
    assert expected[0].num_skipped == (case == "overflow")

    results, file = fit_and_load("shared", shared)
    assert same([seen.weights for seen in results], weights)
    assert same(joined(results[:2]), joined(expected[:2]))
    assert results[0].num_skipped == expected[0].num_skipped
    assert same(file, expected_file)

    fit_and_load("half", shared, max_epochs=1)
    for options in (shared, whole):
        resumed, file = fit_and_load("resumed", options, ckpt_path=str(tmp_path / "half"))
        assert same([seen.weights for seen in resumed], weights)
        assert same(file, expected_file)


# Numbers of stages, of data ranks, and of micro-batches.
LAYOUTS = {
    "2 stages": (2, 1, (2, 3, 8)),
    "2 stages x 2 data ranks": (2, 2, (2, 4)),
    "4 stages": (4, 1, (4, 8)),
}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true", "64-true"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_schedule_trains_as_accumulation(rank_pool, layout, precision):
    num_stages, num_data_ranks, counts = LAYOUTS[layout]
    scene = {
        "data": toy.Blobs(96),
        "batch_size": 24,
        "precision": precision,
        "max_epochs": 1,
        "timeout_s": 300,
    }
    expected = {
        num: fit(rank_pool.ranks(num_data_ranks), **accumulated(num=num, **scene))[0]
        for num in counts
    }
    ranks = rank_pool.ranks(num_stages * num_data_ranks)
    for schedule, num in itertools.product(("gpipe", "1f1b", "interleaved"), counts):
        options = {"num_stages": num_stages, "num_microbatches": num, "schedule": schedule}
        assert_same(fit(ranks, **in_stages(**options, **scene)), expected[num])
