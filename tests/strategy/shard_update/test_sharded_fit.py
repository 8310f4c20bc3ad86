"""The update shared within a node: to the bit what every rank would do by itself, in a part of the memory."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_hybrid import Adasum, Comm, HybridAllReduceStrategy
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.stats.link_bytes import traffic_of
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.placement import BLOCK
from lightning_hybrid.strategy.shard_update import shard_exchange as part_exchange
from lightning_hybrid.strategy.shard_update.extension import ShardUpdateExtension
from lightning_hybrid.strategy.shard_update.gradient_scatter import GradientScatter
from tests import toy
from tests.comm.layouts import engine_over, integers, sum_of_integers
from tests.strategy.shard_update.shared import SIZES, Sizes, adamw, batches, both, same, sgd

# In every run of the tests a few of all cases; the others are long.
LONG = pytest.mark.long


def some(default, cases):
    """The cases, those that are not in `default` marked as long."""
    return [case if case in default else pytest.param(*case, marks=LONG) for case in cases]


PRECISIONS = ("16-true", "bf16-true", "32-true")
ALL_SAME = {"weights": True, "seen": True, "state": True, "skipped": True}


def layerwise(module, kind, fused, options):
    # Every third tensor, and the normalisation, is excluded.
    weights = list(module.weights)
    groups = [
        {"params": [weight for index, weight in enumerate(weights) if index % 3 != 1]},
        {"params": [*weights[1::3], *module.norm.parameters()], "trust_ratio": False, "weight_decay": 0.0},
    ]
    return kind(groups, lr=0.1, weight_decay=1e-3, fused=fused, **options)


LAYERWISE = {
    "LARS": partial(layerwise, kind=LARS, fused=True, options={"nesterov": True}),
    "LARS, joint": partial(layerwise, kind=LARS, fused=True, options={"denominator": "joint", "trust_clip": 1.0}),
    "LARS, lists": partial(layerwise, kind=LARS, fused=False, options={"momentum_form": "ratio_outside"}),
    "LAMB": partial(layerwise, kind=LAMB, fused=True, options={"max_grad_norm": 0.5}),
    "LAMB, lists": partial(layerwise, kind=LAMB, fused=False, options={"max_grad_norm": 0.5}),
}


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    some(
        [(sgd, "16-true"), (adamw, "32-true")], [(one, precision) for one in (sgd, adamw) for precision in PRECISIONS]
    ),
)
def test_a_shared_update_has_the_bits_of_a_whole_one(two_ranks, optimizer, precision):
    for found, _ in two_ranks.run(both, optimizer, precision):
        assert found == ALL_SAME


def test_two_nodes_combined_by_adasum_share_the_update_to_the_bit(four_ranks):
    kwargs = {"options": {"between_nodes": Adasum(), "ranks_per_node": 2}}
    for found, _ in four_ranks.run(both, sgd, "16-true", kwargs):
        assert found == ALL_SAME


def numels_held(precision, ranks_per_node):
    """Elements of masters and of momentum on this rank, in training and after it; and of the weights."""
    seen = {}

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            masters = trainer.precision_plugin.masters if precision == "16-true" else None
            seen["masters"] = sum(pair.master.numel() for pair in masters.pairs.values()) if masters else 0
            seen["momentum"] = sum(one["momentum_buffer"].numel() for one in trainer.optimizers[0].state.values())

    module = Sizes(sgd)
    scale = {"loss_scale": 1024} if precision == "16-true" else {}
    strategy = HybridAllReduceStrategy(shard_update="node", ranks_per_node=ranks_per_node, **scale)
    trainer = toy.trainer(strategy=strategy, precision=precision, max_epochs=1, callbacks=[Looks()])
    trainer.fit(module, batches(2))
    weights = sum(weight.numel() for weight in module.parameters())
    after = sum(one["momentum_buffer"].numel() for one in trainer.optimizers[0].state.values())
    return seen, weights, after


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_each_rank_of_a_node_holds_a_part_of_the_large_tensors(two_ranks, precision):
    small = sum(size for size in SIZES if size <= BLOCK)
    found = two_ranks.run(numels_held, precision, 2)
    large = found[0][1] - small - 8  # the layer normalisation has 8
    for kind, others in (("masters", 0 if precision == "16-true" else None), ("momentum", 8)):
        held = [seen[kind] for seen, _, _ in found]
        if others is None:
            assert held == [0, 0]
            continue
        assert sum(held) == large + 2 * (small + others), kind
        assert max(held) - min(held) <= 2 * BLOCK, kind
    assert found[0][2] == found[0][1]  # rank zero can still save whole state after the fit


def test_overflow_in_one_part_skips_the_step_on_every_rank(two_ranks):
    kwargs = {"num": 5, "module_options": {"overflows": (1, 2), "overflow_in": 4}}
    for found, skipped in two_ranks.run(both, sgd, "16-true", kwargs):
        assert (found, skipped) == (ALL_SAME, 2)


SETTINGS = {
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by norm": {"gradient_clip_val": 0.01},
    "clipping by value": {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize(
    ("precision", "settings"),
    some(
        [("16-true", "accumulation"), ("32-true", "clipping by norm")],
        [(precision, settings) for precision in ("16-true", "32-true") for settings in SETTINGS],
    ),
)
def test_the_trainer_s_options_keep_their_bits(two_ranks, precision, settings):
    for found, _ in two_ranks.run(both, adamw, precision, SETTINGS[settings]):
        assert found == ALL_SAME


def both_in_many_chunks(kwargs):
    with patch.object(part_exchange, "CHUNK_NUMEL", 1 << 12):
        return both(sgd, "16-true", kwargs)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), some([(3, 3)], [(3, 3), (4, 4), (4, 2)]))
def test_more_ranks_and_nodes_keep_the_bits(rank_pool, world_size, ranks_per_node):
    """And so do exchanges of several chunks, of which every third takes the memory of the first again."""
    kwargs = {"options": {"ranks_per_node": ranks_per_node}}
    for found, _ in rank_pool.ranks(world_size).run(both_in_many_chunks, kwargs):
        assert found == ALL_SAME


class Reloads(pl.Callback):
    """Loads what the module says that it holds: with masters in parts, weights that are rounded."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        pl_module.load_state_dict(pl_module.state_dict())


def test_a_state_dict_that_is_loaded_again_rounds_no_masters(two_ranks):
    for found, _ in two_ranks.run(both, sgd, "16-true", {"callbacks": [Reloads()]}):
        assert found == ALL_SAME


# ---- gradients that are averaged for their owners alone -------------------------------------------------------------


class CountsScattered(pl.Callback):
    """How many buckets of the last steps went to their owners alone."""

    def __init__(self):
        self.num = 0

    def on_train_batch_start(self, trainer, *args):
        extensions = trainer.strategy._extensions
        scatter = extensions.made[0]._parts.scatter if extensions else None
        if scatter is not None:
            self.num = sum(packing is not None for packing in scatter._packings.values())


def scattered(optimizer, precision, kwargs, options):
    counts = CountsScattered()
    callbacks = [counts, *kwargs.get("callbacks", ())]
    found, skipped = both(optimizer, precision, kwargs | {"options": options, "callbacks": callbacks})
    return found, skipped, counts.num


SMALL_BUCKETS = {"comm": Comm(algorithm="two_level", bucket_bytes=64 * 1024, tune="off")}


@pytest.mark.parametrize(("world_size", "ranks_per_node"), some([(4, 2)], [(2, 2), (3, 3), (4, 2)]))
def test_gradients_of_parts_alone_give_the_same_bits(rank_pool, world_size, ranks_per_node):
    options = SMALL_BUCKETS | {"ranks_per_node": ranks_per_node}
    for found, _, num in rank_pool.ranks(world_size).run(scattered, LAYERWISE["LARS"], "16-true", {}, options):
        assert found == ALL_SAME
        assert num >= 1


@pytest.mark.parametrize(
    ("optimizer", "precision", "kwargs"),
    [
        pytest.param("LAMB", "bf16-true", {"accumulate_grad_batches": 2}, marks=LONG),
        ("LAMB, lists", "32-true", {}),
        ("LARS", "16-true", {"num": 5, "module_options": {"overflows": (1, 2), "overflow_in": 5}}),
    ],
)
def test_and_with_every_precision_accumulation_and_overflow(two_ranks, optimizer, precision, kwargs):
    for found, skipped, num in two_ranks.run(scattered, LAYERWISE[optimizer], precision, kwargs, SMALL_BUCKETS):
        assert found == ALL_SAME
        assert num >= 1
        assert skipped == (2 if "num" in kwargs else 0)


def scattered_in_another_order():
    """A bucket of halves: a gradient in another order than its parameter, one in the same, and one of a small one."""
    engine, rank = engine_over(((0, 1),), CommPlan(algorithm="two_level")), dist.get_rank()
    parameters = [torch.zeros(4, 8, 4, 4).to(memory_format=torch.channels_last), torch.zeros(512), torch.zeros(7)]
    buffer = integers(rank, 1031, torch.float16)
    gradients = [flat.view(one.shape) for flat, one in zip(buffer.split([512, 512, 7]), parameters, strict=True)]
    has = {"buffer": buffer, "parameters": parameters, "gradients": gradients, "index": 3, "is_last": False}
    bucket = SimpleNamespace(**{name: lambda value=value: value for name, value in has.items()})
    cut = SimpleNamespace(spans=[(0, 256), (256, 512)])
    scatter = GradientScatter(engine, lambda one: cut if one.numel() > 7 else None, is_possible=True)
    scatter.turn(True)
    scatter(bucket).wait()
    engine.close()
    return buffer


def test_a_gradient_in_another_order_than_its_parameter_and_a_small_one_are_averaged_whole(two_ranks):
    mean = sum_of_integers(2, 1031, torch.float16) / 2
    for rank, found in enumerate(two_ranks.run(scattered_in_another_order)):
        own = torch.ones(1031, dtype=torch.bool)
        own[512 + 256 * (1 - rank) :][:256] = False
        assert torch.equal(found[own], mean[own])
        assert torch.equal(found[~own], integers(rank, 1031, torch.float16)[~own])  # and those of the other are not


class Reads(pl.Callback):
    """Remembers nothing, but might."""

    def on_after_backward(self, trainer, pl_module):
        """Read gradients."""


@pytest.mark.parametrize(
    "kwargs",
    [
        {"gradient_clip_val": 0.01},
        pytest.param({}, marks=LONG),
        {"callbacks": [Reads()]},
        {"module_options": {"reads": True}},
    ],
    ids=["clipping", "SGD in halves", "a hook", "the module's hook after the step"],
)
def test_who_looks_at_gradients_finds_all_of_them(two_ranks, kwargs):
    optimizer = LAYERWISE["LARS"] if kwargs else sgd
    for found, _, num in two_ranks.run(scattered, optimizer, "16-true", kwargs, SMALL_BUCKETS):
        assert (found, num) == (ALL_SAME, 0)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def saved(path, precision, shard_update, *, resume=None, **options):
    """Train for two epochs of two batches, save after each; what the files hold, and the weights."""
    module = Sizes(adamw)
    scale = {"loss_scale": 1024} if precision == "16-true" else {}
    strategy = HybridAllReduceStrategy(shard_update=shard_update, **scale, **options)
    trainer = toy.trainer(strategy=strategy, precision=precision, use_distributed_sampler=False)
    module.on_train_epoch_end = lambda: trainer.current_epoch or trainer.save_checkpoint(f"{path}/two.ckpt")
    trainer.fit(module, batches(2), ckpt_path=resume)
    trainer.save_checkpoint(f"{path}/four.ckpt")
    files = [
        torch.load(f"{path}/{name}.ckpt", weights_only=True) for name in ("two", "four") if not resume or name == "four"
    ]
    keys = ("state_dict", "optimizer_states", "MasterWeightPrecision", "global_step")
    return toy.weights(module), [{key: file.get(key) for key in keys} for file in files]


def files_of_both(path, precision):
    whole, shared = (saved(f"{path}/{setting}", precision, setting) for setting in ("off", "node"))
    return same(whole, shared)


@pytest.mark.parametrize("precision", ["16-true", pytest.param("32-true", marks=LONG)])
def test_checkpoints_are_those_of_a_whole_update(two_ranks, precision, tmp_path):
    assert two_ranks.run(files_of_both, str(tmp_path), precision) == [True, True]


def resumed(path, precision, first, then):
    """A run of four batches in one go, and one that is resumed after two."""
    weights, (_, file) = saved(f"{path}/straight", precision, "off")
    saved(f"{path}/begun", precision, first)
    again, (after,) = saved(f"{path}/again", precision, then, resume=f"{path}/begun/two.ckpt")
    return same(weights, again), same(file, after)


@pytest.mark.parametrize(
    ("precision", "first", "then"),
    some(
        [("16-true", "node", "node")],
        [
            (precision, *settings)
            for precision in ("16-true", "32-true")
            for settings in (("node", "node"), ("node", "off"), ("off", "node"))
        ],
    ),
)
def test_a_run_goes_on_to_the_bit_shared_or_not(two_ranks, precision, first, then, tmp_path):
    assert two_ranks.run(resumed, str(tmp_path), precision, first, then) == [(True, True)] * 2


def resumed_on_other_nodes(path, precision):
    """Begun on two nodes of two ranks, gone on with on one of four; all sums over one ring, whatever shares a node."""

    def begun_and_resumed(shard_update, *ranks_per_node):
        for name, resume, ranks in zip(("begun", "again"), (None, "begun/two.ckpt"), ranks_per_node, strict=True):
            options = {
                "comm": Comm(algorithm="flat"),
                "ranks_per_node": ranks,
                "resume": resume and f"{path}/{shard_update}/{resume}",
            }
            found = saved(f"{path}/{shard_update}/{name}", precision, shard_update, **options)
        return found

    # Of several ranks a ring adds in an order that follows DDP's buckets, which a resumed run makes anew.
    return same(begun_and_resumed("off", 2, 2), begun_and_resumed("node", 2, 4))


@pytest.mark.parametrize("precision", ["32-true", pytest.param("16-true", marks=LONG)])
def test_a_run_goes_on_with_another_number_of_ranks_on_a_node(four_ranks, precision, tmp_path):
    assert four_ranks.run(resumed_on_other_nodes, str(tmp_path), precision) == [True] * 4


# ---- LARS and LAMB -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    some(
        [("LARS", "16-true"), ("LAMB", "32-true"), ("LARS, lists", "bf16-true")],
        [(one, precision) for one in LAYERWISE for precision in PRECISIONS],
    ),
)
def test_trust_ratios_are_those_of_whole_tensors(two_ranks, optimizer, precision):
    for found, _ in two_ranks.run(both, LAYERWISE[optimizer], precision):
        assert found == ALL_SAME


@pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
def test_the_verdict_on_overflow_travels_with_the_norms(two_ranks, optimizer):
    kwargs = {"num": 5, "module_options": {"overflows": (1, 2), "overflow_in": 5}}
    for found, skipped in two_ranks.run(both, LAYERWISE[optimizer], "16-true", kwargs):
        assert (found, skipped) == (ALL_SAME, 2)


def test_on_cuda_a_shared_update_sends_no_more_bytes_than_two_level():
    """There `auto` is flat, which leaves no gather of gradients out: the weights' would come on top."""
    topology = Topology.from_ranks_per_node(rank=0, world_size=8, ranks_per_node=4)
    fit = SimpleNamespace(device=torch.device("cuda", 0))
    plan = ShardUpdateExtension().engine_options(fit, CommPlan())["plan"]
    for numel in (2**12, 2**24):
        planned = plan.bucket(
            index=0, numel=numel, dtype="float16", num_bytes=2 * numel, topology=topology, on_cuda=True
        )
        assert planned.num_chunks == (1 if numel == 2**12 else 2)
        own, gather = (traffic_of(each, topology, 2 * numel) for each in (planned.algorithm, "node_gather"))
        # The gather of gradients is left out of `two_level` alone: half of what stays in the node.
        inside = own.inside / (2 if planned.algorithm == "two_level" else 1) + gather.inside
        two_level = traffic_of("two_level", topology, 2 * numel)
        assert own.across + inside <= two_level.across + two_level.inside
