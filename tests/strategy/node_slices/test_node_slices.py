"""Layers cut over the ranks of a node in a fit: what whole layers would do, up to the order of additions."""

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
# fp32 has 6e-8, and adds a few dozen products in another order, over five steps. In half precision gradients are
# rounded: of whole layers on each rank, of slices after the sum over a node.
BOUNDS = {"32-true": 1e-6, "16-true": 4e-3, "bf16-true": 4e-2, "bf16-mixed": 4e-2, None: 4e-3}
TWO = {"ranks_per_node": 2}
OVERFLOWS = TWO | {"special": {"overflows": (1, 2)}}
ACCUMULATES = TWO | {"accumulate_grad_batches": 2, "num": 6}
CLIPS = TWO | {"gradient_clip_val": 0.01}
CLIPS_VALUES = TWO | {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
PENALISES = TWO | {"special": {"penalty": 0.1}}
# Layers of several blocks, of which ranks have parts where they are not cut, and none of slices.
SHARES = TWO | {"shard_update": "node", "special": {"width": 6000, "overflows": (1, 2)}}
SHARES_WORLD = SHARES | {"shard_update": "world"}
SCALES = OVERFLOWS | {
    "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0))]
}


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
        *[
            pytest.param(*values, marks=LONG)
            for values in (
                *[
                    (one, "32-true", 2, TWO)
                    for one in (adamw, sliced.lars_joint, sliced.lamb_lists)
                ],
                (lars, "bf16-true", 4, {"ranks_per_node": 4}),
                (sliced.lars_lists, "16-true", 4, OVERFLOWS),
                (sgd, "32-true", 2, CLIPS_VALUES),
                (sliced.lars_lists, "16-true", 4, SHARES),
                *[
                    (one, "32-true", 4, TWO | {"shard_update": scope, "special": {"width": 6000}})
                    for one in (lars, sgd)
                    for scope in ("node", "world")
                ],
                (sliced.lars_lists, "16-true", 4, SHARES_WORLD),
                (sgd, "16-true", 4, TWO | {"between_nodes": Adasum()}),
                (lars, "bf16-mixed", 2, TWO),
                (sgd, None, 2, SCALES | {"gradient_clip_val": 0.01}),
                *[(sgd, "16-true", 2, scene) for scene in (ACCUMULATES, CLIPS)],
            )
        ],
    ],
)
def test_steps_are_those_of_whole_layers_but_for_rounding(
    rank_pool, optimizer, precision, num_ranks, scene
):
    for whole, cut in whole_and_cut(rank_pool.ranks(num_ranks), optimizer, precision, **scene):
        if precision == "32-true":
            # parts
            if "shard_update" in scene:
                shown = ("weights", "metrics")
            else:
                shown = ("weights", "metrics", "states")
            results = [difference(getattr(cut, of), getattr(whole, of)) for of in shown]
        else:  # what began at zero is mostly rounding, and small beside the others, whose norms are 0.2 to 4
            results = [difference(cut.weights, whole.weights, least=1.0)]
        assert max(results) < BOUNDS[precision], results
        assert cut.num_skipped == (2 if scene in (OVERFLOWS, SHARES, SHARES_WORLD) else 0)


@pytest.mark.long
def test_gradients_travel_between_nodes_in_the_dtype_of_the_wire(four_ranks):
    for dtype in ({"comm": Comm(dtype="float16")}, {"between_nodes": Mean(dtype="int8")}):
        for whole, cut in whole_and_cut(four_ranks, sgd, "32-true", **TWO, **dtype):
            assert BOUNDS["32-true"] < difference(cut.weights, whole.weights) < BOUNDS["16-true"]


@pytest.mark.long
def test_stochastic_weight_averaging_averages_slices(two_ranks):
    averages = [partial(StochasticWeightAveraging, 0.05, swa_epoch_start=1)]
    for whole, cut in whole_and_cut(two_ranks, sgd, "32-true", callbacks=averages, max_epochs=3):
        assert difference(cut.weights, whole.weights) < BOUNDS["32-true"]


def compiled(is_cut):
    module = Module(sgd, is_cut)
    module.net.compile(backend="eager")  # its graphs, without their minutes in a compiler
    return module


@pytest.mark.long
def test_a_compiled_network_trains_as_one_that_is_not(two_ranks):
    for whole, cut in zip(
        fit(two_ranks, sgd), fit(two_ranks, sgd, module=partial(compiled, True)), strict=True
    ):
        assert difference(cut.weights, whole.weights) < BOUNDS["32-true"]


# ---- state and validation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "precision", "num_ranks", "shares"),
    [
        (lars, "16-true", 2, {}),
        pytest.param(sgd, "32-true", 2, {}, marks=LONG),
        *[
            pytest.param(sliced.lamb, "16-true", 4, {"shard_update": on} | TWO, marks=LONG)
            for on in ("node", "world")
        ],
    ],
)
def test_a_checkpoint_is_whole_and_a_run_goes_on_to_the_bit(
    rank_pool, tmp_path, optimizer, precision, num_ranks, shares
):
    ranks = rank_pool.ranks(num_ranks)
    path = tmp_path / "first.ckpt"
    if shares:
        special = {"width": 6000}
    else:
        special = {}
    settings = {"num": 3, "max_epochs": 2, "special": special, **shares}
    straight = fit(ranks, optimizer, precision, callbacks=[Saves(path, epoch=0)], **settings)
    resumed, whole = (
        fit(ranks, optimizer, precision, is_cut, ckpt_path=path, **settings)
        for is_cut in (True, False)
    )
    for one, again, other in zip(straight, resumed, whole, strict=True):
        assert same([again.weights, again.states], [one.weights, one.states])
        assert difference(other.weights, one.weights, least=1.0) < BOUNDS[precision]
        assert shares or difference(other.states, one.states, least=1.0) < 4 * BOUNDS[precision]
    saved = torch.load(path, weights_only=True)
    module = Module(optimizer, **special)
    shapes = [
        {name: value.shape for name, value in each.items()}
        for each in (saved["state_dict"], module.state_dict())
    ]
    assert shapes[0] == shapes[1]
    if shares:
        key = "exp_avg"
    else:
        key = "momentum_buffer"
    momentum = [one[key].shape for one in saved["optimizer_states"][0]["state"].values()]
    assert sorted(momentum) == sorted(one.shape for one in module.parameters())


def uneven_loader():
    """Other numbers of images, and of batches, on each rank."""
    images = sliced.images_of(2, rank=7 + this_rank())[: 11 - 7 * this_rank()]
    return torch.utils.data.DataLoader(images, batch_size=4)


def output(trainer, module, outputs, *args):
    return float(outputs)


AVERAGES = partial(MasterWeightAveraging, decay=0.5)


def test_validation_takes_any_number_of_images_and_the_average(two_ranks):
    scene = {
        "val": uneven_loader,
        "callbacks": [AVERAGES, at(on_validation_batch_end=output)],
        "max_epochs": 2,
    }
    counts = []
    for whole, cut in whole_and_cut(two_ranks, lars, "32-true", **scene):
        for of in ("looks", "metrics", "weights"):
            assert difference(getattr(cut, of), getattr(whole, of), least=1.0) < BOUNDS["32-true"]
        counts.append(len(cut.looks["on_validation_batch_end"]))
    # two epochs: it was the layers that were whole, as ranks had other counts
    assert counts == [
        2 * 3,
        2 * 1,
    ]


class Draws(Module):
    """Rank zero alone runs the module in its own hooks at the end of validation."""

    def __init__(self, is_cut):
        super().__init__(sgd, is_cut)
        self.said = []

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero:
            self.said.append(self.net(torch.ones(1, sliced.NUM_INPUTS)).detach())

    on_validation_end = on_validation_epoch_end


def said(trainer, module):
    return module.said


def test_rank_zero_can_run_the_module_in_its_hooks_at_the_end_of_validation(two_ranks):
    # With the sanity check: training goes on with slices after it.
    scene = {"num": 2, "val": partial(loader, 1), "num_sanity_val_steps": 1, "max_epochs": 2}
    scene |= {"timeout": timedelta(seconds=10), "callbacks": [AVERAGES, at(on_train_end=said)]}
    whole, cut = (
        fit(two_ranks, sgd, module=partial(Draws, is_cut), **scene) for is_cut in (False, True)
    )
    for rank, (first, second) in enumerate(zip(whole, cut, strict=True)):
        assert (
            difference([second.looks, second.weights], [first.looks, first.weights], least=1.0)
            < BOUNDS["32-true"]
        )
        assert len(second.looks["on_train_end"][0]) == (0 if rank else 3 * 2)


class NotesDtypes(Module):
    """Notes dtype and shape of a weight in each validation step, and in a hook after it."""

    def __init__(self):
        super().__init__(lars)
        self.noted = []

    def validation_step(self, batch, batch_idx):
        self.note()
        return super().validation_step(batch, batch_idx)

    def note(self):
        self.noted.append((self.net.fc6.weight.dtype, tuple(self.net.fc6.weight.shape)))

    on_validation_epoch_end = note


def noted(trainer, module):
    return module.noted


def test_validation_in_half_precision_computes_with_whole_half_weights_and_hooks_see_whole_fp32_ones(
    two_ranks,
):
    scene = {"num": 2, "val": partial(loader, 1), "callbacks": [at(on_train_end=noted)]}
    for seen in fit(two_ranks, lars, "16-true", module=NotesDtypes, **scene):
        assert seen.looks["on_train_end"] == [
            [(torch.float16, (16, 10)), (torch.float32, (16, 10))]
        ]


class Drops(Module):
    """Callback that records the features of fc6 that dropout keeps, and a number drawn after the pair."""

    def __init__(self):
        super().__init__(sgd, dropout=0.5)
        self.masks = []
        self.net.dropout.register_forward_hook(
            lambda *call: self.masks.append((call[-1] != 0).float())
        )

    def on_fit_start(self):
        torch.manual_seed(5)  # the same stream on all ranks


def mask_and_number(trainer, module, *args):
    return module.masks[-1], float(torch.rand(()))


def masks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tanh", lambda x: x.abs() + 1)  # zeros are of dropout alone
        return fit(
            None, sgd, num=2, module=Drops, callbacks=[at(on_train_batch_end=mask_and_number)]
        )


def test_dropout_takes_other_features_out_of_each_slice(two_ranks):
    (first, numbers), (second, others) = (
        zip(*seen.looks["on_train_batch_end"], strict=True) for seen in two_ranks.run(masks)
    )
    first = torch.stack(first)
    second = torch.stack(second)
    assert first.shape == (2, 2 * NUM_IMAGES, 16 // 2)
    # independent: both are there in a quarter of all places
    assert abs(float((first * second).mean()) - 0.25) < 0.1
    assert numbers == others  # outside the stream goes on as it was


# ---- what is sent ----------------------------------------------------------------------------------------------------


# ---- callbacks -------------------------------------------------------------------------------------------------------


def spoil(trainer, module, outputs, batch, batch_idx):
    """The trunk on one rank."""
    if batch_idx == 1 and this_rank() == 1:
        with torch.no_grad():
            module.net.trunk[0].weight[0, 0] += 1


def look_alone(trainer, module, *args):
    """Look at the weights on rank zero only, as after an error there."""
    if this_rank() == 0:
        with run_status(trainer).own_state():
            assert module.state_dict()["net.fc6.weight"].shape == (8, 10)


def test_the_check_of_replicas_compares_what_all_ranks_have(two_ranks):
    check = partial(ReplicaCheck, 1)
    alone = at(on_train_batch_end=look_alone)
    for spoils in ([], [at(on_train_batch_end=spoil)]):
        for seen in fit(
            two_ranks, sgd, "16-true", num=3, callbacks=[alone, *spoils, check], raises=True
        ):
            assert seen.error.startswith("ReplicaDriftError") == bool(spoils)
            assert ("`net.trunk.0.weight`" in seen.error) == bool(spoils), seen.error


# ---- refusals --------------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    """A layer that is no plain one."""


class Gated(nn.Module):
    """A normalisation among what is cut."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 16)
        self.norm = nn.LayerNorm(16)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (
            {"fc6": Doubled(10, 16)},
            r"^`fc6` \(=Doubled with weight, bias\) must be a torch.nn.Linear",
        ),
        (
            {"fc6": identity(nn.Linear(10, 16), "weight")},
            r"^`fc6` \(=Linear with bias, weight_orig\) must be",
        ),
        (
            {"fc6": Gated()},
            r"^`fc6` \(=Gated\) must have no parameters except those of its linear layers",
        ),
        ({"also": "fc6"}, None),
        (
            {"fc6": nn.Linear(10, 15), "fc7": nn.Linear(15, 14)},
            r"^`out_features` of `fc6` \(=15\) must be a multiple",
        ),
        (
            {"fc7": nn.Linear(18, 14)},
            r"^`out_features` of `fc6` \(=16\) must .* and `in_features` of `fc7` \(=18\)",
        ),
        (
            {"fc6": nn.MultiheadAttention(16, 1), "fc7": nn.Linear(16, 14)},
            r"^`out_features` of `fc6` \(=16 in 1 heads\)",
        ),
        (
            {"fc8": nn.Embedding(8, 4, max_norm=1.0)},
            r"^`fc8` \(=Embedding with weight, max_norm\) must be a torch.nn",
        ),
    ],
)
def test_a_layer_that_cannot_be_cut_is_refused_by_name(layers, text):
    net = sliced.Net()
    for name, layer in layers.items():
        setattr(net, name, net.get_submodule(layer) if isinstance(layer, str) else layer)
    with nullcontext() if text is None else pytest.raises(ValueError, match=text):
        refusals.refuse_layers(net, net.node_slices, num_slices=2)


def test_a_layer_that_a_callback_prunes_is_refused_by_name():
    net = sliced.Net()
    pruned = refusals.pruned_layers(
        [ModelPruning("l1_unstructured", parameters_to_prune=[(net.fc7, "weight")])]
    )
    with pytest.raises(
        ValueError, match=r"^`fc7` \(=Linear with weight, bias, ModelPruning\) must be a torch"
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


def test_names_that_there_are_not_and_groups_of_three_are_refused():
    net = nn.ModuleDict({"fc8": nn.Linear(2, 2), "act": nn.ReLU()})
    texts = {
        "fc9": r"^`node_slices` \(=\('fc9',\)\) must be names .* has no attribute `fc9`. Its linear layers are fc8",
        "act": r"^`act` \(=ReLU\) in `node_slices` must define how it is sliced",
    }
    for name, text in texts.items():
        net.node_slices = ((name,),)
        with pytest.raises(ValueError, match=text):
            requested_layers(net)
    with pytest.raises(ValueError, match=r"must have groups of one name, or of two names"):
        refusals.refuse_layers(sliced.Net(), [("fc6", "fc7", "fc8")], num_slices=2)


def test_a_fit_is_refused_before_training(two_ranks):
    for seen in fit(
        two_ranks, sgd, num=1, raises=True, between_nodes=(value := LocalSteps(every=2))
    ):
        names = "[('net.fc6', 'net.fc7'), ('net.fc8',)]"
        words = f"ValueError: `between_nodes` (={value!r}) and `node_slices` (={names}) cannot be combined"
        assert seen.error.startswith(words)


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
    for seen in fit(two_ranks, sgd, **scene):
        words = (
            "RuntimeError: Parameter `net.fc8.weight` (shape (4, 14)) is trained but not averaged"
        )
        assert seen.error.startswith(words)


def state_on_rank_zero(folder):
    """The module's state on both ranks, the second a little later, and then on rank zero alone."""
    ended = Path(folder, "ended")
    shapes = []

    def take(trainer, module):
        time.sleep(0.2 * this_rank())
        shapes.append(module.state_dict()["net.fc6.weight"].shape)
        if trainer.is_global_zero:
            module.state_dict()
        end_s = time.monotonic() + 30
        # no process ends here, which would end a collective
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


def test_a_state_dict_on_rank_zero_alone_is_told_by_its_name(two_ranks, tmp_path):
    zero, one = two_ranks.run(state_on_rank_zero, str(tmp_path))
    assert zero[0] == one[0] == [(16, 10)], "whole, where all ranks call it"
    words = "RuntimeError: `state_dict()` must be called on all ranks, because layers of `node_slices` (=['net."
    assert zero[1].startswith(words)
    assert "rank 1 did not call it within 1 s" in zero[1]
    assert one[1].startswith("FloatingPointError: rank zero has ended")


def shape_of_fc6(trainer, module):
    return module.net.fc6.weight.shape


@pytest.mark.long
def test_a_node_of_one_rank_has_whole_layers_with_a_warning(two_ranks):
    looks = at(on_train_start=shape_of_fc6)
    for rank, seen in enumerate(
        fit(two_ranks, sgd, num=1, callbacks=[looks], warns=True, ranks_per_node=1)
    ):
        assert seen.looks["on_train_start"] == [(16, 10)]
        assert any(
            "has no effect, because every node has one rank" in text for text in seen.warnings
        ) == (rank == 0)
