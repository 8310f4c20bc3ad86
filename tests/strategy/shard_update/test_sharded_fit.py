"""Fits with `shard_update`: bit-identical to the update that every rank makes itself, with less memory."""

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

LONG = pytest.mark.long  # every run of the tests includes a few of all cases


def long(*cases):
    return [pytest.param(*case, marks=LONG) for case in cases]


def layerwise(module, kind, fused, options):
    # Every third tensor and the normalization are excluded.
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
CHUNKS = {"chunk_numel": 1 << 12}  # every third chunk reuses the memory of the first
WORLD = {"shard_update": "world", "ranks_per_node": 2}
ONE_RANK_PER_NODE = {"shard_update": "world", "ranks_per_node": 1}


@pytest.mark.sampled(3)
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
        (sgd, "16-true", 2, ONE_RANK_PER_NODE | overflows_in(4)),
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
    """A sharded update matches with overflows, trainer options, several nodes and trust ratios of whole tensors."""
    assert_same(rank_pool.ranks(num_ranks), optimizer, precision, **scene)


def num_master_weights(trainer):
    """Return the number of this rank's separate master weights, which is zero in fp32."""
    window = trainer.strategy.run_status.window
    if window is None:
        return 0
    num = sum(pair.fp32.numel() for pair in window.pairs.values())
    num += sum(part.numel() for part in trainer.strategy.run_status.master_parts.values())
    # The whole values have been freed.
    num += sum(shard._pair.fp32.numel() for shard in shards_of(trainer))
    return num


def numbers_on_rank(trainer, module, *args):
    """Return the numbers of master weights and momentum elements that this rank holds."""
    states = trainer.optimizers[0].state.values()
    num_momentum = sum(state["momentum_buffer"].numel() for state in states)
    return num_master_weights(trainer), num_momentum


def shards_of(trainer):
    return trainer.strategy._extensions.members[0]._sharded_fit.shards.values()


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_each_rank_of_a_node_holds_a_part_of_the_large_tensors(two_ranks, precision):
    num_small = sum(size for size in SIZES if size <= BLOCK)
    num_norm = 8  # the layer normalization stays in fp32
    looks = at(on_train_batch_end=numbers_on_rank)
    ranks = fit(two_ranks, sgd, precision, num=2, callbacks=[looks])
    num_weights = sum(weight.numel() for weight in ranks[0].weights.values())
    num_large = num_weights - num_small - num_norm
    numbers = [seen.looks["on_train_batch_end"][-1] for seen in ranks]

    momentum = [num_momentum for _, num_momentum in numbers]
    assert sum(momentum) == num_large + 2 * (num_small + num_norm)
    assert max(momentum) - min(momentum) <= 2 * BLOCK
    masters = [num_masters for num_masters, _ in numbers]
    if precision == "16-true":
        assert sum(masters) == num_large + 2 * num_small
        assert max(masters) - min(masters) <= 2 * BLOCK
    else:
        assert masters == [0, 0]
    # Rank zero can still save the whole state after the fit.
    states = ranks[0].states[0].values()
    assert sum(state["momentum_buffer"].numel() for state in states) == num_weights


def num_scattered(trainer, module, *args):
    """Return the number of reduce-scattered buckets, or None without `shard_update`."""
    extensions = trainer.strategy._extensions
    if not extensions.members:
        return None
    scatter = extensions.members[0]._sharded_fit.scatter
    return scatter and sum(packing is not None for packing in scatter._packings.values())


def assert_same_and_count(ranks, optimizer, precision, callbacks=(), **scene):
    """Assert that the update has the bits of a whole one, and return the number of reduce-scattered buckets by rank."""
    scene |= {"comm": Comm(algorithm="two_level", bucket_bytes=64 * 1024)}
    callbacks = [*callbacks, at(on_train_end=num_scattered)]
    shared = assert_same(ranks, optimizer, precision, callbacks=callbacks, **scene)
    return [seen.looks["on_train_end"][-1] for seen in shared]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("optimizer", "precision", "num_ranks", "scene"),
    [
        (lars, "16-true", 4, {"ranks_per_node": 2}),
        (lamb_lists, "32-true", 2, {}),
        # The overflow flag is sent with the norms. No rank alone knows the scale after a first overflow.
        (lars, "16-true", 2, overflows_in(5, first=0) | {"loss_scale": "dynamic"}),
        (lars, "16-true", 4, WORLD | overflows_in(5)),
        *long(
            (lars, "16-true", 3, {}),
            (lamb, "bf16-true", 2, ACCUMULATES),
            (lamb, "16-true", 2, ONE_RANK_PER_NODE),
            (adamw, "32-true", 4, WORLD | ACCUMULATES),
        ),
    ],
)
def test_gradients_that_are_averaged_for_their_owners_alone_give_the_same_bits(
    rank_pool, optimizer, precision, num_ranks, scene
):
    counts = assert_same_and_count(rank_pool.ranks(num_ranks), optimizer, precision, **scene)
    assert min(counts) >= 1


def read_nothing(*args):
    """Do nothing, in a hook that might read gradients."""


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
def test_gradients_are_whole_on_every_rank_if_anybody_may_look_at_them(two_ranks, optimizer, scene):
    assert assert_same_and_count(two_ranks, optimizer, "16-true", **scene) == [0, 0]


class LooksLate(Sizes):
    """Module that adds a step hook to its optimizer within a step."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.trainer.optimizers[0].register_step_pre_hook(read_nothing)
        return super().training_step(batch, batch_idx)


def test_a_hook_that_is_added_within_a_step_and_may_look_at_gradients_is_refused(two_ranks):
    """By then gradients are reduce-scattered: each is averaged only on its owner, and local on other ranks."""
    comm = Comm(algorithm="two_level", bucket_bytes=64 * 1024)
    scene = {"module": partial(LooksLate, lars), "comm": comm, "raises": True}
    for seen in fit(two_ranks, lars, **scene):
        assert (
            "averaged the gradients of this step only on the ranks that update them" in seen.error
        ), seen.error


def scattered_in_another_order(nodes, scope):
    """Reduce-scatter an fp16 bucket with a permuted, an ordinary and a small gradient.

    The first gradient has another memory order than its parameter. Return the buffer, and the index of this rank among
    those that share the update.
    """
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
        flat.view(parameter.shape)
        for flat, parameter in zip(buffer.split([512, 512, 7]), parameters, strict=True)
    ]
    values = {
        "buffer": buffer,
        "parameters": parameters,
        "gradients": gradients,
        "index": 3,
        "is_last": False,
    }
    bucket = SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})
    numel = 512 // len(sharers)
    cut = SimpleNamespace(spans=[(begin, begin + numel) for begin in range(0, 512, numel)])

    def cut_of(parameter):
        if parameter.numel() > 7:
            return cut
        return None

    scatter = GradientScatter(engine, cut_of, is_possible=True)
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
    results = rank_pool.ranks(num_ranks).run(scattered_in_another_order, nodes, scope)
    for rank, (result, index) in enumerate(results):
        is_averaged = torch.ones(1031, dtype=torch.bool)
        is_averaged[512:1024] = False
        is_averaged[512 + numel * index :][:numel] = True
        assert torch.equal(result[is_averaged], mean[is_averaged]), f"rank {rank}"
        # The parts of other owners keep this rank's gradients.
        unchanged = integers(rank, 1031, torch.float16)[~is_averaged]
        assert torch.equal(result[~is_averaged], unchanged), f"rank {rank}"


def saved(ranks, folder, precision, shard_update, *, resume=None):
    """Fit two epochs, or resume the second. Return the weights of all ranks and the content of the last checkpoint."""
    path = folder / f"{shard_update}4.ckpt"
    scene = {"num": 2, "max_epochs": 2, "save_to": path, "ckpt_path": resume}
    scene["ranks_per_node"] = 1 if shard_update == "world" else 2
    if resume is None:
        scene["callbacks"] = [Saves(folder / f"{shard_update}2.ckpt", epoch=0)]
    seen_of_ranks = fit(ranks, adamw, precision, shard_update, **scene)
    checkpoint = torch.load(path, weights_only=True)
    keys = ("state_dict", "optimizer_states", "MasterWeightPrecision", "global_step")
    content = {key: checkpoint.get(key) for key in keys}
    return [seen.weights for seen in seen_of_ranks], content


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
def test_a_run_resumes_to_the_bit_with_or_without_a_shared_update(
    two_ranks, precision, first, then, tmp_path
):
    expected = saved(two_ranks, tmp_path, precision, "off")
    assert same(saved(two_ranks, tmp_path, precision, first), expected)
    path = tmp_path / f"{first}2.ckpt"
    assert same(saved(two_ranks, tmp_path, precision, then, resume=path), expected)


def test_on_cuda_a_shared_update_sends_no_more_bytes_than_two_level():
    """On CUDA a sharded update must not use `auto`, which is flat: the gather of weights would be extra traffic."""
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
        gradients = traffic_of(planned.algorithm, topology, 2 * numel)
        inside = gradients.inside
        if planned.algorithm == "two_level":
            # Without the gather of gradients, which is half of the bytes within a node.
            inside /= 2
        inside += traffic_of("node_gather", topology, 2 * numel).inside
        two_level = traffic_of("two_level", topology, 2 * numel)
        assert gradients.across + inside <= two_level.across + two_level.inside
