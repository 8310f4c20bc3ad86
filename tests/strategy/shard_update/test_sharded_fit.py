"""The update shared within a node: to the bit what every rank would do by itself, in a part of the memory."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid import Adasum, Comm
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.stats.link_bytes import traffic_of
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.placement import BLOCK
from lightning_hybrid.strategy.shard_update.extension import ShardUpdateExtension
from lightning_hybrid.strategy.shard_update.gradient_scatter import GradientScatter
from tests.comm.layouts import engine_over, integers, sum_of_integers
from tests.scenes import Saves, at, same
from tests.strategy.shard_update.shared import SIZES, Sizes, adamw, assert_same, fit, sgd

LONG = pytest.mark.long  # in every run of the tests a few of all cases


def long(*cases):
    return [pytest.param(*case, marks=LONG) for case in cases]


def layerwise(module, kind, fused, options):
    # Every third tensor, and the normalisation, is excluded.
    weights = list(module.weights)
    groups = [
        {"params": [weight for index, weight in enumerate(weights) if index % 3 != 1]},
        {
            "params": [*weights[1::3], *module.norm.parameters()],
            "trust_ratio": False,
            "weight_decay": 0.0,
        },
    ]
    return kind(groups, lr=0.1, weight_decay=1e-3, fused=fused, **options)


lars = partial(layerwise, kind=LARS, fused=True, options={"nesterov": True})
lars_joint = partial(
    layerwise, kind=LARS, fused=True, options={"denominator": "joint", "trust_clip": 1.0}
)
lars_lists = partial(layerwise, kind=LARS, fused=False, options={"momentum_form": "ratio_outside"})
lamb = partial(layerwise, kind=LAMB, fused=True, options={"max_grad_norm": 0.5})
lamb_lists = partial(layerwise, kind=LAMB, fused=False, options={"max_grad_norm": 0.5})


def overflows_in(index, first=1):
    return {
        "num": 5,
        "num_skipped": 2,
        "special": {"overflows": (first, first + 1), "overflow_in": index},
    }


ACCUMULATES = {"accumulate_grad_batches": 2}
CLIPS = {"gradient_clip_val": 0.01}
CLIPS_VALUES = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}
CHUNKS = {"chunk_numel": 1 << 12}  # of which every third takes the memory of the first again
WORLD = {"shard_update": "world", "ranks_per_node": 2}
ONE_ON_EACH_NODE = {"shard_update": "world", "ranks_per_node": 1}


@pytest.mark.parametrize(
    ("optimizer", "precision", "num_ranks", "scene"),
    [
        (sgd, "16-true", 2, overflows_in(4)),
        (adamw, "16-true", 2, ACCUMULATES),
        (adamw, "32-true", 2, CLIPS),
        (sgd, "16-true", 4, {"between_nodes": Adasum(), "ranks_per_node": 2}),
        (sgd, "16-true", 3, CHUNKS | {"ranks_per_node": 3}),
        (lamb, "32-true", 2, {}),
        (lars_lists, "bf16-true", 2, {}),
        (sgd, "16-true", 2, ONE_ON_EACH_NODE | overflows_in(4)),
        *long(
            (adamw, "32-true", 4, WORLD | CHUNKS),
            (adamw, "16-true", 4, WORLD | {"between_nodes": Adasum()}),
            (lamb, "16-true", 2, overflows_in(5)),
            (adamw, "16-true", 2, CLIPS_VALUES),
            (sgd, "16-true", 4, CHUNKS | {"ranks_per_node": 4}),
            (lars_joint, "16-true", 2, {}),
            (lars, "bf16-true", 2, {}),
        ),
    ],
)
def test_a_shared_update_has_the_bits_of_a_whole_one(
    rank_pool, optimizer, precision, num_ranks, scene
):
    """With overflow in one part, the trainer's options, several nodes, and trust ratios of whole tensors."""
    assert_same(rank_pool.ranks(num_ranks), optimizer, precision, **scene)


def held(trainer, module, *args):
    # Without half precision all weights are fp32, on each rank.
    window = trainer.strategy.run_status.window
    num_fp32 = 0
    if window is not None:
        num_fp32 += sum(pair.fp32.numel() for pair in window.pairs.values())
        num_fp32 += sum(part.numel() for part in trainer.strategy.run_status.master_parts.values())
        # the whole values are freed
        num_fp32 += sum(shard._pair.fp32.numel() for shard in shards_of(trainer))
    return num_fp32, sum(
        state["momentum_buffer"].numel() for state in trainer.optimizers[0].state.values()
    )


def shards_of(trainer):
    return trainer.strategy._extensions.members[0]._sharded_fit.shards.values()


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_each_rank_of_a_node_holds_a_part_of_the_large_tensors(two_ranks, precision):
    small = sum(size for size in SIZES if size <= BLOCK)
    ranks = fit(two_ranks, sgd, precision, num=2, callbacks=[at(on_train_batch_end=held)])
    weights = sum(weight.numel() for weight in ranks[0].weights.values())
    large = weights - small - 8  # the layer normalisation has 8
    masters, momentum = zip(*(seen.looks["on_train_batch_end"][-1] for seen in ranks), strict=True)
    for kind, others in (
        ((masters, 0), (momentum, 8)) if precision == "16-true" else ((momentum, 8),)
    ):
        assert sum(kind) == large + 2 * (small + others)
        assert max(kind) - min(kind) <= 2 * BLOCK
    assert precision == "16-true" or masters == (0, 0)
    # Rank zero can still save whole state after the fit.
    assert sum(state["momentum_buffer"].numel() for state in ranks[0].states[0].values()) == weights


def num_scattered(trainer, module, *args):
    extensions = trainer.strategy._extensions
    if extensions.members:
        scatter = extensions.members[0]._sharded_fit.scatter
    else:
        scatter = None
    return scatter and sum(packing is not None for packing in scatter._packings.values())


def assert_same_and_count(ranks, optimizer, precision, callbacks=(), **scene):
    scene |= {"comm": Comm(algorithm="two_level", bucket_bytes=64 * 1024)}
    callbacks = [*callbacks, at(on_train_end=num_scattered)]
    shared = assert_same(ranks, optimizer, precision, callbacks=callbacks, **scene)
    return [seen.looks["on_train_end"][-1] for seen in shared]


@pytest.mark.parametrize(
    ("optimizer", "precision", "num_ranks", "scene"),
    [
        (lars, "16-true", 4, {"ranks_per_node": 2}),
        (lamb_lists, "32-true", 2, {}),
        # The verdict travels with the norms; where to go on after a first overflow, no rank knows alone.
        (lars, "16-true", 2, overflows_in(5, first=0) | {"loss_scale": "dynamic"}),
        (lars, "16-true", 4, WORLD | overflows_in(5)),
        *long(
            (lars, "16-true", 3, {}),
            (lamb, "bf16-true", 2, ACCUMULATES),
            (lamb, "16-true", 2, ONE_ON_EACH_NODE),
            (adamw, "32-true", 4, WORLD | ACCUMULATES),
        ),
    ],
)
def test_gradients_of_parts_alone_give_the_same_bits(
    rank_pool, optimizer, precision, num_ranks, scene
):
    assert (
        min(assert_same_and_count(rank_pool.ranks(num_ranks), optimizer, precision, **scene)) >= 1
    )


def read_nothing(*args):
    """A callback that might look at gradients."""


@pytest.mark.parametrize(
    ("optimizer", "scene"),
    [
        (lars, {"gradient_clip_val": 0.01}),
        (lars, {"callbacks": [at(on_after_backward=read_nothing)]}),
        (lars, {"special": {"reads": True}}),
        *long((sgd, {})),
    ],
    ids=["clipping", "a hook", "the module's hook after the step", "SGD in halves"],
)
def test_who_looks_at_gradients_finds_all_of_them(two_ranks, optimizer, scene):
    assert assert_same_and_count(two_ranks, optimizer, "16-true", **scene) == [0, 0]


class LooksLate(Sizes):
    """Adds a step hook to its optimizer while a step is under way."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.trainer.optimizers[0].register_step_pre_hook(read_nothing)
        return super().training_step(batch, batch_idx)


def test_who_begins_to_look_at_gradients_within_a_step_is_refused(two_ranks):
    """They are averaged for their owners alone by then, and others would see a rank's own."""
    comm = Comm(algorithm="two_level", bucket_bytes=64 * 1024)
    scene = {"module": partial(LooksLate, lars), "comm": comm, "raises": True}
    for seen in fit(two_ranks, lars, **scene):
        assert (
            "averaged the gradients of this step only for the ranks that update them" in seen.error
        ), seen.error


def scattered_in_another_order(nodes, scope):
    """A bucket of halves: a gradient in another order than its parameter, one in the same, and one of a small one."""
    engine = engine_over(nodes, CommPlan(algorithm="two_level"), shares_update=scope)
    rank = dist.get_rank()
    sharers = engine.topology.sharers(scope)
    parameters = [
        torch.zeros(4, 8, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(512),
        torch.zeros(7),
    ]
    buffer = integers(rank, 1031, torch.float16)
    gradients = [
        flat.view(one.shape)
        for flat, one in zip(buffer.split([512, 512, 7]), parameters, strict=True)
    ]
    has = {
        "buffer": buffer,
        "parameters": parameters,
        "gradients": gradients,
        "index": 3,
        "is_last": False,
    }
    bucket = SimpleNamespace(**{name: lambda value=value: value for name, value in has.items()})
    cut = SimpleNamespace(
        spans=[(begin, begin + 512 // len(sharers)) for begin in range(0, 512, 512 // len(sharers))]
    )
    scatter = GradientScatter(
        engine, lambda one: cut if one.numel() > 7 else None, is_possible=True
    )
    scatter.prepare_step(True)
    scatter(bucket).wait()
    engine.close()
    return buffer, sharers.index(rank)


@pytest.mark.parametrize(
    ("nodes", "scope"),
    [
        (((0, 1),), "node"),
        (((0, 1), (2, 3)), "world"),
        (((0, 3), (1, 2)), "world"),
        (((0,), (1,), (2,), (3,)), "world"),
    ],
)
def test_a_gradient_in_another_order_than_its_parameter_and_a_small_one_are_averaged_whole(
    rank_pool, nodes, scope
):
    num_ranks = sum(map(len, nodes))
    mean = sum_of_integers(num_ranks, 1031, torch.float16) / num_ranks
    numel = 512 // num_ranks
    for rank, (result, place) in enumerate(
        rank_pool.ranks(num_ranks).run(scattered_in_another_order, nodes, scope)
    ):
        own = torch.ones(1031, dtype=torch.bool)
        own[512:1024] = False
        own[512 + numel * place :][:numel] = True
        assert torch.equal(result[own], mean[own])
        # and those of others are not
        assert torch.equal(result[~own], integers(rank, 1031, torch.float16)[~own])


def saved(ranks, path, precision, shard_update, *, resume=None, **options):
    file = path / f"{shard_update}4.ckpt"
    scene = {
        "num": 2,
        "max_epochs": 2,
        "save_to": file,
        "ckpt_path": resume,
        "ranks_per_node": 2,
    } | options
    scene |= {"ranks_per_node": 1} if shard_update == "world" else {}
    scene |= {"callbacks": [] if resume else [Saves(path / f"{shard_update}2.ckpt", epoch=0)]}
    seen = fit(ranks, adamw, precision, shard_update, **scene)
    result = torch.load(file, weights_only=True)
    keys = ("state_dict", "optimizer_states", "MasterWeightPrecision", "global_step")
    return [one.weights for one in seen], {key: result.get(key) for key in keys}


@pytest.mark.parametrize(
    ("precision", "first", "then"),
    [
        ("16-true", "node", "world"),
        *long(
            ("16-true", "world", "node"),
            ("32-true", "world", "off"),
            ("16-true", "node", "off"),
            ("16-true", "off", "node"),
            ("32-true", "node", "off"),
        ),
    ],
)
def test_a_run_goes_on_to_the_bit_shared_or_not(two_ranks, precision, first, then, tmp_path):
    straight = saved(two_ranks, tmp_path, precision, "off")
    begun = saved(two_ranks, tmp_path, precision, first)
    assert same(straight, begun)
    assert same(
        straight, saved(two_ranks, tmp_path, precision, then, resume=tmp_path / f"{first}2.ckpt")
    )


def test_on_cuda_a_shared_update_sends_no_more_bytes_than_two_level():
    """There `auto` is flat, which leaves no gather of gradients out: the weights' would come on top."""
    topology = Topology.from_ranks_per_node(rank=0, world_size=8, ranks_per_node=4)
    fit = SimpleNamespace(device=torch.device("cuda", 0), topology=topology)
    plan = ShardUpdateExtension("node").engine_options(fit, CommPlan())["plan"]
    for numel in (2**12, 2**24):
        planned = plan.bucket(
            index=0,
            numel=numel,
            dtype="float16",
            num_bytes=2 * numel,
            topology=topology,
            on_cuda=True,
        )
        assert planned.num_chunks == (1 if numel == 2**12 else 2)
        own, gather = (
            traffic_of(each, topology, 2 * numel) for each in (planned.algorithm, "node_gather")
        )
        # The gather of gradients is left out of `two_level` alone: half of what stays in the node.
        inside = own.inside / (2 if planned.algorithm == "two_level" else 1) + gather.inside
        two_level = traffic_of("two_level", topology, 2 * numel)
        assert own.across + inside <= two_level.across + two_level.inside
