"""A pipeline trains what accumulation trains, to the bit: weights, BatchNorm statistics and counts, optimizer state."""

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
    for each in piped:
        assert same(each.weights, expected.weights)
        assert each.num_skipped == expected.num_skipped
    assert same(joined(piped), expected.states[0])


def assert_equal(ranks, plain, module=toy.Toy, *, options=None, **scene):
    """Check that stages leave what accumulation leaves, and return it."""
    expected = fit(plain, module, **accumulated(**scene))[0]
    assert_same(fit(ranks, module, **in_stages(**scene, **options or {})), expected)
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
    """Its gradients are inf in one step, in the layer `at`, as far as fp16 goes."""

    def __init__(self, at):
        super().__init__()
        self.net[at].register_full_backward_pre_hook(self.to_inf)
        self.num_calls = 0

    def to_inf(self, module, gradients):
        self.num_calls += 1
        return tuple(g * float("inf") if self.num_calls == 6 else g for g in gradients)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_stages_train_what_accumulation_trains(one_rank, two_ranks, schedule):
    assert_equal(two_ranks, one_rank, options={"schedule": schedule})


def test_four_stages_in_fp16_with_lars_and_a_schedule(one_rank, four_ranks):
    assert_equal(four_ranks, one_rank, WithLars, options={"num_stages": 4}, precision="16-true")


def test_interleaved_stages_in_bf16_with_lamb_and_activation_checkpoints(one_rank, two_ranks):
    options = {"schedule": "interleaved", "checkpoint_activations": True}
    assert_equal(two_ranks, one_rank, WithLamb, options=options, precision="bf16-true")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("module", "precision"), [(WithLamb, "16-true"), (WithLars, "32-true")])
def test_a_schedule_that_computes_gradients_of_weights_apart(
    one_rank, two_ranks, module, precision
):
    assert_equal(
        two_ranks, one_rank, module, options={"schedule": "zero_bubble"}, precision=precision
    )


def weights_and_gradients(trainer, module, *_):
    """Return weights and gradients of this rank's stages."""
    own = {
        name: parameter for name, parameter in module.named_parameters() if not parameter.is_meta
    }
    return {
        name: (parameter.detach().clone(), parameter.grad.clone())
        for name, parameter in own.items()
    }


@pytest.mark.parametrize("schedule", ["interleaved", "1f1b"])
def test_hooks_see_fp32_weights_and_unscaled_fp32_gradients_of_the_whole_batch(
    one_rank, two_ranks, schedule
):
    hooks = [
        at(on_after_backward=weights_and_gradients, on_before_optimizer_step=weights_and_gradients)
    ]
    scene = {"precision": "16-true", "callbacks": hooks, "max_epochs": 1}
    (plain,) = fit(one_rank, **accumulated(**scene))
    piped = fit(two_ranks, **in_stages(schedule=schedule, **scene))
    # the last of its micro-batches
    for hook, every in (
        ("on_after_backward", 4),
        ("on_before_optimizer_step", 1),
    ):
        expected = plain.looks[hook][every - 1 :: every]
        results = [
            first | second
            for first, second in zip(*(seen.looks[hook] for seen in piped), strict=True)
        ]
        assert len(results) == 8
        assert same(results, expected)
    assert {tensor.dtype for pair in results[0].values() for tensor in pair} == {torch.float32}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("at", [5, 1, 8], ids=["in the middle", "in the first", "in the last"])
def test_overflow_in_one_stage_skips_the_step_of_all(one_rank, four_ranks, at):
    module = partial(Overflows, at)
    assert (
        assert_equal(
            four_ranks, one_rank, module, options={"num_stages": 4}, precision="16-true"
        ).num_skipped
        == 1
    )


def test_data_ranks_average_and_clipping_by_norm_counts_all_stages(two_ranks, four_ranks):
    assert_equal(four_ranks, two_ranks, precision="16-true", gradient_clip_val=0.3)


class Wide(Overflows, WithLars):
    """Both stages have tensors of several blocks, of which data ranks that share the update have parts."""

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
        self.net[0].register_full_backward_pre_hook(self.to_inf)  # in the first stage alone

    def to_inf(self, module, gradients):
        is_second = self.trainer.fit_loop.total_batch_idx == 1  # also of a run that is resumed
        return tuple(
            g * float("inf") if is_second and self.is_to_overflow else g for g in gradients
        )


class WideTied(Wide):
    """A weight that is in both stages, in which data ranks have other parts of it."""

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
    """With the same bits, in memory and in files, and a run goes on with and without."""
    module, precision, shares = SHARED[case]
    whole = {**shares, "shard_update": "off"}

    def seen_of(name, how, **scene):
        scene |= {"precision": precision, "save_to": str(tmp_path / name), **how}
        results = fit(
            four_ranks, module, **in_stages(**scene, callbacks=[partial(ReplicaCheck, 1)])
        )
        saved = torch.load(tmp_path / name, weights_only=True)
        # the first has optimizer state whole
        of_pipelines = (
            results[0].num_skipped,
            joined(results[:2]),
        )
        assert same(of_pipelines[1], joined(results[2:])) == (how is whole)
        return (
            [result.weights for result in results],
            of_pipelines,
            saved["state_dict"],
            saved["optimizer_states"],
        )

    expected = seen_of("whole", whole)
    assert expected[1][0] == (case == "overflow")
    assert same(seen_of("shared", shares), expected)
    seen_of("half", shares, max_epochs=1)
    for how in (shares, whole):
        again = seen_of("again", how, ckpt_path=str(tmp_path / "half"))
        assert same([*again[:1], *again[2:]], [*expected[:1], *expected[2:]])


PLACES = {
    "2 stages": (2, 1, (2, 3, 8)),
    "2 stages x 2 data ranks": (2, 2, (2, 4)),
    "4 stages": (4, 1, (4, 8)),
}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true", "64-true"])
@pytest.mark.parametrize("place", PLACES)
def test_every_schedule_trains_what_accumulation_trains(rank_pool, place, precision):
    num_stages, num_data_ranks, counts = PLACES[place]
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
    for schedule, num in itertools.product(("gpipe", "1f1b", "interleaved"), counts):
        options = {"num_stages": num_stages, "num_microbatches": num, "schedule": schedule}
        assert_same(
            fit(rank_pool.ranks(num_stages * num_data_ranks), **in_stages(**options, **scene)),
            expected[num],
        )
