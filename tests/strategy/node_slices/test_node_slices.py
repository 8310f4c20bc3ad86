"""Layers sliced across the ranks of a node in a fit: equal to whole layers, up to the order of additions."""

import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn.utils.prune import identity

from lightning_hybrid import Adasum, Comm, LocalSteps, Mean
from lightning_hybrid.callbacks import MasterWeightAveraging, ReplicaCheck
from lightning_hybrid.run_status import run_status
from lightning_hybrid.strategy.node_slices import refusals, sliced_fit
from lightning_hybrid.strategy.node_slices.layer_plans import requested_layers
from tests import toy
from tests.scenes import Saves, at, same, this_rank
from tests.strategy.node_slices import sliced
from tests.strategy.node_slices.sliced import (
    NUM_IMAGES,
    Module,
    adamw,
    difference,
    fit,
    lars,
    loader,
    sgd,
    whole_and_cut,
)

LONG = pytest.mark.long
# fp32 has a relative precision of 6e-8, and a few dozen products are added in a different order over five steps. In
# half precision, gradients are rounded on each rank for whole layers, and after the reduction within a node for slices.
BOUNDS = {"32-true": 1e-6, "16-true": 4e-3, "bf16-true": 4e-2, "bf16-mixed": 4e-2, None: 4e-3}
TWO = {"ranks_per_node": 2}
OVERFLOWS = TWO | {"special": {"overflows": (1, 2)}}
ACCUMULATES = TWO | {"accumulate_grad_batches": 2, "num": 6}
CLIPS = TWO | {"gradient_clip_val": 0.01}
CLIPS_VALUES = TWO | {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
PENALISES = TWO | {"special": {"penalty": 0.1}}
# Whole layers of several blocks are shared between ranks, and slices are not.
SHARES = TWO | {"shard_update": "node", "special": {"width": 6000, "overflows": (1, 2)}}
SHARES_WORLD = SHARES | {"shard_update": "world"}
SCALES = OVERFLOWS | {
    "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0))]
}


LONG_FITS = [
    (adamw, "32-true", 2, TWO),
    (sliced.lars_joint, "32-true", 2, TWO),
    (sliced.lamb_lists, "32-true", 2, TWO),
    (lars, "bf16-true", 4, {"ranks_per_node": 4}),
    (sliced.lars_lists, "16-true", 4, OVERFLOWS),
    (sgd, "32-true", 2, CLIPS_VALUES),
    (sliced.lars_lists, "16-true", 4, SHARES),
    (lars, "32-true", 4, TWO | {"shard_update": "node", "special": {"width": 6000}}),
    (lars, "32-true", 4, TWO | {"shard_update": "world", "special": {"width": 6000}}),
    (sgd, "32-true", 4, TWO | {"shard_update": "node", "special": {"width": 6000}}),
    (sgd, "32-true", 4, TWO | {"shard_update": "world", "special": {"width": 6000}}),
    (sliced.lars_lists, "16-true", 4, SHARES_WORLD),
    (sgd, "16-true", 4, TWO | {"between_nodes": Adasum()}),
    (lars, "bf16-mixed", 2, TWO),
    (sgd, None, 2, SCALES | {"gradient_clip_val": 0.01}),
    (sgd, "16-true", 2, ACCUMULATES),
    (sgd, "16-true", 2, CLIPS),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("optimizer", "precision", "num_ranks", "scene"),
    [
        (lars, "32-true", 2, TWO),
        (sliced.lamb, "32-true", 4, TWO),
        (lars, "16-true", 2, OVERFLOWS),
        (sgd, "32-true", 2, ACCUMULATES),
        (sgd, "32-true", 2, CLIPS),
        (sgd, "32-true", 2, PENALISES),
        (sliced.lamb, "16-true", 2, SHARES),
        (sliced.lamb, "16-true", 4, SHARES_WORLD),
        (sgd, "32-true", 4, TWO | {"between_nodes": Adasum()}),
        (lars, None, 2, SCALES),
        *(pytest.param(*values, marks=LONG) for values in LONG_FITS),
    ],
)
def test_steps_of_cut_layers_are_those_of_whole_layers_except_for_rounding(
    rank_pool, optimizer, precision, num_ranks, scene
):
    num_skipped = 2 if scene in (OVERFLOWS, SHARES, SHARES_WORLD) else 0
    for whole, cut in whole_and_cut(rank_pool.ranks(num_ranks), optimizer, precision, **scene):
        differences = {}
        if precision == "32-true":
            differences["weights"] = difference(cut.weights, whole.weights)
            differences["metrics"] = difference(cut.metrics, whole.metrics)
            if "shard_update" not in scene:  # otherwise each rank has only a part of the state
                differences["states"] = difference(cut.states, whole.states)
        else:
            # Weights that began at zero are mostly rounding errors, and small next to the others, whose norms are 0.2
            # to 4.
            differences["weights"] = difference(cut.weights, whole.weights, least=1.0)
        assert max(differences.values()) < BOUNDS[precision], f"{differences} on rank {cut.rank}"
        assert cut.num_skipped == num_skipped, f"rank {cut.rank}"


@pytest.mark.long
def test_gradients_travel_between_nodes_in_the_dtype_of_the_wire(four_ranks):
    for dtype in ({"comm": Comm(dtype="float16")}, {"between_nodes": Mean(dtype="int8")}):
        for whole, cut in whole_and_cut(four_ranks, sgd, "32-true", **TWO, **dtype):
            error = difference(cut.weights, whole.weights)
            assert BOUNDS["32-true"] < error < BOUNDS["16-true"], f"{dtype} on rank {cut.rank}"


@pytest.mark.long
def test_stochastic_weight_averaging_averages_slices(two_ranks):
    averages = [partial(StochasticWeightAveraging, 0.05, swa_epoch_start=1)]
    for whole, cut in whole_and_cut(two_ranks, sgd, "32-true", callbacks=averages, max_epochs=3):
        error = difference(cut.weights, whole.weights)
        assert error < BOUNDS["32-true"], f"rank {cut.rank}"


def compiled(is_cut):
    module = Module(sgd, is_cut)
    module.net.compile(backend="eager")  # its graphs, without minutes of compilation
    return module


@pytest.mark.long
def test_a_compiled_network_trains_as_one_that_is_not(two_ranks):
    plain = fit(two_ranks, sgd)
    compiled_fit = fit(two_ranks, sgd, module=partial(compiled, True))
    for rank, seen in enumerate(compiled_fit):
        error = difference(seen.weights, plain[rank].weights)
        assert error < BOUNDS["32-true"], f"rank {rank}"


# ---- state and validation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "precision", "num_ranks", "shares"),
    [
        (lars, "16-true", 2, {}),
        pytest.param(sgd, "32-true", 2, {}, marks=LONG),
        pytest.param(sliced.lamb, "16-true", 4, {"shard_update": "node"} | TWO, marks=LONG),
        pytest.param(sliced.lamb, "16-true", 4, {"shard_update": "world"} | TWO, marks=LONG),
    ],
)
def test_a_checkpoint_is_whole_and_a_run_resumes_to_the_bit(
    rank_pool, tmp_path, optimizer, precision, num_ranks, shares
):
    ranks = rank_pool.ranks(num_ranks)
    path = tmp_path / "first.ckpt"
    special = {}
    momentum_name = "momentum_buffer"
    if shares:
        special = {"width": 6000}
        momentum_name = "exp_avg"
    settings = {"num": 3, "max_epochs": 2, "special": special, **shares}
    straight = fit(ranks, optimizer, precision, callbacks=[Saves(path, epoch=0)], **settings)
    resumed = fit(ranks, optimizer, precision, True, ckpt_path=path, **settings)
    whole = fit(ranks, optimizer, precision, False, ckpt_path=path, **settings)
    bound = BOUNDS[precision]
    for rank, seen in enumerate(straight):
        assert same(resumed[rank].weights, seen.weights), f"rank {rank}"
        assert same(resumed[rank].states, seen.states), f"rank {rank}"
        assert difference(whole[rank].weights, seen.weights, least=1.0) < bound, f"rank {rank}"
        if not shares:
            error = difference(whole[rank].states, seen.states, least=1.0)
            assert error < 4 * bound, f"rank {rank}"

    saved = torch.load(path, weights_only=True)
    module = Module(optimizer, **special)
    assert shapes_of(saved["state_dict"]) == shapes_of(module.state_dict())
    states = saved["optimizer_states"][0]["state"].values()
    momentum_shapes = sorted(state[momentum_name].shape for state in states)
    assert momentum_shapes == sorted(parameter.shape for parameter in module.parameters())


def shapes_of(tensors):
    return {name: value.shape for name, value in tensors.items()}


def uneven_loader():
    """Return a loader with a different number of images and batches on each rank."""
    images = sliced.images_of(2, rank=7 + this_rank())[: 11 - 7 * this_rank()]
    return torch.utils.data.DataLoader(images, batch_size=4)


def output(trainer, module, outputs, *args):
    return float(outputs)


AVERAGES = partial(MasterWeightAveraging, decay=0.5)


def test_validation_accepts_any_number_of_images_and_uses_the_average(two_ranks):
    scene = {
        "val": uneven_loader,
        "callbacks": [AVERAGES, at(on_validation_batch_end=output)],
        "max_epochs": 2,
    }
    counts = []
    for whole, cut in whole_and_cut(two_ranks, lars, "32-true", **scene):
        for name in ("looks", "metrics", "weights"):
            error = difference(getattr(cut, name), getattr(whole, name), least=1.0)
            assert error < BOUNDS["32-true"], f"{name} on rank {cut.rank}"
        counts.append(len(cut.looks["on_validation_batch_end"]))
    # Two epochs. The ranks have different numbers of batches, so the layers must have been whole.
    assert counts == [2 * 3, 2 * 1]


class RunsOnRankZero(Module):
    """Module that only rank zero calls, in its own hooks at the end of validation."""

    def __init__(self, is_cut):
        super().__init__(sgd, is_cut)
        self.outputs = []

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero:
            self.outputs.append(self.net(torch.ones(1, sliced.NUM_INPUTS)).detach())

    on_validation_end = on_validation_epoch_end


def outputs(trainer, module):
    return module.outputs


def test_rank_zero_can_run_the_module_in_its_hooks_at_the_end_of_validation(two_ranks):
    # The sanity check is included: training continues with slices after it.
    scene = {"num": 2, "val": partial(loader, 1), "num_sanity_val_steps": 1, "max_epochs": 2}
    scene |= {"timeout": timedelta(seconds=10), "callbacks": [AVERAGES, at(on_train_end=outputs)]}
    whole = fit(two_ranks, sgd, module=partial(RunsOnRankZero, False), **scene)
    cut = fit(two_ranks, sgd, module=partial(RunsOnRankZero, True), **scene)
    for rank, seen in enumerate(cut):
        for name in ("looks", "weights"):
            error = difference(getattr(seen, name), getattr(whole[rank], name), least=1.0)
            assert error < BOUNDS["32-true"], f"{name} on rank {rank}"
    assert len(cut[0].looks["on_train_end"][0]) == 3 * 2
    assert len(cut[1].looks["on_train_end"][0]) == 0


class RecordsDtypes(Module):
    """Module that records dtype and shape of a weight in each validation step and in a hook after it."""

    def __init__(self):
        super().__init__(lars)
        self.recorded = []

    def validation_step(self, batch, batch_idx):
        self.record()
        return super().validation_step(batch, batch_idx)

    def record(self):
        self.recorded.append((self.net.fc6.weight.dtype, tuple(self.net.fc6.weight.shape)))

    on_validation_epoch_end = record


def recorded(trainer, module):
    return module.recorded


def test_validation_in_half_precision_computes_with_whole_half_weights_and_hooks_see_whole_fp32_ones(
    two_ranks,
):
    scene = {"num": 2, "val": partial(loader, 1), "callbacks": [at(on_train_end=recorded)]}
    for seen in fit(two_ranks, lars, "16-true", module=RecordsDtypes, **scene):
        assert seen.looks["on_train_end"] == [
            [(torch.float16, (16, 10)), (torch.float32, (16, 10))]
        ]


class Drops(Module):
    """Module that records which features of fc6 dropout keeps."""

    def __init__(self):
        super().__init__(sgd, dropout=0.5)
        self.masks = []
        self.net.dropout.register_forward_hook(
            lambda *call: self.masks.append((call[-1] != 0).float())
        )

    def on_fit_start(self):
        torch.manual_seed(5)  # the same stream on all ranks


def mask_and_number(trainer, module, *args):
    """Return the features of the last batch that dropout kept, and the next number of the global stream."""
    return module.masks[-1], float(torch.rand(()))


def masks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tanh", lambda x: x.abs() + 1)  # so only dropout creates zeros
        return fit(
            None, sgd, num=2, module=Drops, callbacks=[at(on_train_batch_end=mask_and_number)]
        )


def test_dropout_is_independent_on_the_slices_and_leaves_the_global_stream_alike(two_ranks):
    rank_0, rank_1 = (seen.looks["on_train_batch_end"] for seen in two_ranks.run(masks))
    masks_0 = torch.stack([mask for mask, _ in rank_0])
    masks_1 = torch.stack([mask for mask, _ in rank_1])
    assert masks_0.shape == (2, 2 * NUM_IMAGES, 16 // 2)
    # Independent masks keep a feature on both ranks in a quarter of all positions.
    assert abs(float((masks_0 * masks_1).mean()) - 0.25) < 0.1
    assert [number for _, number in rank_0] == [number for _, number in rank_1]


# ---- callbacks -------------------------------------------------------------------------------------------------------


def spoil(trainer, module, outputs, batch, batch_idx):
    """Change the trunk on one rank."""
    if batch_idx == 1 and this_rank() == 1:
        with torch.no_grad():
            module.net.trunk[0].weight[0, 0] += 1


def look_alone(trainer, module, *args):
    """Read the weights on rank zero only, as after an error on that rank."""
    if this_rank() == 0:
        with run_status(trainer).own_state():
            assert module.state_dict()["net.fc6.weight"].shape == (8, 10)


def test_the_check_of_replicas_compares_only_parameters_that_all_ranks_share(two_ranks):
    check = partial(ReplicaCheck, 1)
    alone = at(on_train_batch_end=look_alone)
    scene = {"num": 3, "raises": True}
    for seen in fit(two_ranks, sgd, "16-true", callbacks=[alone, check], **scene):
        assert seen.error == "", f"rank {seen.rank}"
    spoils = at(on_train_batch_end=spoil)
    for seen in fit(two_ranks, sgd, "16-true", callbacks=[alone, spoils, check], **scene):
        assert seen.error.startswith("ReplicaDriftError"), f"rank {seen.rank}"
        assert "`net.trunk.0.weight`" in seen.error, f"rank {seen.rank}"


# ---- errors ----------------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    """Subclass of a linear layer."""


class Gated(nn.Module):
    """Module with a normalization next to a linear layer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 16)
        self.norm = nn.LayerNorm(16)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (
            {"fc6": Doubled(10, 16)},
            r"^`fc6` \(=Doubled with weight, bias\) cannot be sliced by `node_slices`, which supports only",
        ),
        (
            {"fc6": identity(nn.Linear(10, 16), "weight")},
            r"^`fc6` \(=Linear with bias, weight_orig\) cannot be sliced",
        ),
        (
            {"fc6": Gated()},
            r"^`fc6` \(=Gated\) cannot be sliced by `node_slices`, because it has parameters outside",
        ),
        ({"also": "fc6"}, None),
        (
            {"fc6": nn.Linear(10, 15), "fc7": nn.Linear(15, 14)},
            r"^`out_features` of `fc6` \(=15\) must equal .* must be a multiple of the 2 ranks",
        ),
        (
            {"fc7": nn.Linear(18, 14)},
            r"^`out_features` of `fc6` \(=16\) must equal `in_features` of `fc7` \(=18\)",
        ),
        (
            {"fc6": nn.MultiheadAttention(16, 1), "fc7": nn.Linear(16, 14)},
            r"^`out_features` of `fc6` \(=16 in 1 heads\)",
        ),
        (
            {"fc8": nn.Embedding(8, 4, max_norm=1.0)},
            r"^`fc8` \(=Embedding with weight, max_norm\) cannot be sliced by `node_slices`",
        ),
    ],
)
def test_a_layer_that_cannot_be_cut_is_refused_by_name(layers, text):
    net = sliced.Net()
    for name, layer in layers.items():
        if isinstance(layer, str):
            layer = net.get_submodule(layer)
        setattr(net, name, layer)
    with nullcontext() if text is None else pytest.raises(ValueError, match=text):
        refusals.refuse_layers(net, net.node_slices, num_slices=2)


def test_a_layer_that_a_callback_prunes_is_refused_by_name():
    net = sliced.Net()
    pruned = refusals.pruned_layers(
        [ModelPruning("l1_unstructured", parameters_to_prune=[(net.fc7, "weight")])]
    )
    with pytest.raises(
        ValueError, match=r"^`fc7` \(=Linear with weight, bias, ModelPruning\) cannot be sliced"
    ):
        refusals.refuse_layers(net, net.node_slices, num_slices=2, pruned=pruned)


def test_a_weight_that_a_whole_layer_shares_or_that_is_cut_in_two_ways_is_refused():
    net = sliced.Net()
    net.other = nn.Linear(16, 14)
    net.fc9 = nn.Linear(16, 14)
    net.other.weight = net.fc7.weight
    for groups, name in ((net.node_slices, "other"), ((*net.node_slices, ("other",)), "fc7")):
        with pytest.raises(
            ValueError, match=rf"^`{name}` \(=Linear\) must not share its weight with a layer"
        ):
            refusals.refuse_layers(net, groups, num_slices=2)


def test_unknown_names_and_groups_of_three_are_refused():
    net = nn.ModuleDict({"fc8": nn.Linear(2, 2), "act": nn.ReLU()})
    texts = {
        "fc9": r"^`node_slices` \(=\('fc9',\)\) contains a name .* has no attribute `fc9`. Use .* .* \(fc8",
        "act": r"^`act` \(=ReLU\) cannot be sliced by `node_slices`, because it has no",
    }
    for name, text in texts.items():
        net.node_slices = ((name,),)
        with pytest.raises(ValueError, match=text):
            requested_layers(net)
    with pytest.raises(ValueError, match=r"a group must be the name of one layer or a pair"):
        refusals.refuse_layers(sliced.Net(), [("fc6", "fc7", "fc8")], num_slices=2)


def test_a_fit_is_refused_before_training(two_ranks):
    local_steps = LocalSteps(every=2)
    names = "[('net.fc6', 'net.fc7'), ('net.fc8',)]"
    expected = (
        f"ValueError: `between_nodes` (={local_steps!r}) and `node_slices` (={names}) "
        "cannot be combined"
    )
    for seen in fit(two_ranks, sgd, num=1, raises=True, between_nodes=local_steps):
        assert seen.error.startswith(expected), f"rank {seen.rank}"


def unfreeze(trainer, module):
    module.net.fc8.weight.requires_grad_(True)


def partly_frozen():
    module = Module(sgd)
    module.net.fc8.weight.requires_grad_(False)
    return module


def test_a_slice_that_is_unfrozen_in_the_fit_is_refused(two_ranks):
    scene = {
        "module": partly_frozen,
        "num": 1,
        "callbacks": [at(on_train_start=unfreeze)],
        "raises": True,
    }
    expected = (
        "RuntimeError: Parameter `net.fc8.weight` (shape (4, 14)) is trained but not averaged"
    )
    for seen in fit(two_ranks, sgd, **scene):
        assert seen.error.startswith(expected), f"rank {seen.rank}"


def state_on_rank_zero(folder):
    """Return the shapes of the module's state on both ranks, and the error of a call on rank zero only."""
    ended = Path(folder, "ended")
    shapes = []

    def take(trainer, module):
        time.sleep(0.2 * this_rank())
        shapes.append(module.state_dict()["net.fc6.weight"].shape)
        if trainer.is_global_zero:
            module.state_dict()
        end_s = time.monotonic() + 30
        # Both processes stay alive, because the end of a process would end the collective.
        while not ended.exists() and time.monotonic() < end_s:
            time.sleep(0.05)
        raise FloatingPointError("rank zero has ended" if ended.exists() else "rank zero waits")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_fit, "STATE_LIMIT_S", 1.0)
        trainer = toy.trainer(
            max_epochs=1, use_distributed_sampler=False, callbacks=[at(on_train_epoch_end=take)]
        )
        error = toy.error_of(trainer.fit, Module(sgd), loader(1))
    ended.touch()
    return shapes, error


def test_a_state_dict_on_rank_zero_alone_is_an_error_that_names_it(two_ranks, tmp_path):
    (shapes_0, error_0), (shapes_1, error_1) = two_ranks.run(state_on_rank_zero, str(tmp_path))
    assert shapes_0 == [(16, 10)], "whole if all ranks call it"
    assert shapes_1 == [(16, 10)], "whole if all ranks call it"
    expected = "RuntimeError: `state_dict()` must be called on all ranks, because the layers in `node_slices` (=['net."
    assert error_0.startswith(expected)
    assert "rank 1 did not call it within 1 s" in error_0
    assert error_1.startswith("FloatingPointError: rank zero has ended")


def shape_of_fc6(trainer, module):
    return module.net.fc6.weight.shape


@pytest.mark.long
def test_a_node_of_one_rank_has_whole_layers_with_a_warning(two_ranks):
    scene = {"num": 1, "callbacks": [at(on_train_start=shape_of_fc6)], "warns": True}
    for rank, seen in enumerate(fit(two_ranks, sgd, ranks_per_node=1, **scene)):
        assert seen.looks["on_train_start"] == [(16, 10)], f"rank {rank}"
        is_warned = any(
            "has no effect, because every node has one rank" in text for text in seen.warnings
        )
        assert is_warned == (rank == 0), f"rank {rank}"
