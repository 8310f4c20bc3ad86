"""Layers cut over the ranks of a node in a fit: what whole layers would do, up to the order of additions."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.prune import identity

from lightning_hybrid import Comm, HybridAllReduceStrategy, LocalSteps
from lightning_hybrid.callbacks import MasterWeightAveraging, ReplicaCheck, TrainingMetrics
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.run_status import run_status
from lightning_hybrid.strategy.node_slices import refusals, slice_exchange
from lightning_hybrid.strategy.node_slices import sliced_fit as sliced_layers
from lightning_hybrid.strategy.node_slices.sliced_fit import SlicedFit
from tests import scenes, toy
from tests.checkout import ROOT
from tests.scenes import Keeps, Saves
from tests.strategy.node_slices import sliced
from tests.strategy.node_slices.sliced import (
    NUM_CLASSES,
    NUM_IMAGES,
    Module,
    adamw,
    both,
    difference,
    fit,
    lars,
    loader,
    sgd,
)

LONG = pytest.mark.long
BOUND = 1e-6  # fp32 has 6e-8; sums of a few dozen products in another order, over five steps


# In half precision gradients are rounded: of whole layers on each rank, of slices after the sum over a node.
BOUNDS = {"32-true": BOUND, "16-true": 4e-3, "bf16-true": 4e-2}
UNSEEN = {"module_options": {"looks": False}}  # all in one pass


def case(*values, is_long=True):
    return pytest.param(*values, marks=LONG) if is_long else values


@pytest.mark.parametrize(
    ("optimizer", "num_ranks", "ranks_per_node"),
    [
        case(lars, 2, 2, is_long=False),
        case(sliced.lamb, 4, 2, is_long=False),
        *[case(one, 2, 2) for one in (sgd, adamw, sliced.lars_lists, sliced.lars_joint, sliced.lamb_lists)],
        case(lars, 4, 4),
        case(lars, 4, 2),
    ],
)
def test_gradients_and_steps_are_those_of_whole_layers(rank_pool, optimizer, num_ranks, ranks_per_node):
    kwargs = {"options": {"ranks_per_node": ranks_per_node}}
    for found, _, is_whole in rank_pool.ranks(num_ranks).run(both, optimizer, "32-true", kwargs):
        assert max(found.values()) < BOUND, found
        assert is_whole  # every layer is again what it was


OVERFLOWS = {"module_options": {"looks": False, "overflows": (1, 2)}}  # in one slice
ACCUMULATES = UNSEEN | {"accumulate_grad_batches": 2, "num": 6}
CLIPS = UNSEEN | {"gradient_clip_val": 0.01}
CLIPS_VALUES = UNSEEN | {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
PENALISES = {"module_options": {"penalty": 0.1}}
PENALISES_UNSEEN = {"module_options": {"penalty": 0.1, "looks": False}}


@pytest.mark.parametrize(
    ("optimizer", "precision", "num_ranks", "kwargs"),
    [
        case(lars, "16-true", 2, OVERFLOWS, is_long=False),
        case(sgd, "32-true", 2, ACCUMULATES, is_long=False),
        case(sgd, "32-true", 2, CLIPS, is_long=False),
        case(sgd, "32-true", 4, PENALISES, is_long=False),
        case(lars, "16-true", 2, UNSEEN),
        case(lars, "16-true", 2, {}),
        case(sliced.lamb, "16-true", 2, UNSEEN),
        case(sgd, "16-true", 2, UNSEEN),
        case(lars, "bf16-true", 2, UNSEEN),
        case(sgd, "16-true", 2, OVERFLOWS),
        case(lars, "16-true", 4, OVERFLOWS),
        case(sliced.lars_lists, "16-true", 4, OVERFLOWS),
        case(sgd, "32-true", 2, CLIPS_VALUES),
        case(sgd, "16-true", 2, ACCUMULATES),
        case(sgd, "16-true", 2, CLIPS),
        case(sgd, "32-true", 2, PENALISES),
        case(sgd, "16-true", 4, PENALISES_UNSEEN),
        case(sgd, "bf16-true", 4, PENALISES_UNSEEN),
    ],
)
def test_weights_are_those_of_whole_layers_but_for_rounding(rank_pool, optimizer, precision, num_ranks, kwargs):
    """In half precision; with the trainer's options; with steps that all skip; with a penalty on weights."""
    kwargs = {"options": {"ranks_per_node": 2}, **kwargs}
    for found, skipped, _ in rank_pool.ranks(num_ranks).run(both, optimizer, precision, kwargs):
        names = ("weights", "gradients") if "penalty" in kwargs.get("module_options", {}) else ("weights",)
        assert max(found[name] for name in names) < BOUNDS[precision], found
        assert skipped == (2 if "overflows" in kwargs.get("module_options", {}) else 0)


@pytest.mark.long
def test_gradients_travel_between_nodes_in_the_dtype_of_the_wire(four_ranks):
    kwargs = UNSEEN | {"options": {"ranks_per_node": 2, "comm": Comm(tune="off", dtype="float16")}}
    for found, _, _ in four_ranks.run(both, sgd, "32-true", kwargs):
        assert BOUND < found["weights"] < BOUNDS["16-true"], found


# ---- state and validation --------------------------------------------------------------------------------------------


def fit_and_resume(path, optimizer, precision):
    """Two epochs with slices; the second of them again, with slices and whole; and what is in the file."""
    settings = {"num": 3, "max_epochs": 2, "module_options": {"looks": False}}
    straight = fit(optimizer, precision, True, callbacks=[Saves(path, epoch=0)], **settings)
    dist.barrier()  # rank zero has written
    resumed, whole = (fit(optimizer, precision, is_cut, ckpt_path=path, **settings) for is_cut in (True, False))
    saved = torch.load(path, weights_only=True)
    shapes = {name: tuple(value.shape) for name, value in saved["state_dict"].items()}
    expected = {name: tuple(value.shape) for name, value in Module(optimizer).state_dict().items()}
    parameters = [tuple(one.shape) for one in Module(optimizer).parameters()]
    state = saved["optimizer_states"][0]["state"]
    is_whole_state = sorted(tuple(one["momentum_buffer"].shape) for one in state.values()) == sorted(parameters)
    return {
        "same names and shapes": shapes == expected and is_whole_state,
        "resumed to the bit": toy.same_bits(resumed["weights"], straight["weights"])
        and difference(resumed["state"], straight["state"]) == 0,
        "whole": difference(whole["weights"], straight["weights"], least=1.0),
        "state of the whole": difference(whole["state"], straight["state"], least=1.0),
    }


@pytest.mark.parametrize(
    ("optimizer", "precision", "num_ranks"),
    [
        case(lars, "16-true", 2, is_long=False),
        case(sgd, "32-true", 2),
        case(sliced.lars_lists, "bf16-true", 2),
        case(lars, "32-true", 4),
    ],
)
def test_a_checkpoint_is_whole_and_a_run_goes_on_to_the_bit(rank_pool, tmp_path, optimizer, precision, num_ranks):
    bound = BOUNDS[precision]
    for found in rank_pool.ranks(num_ranks).run(fit_and_resume, str(tmp_path / "first.ckpt"), optimizer, precision):
        assert found["same names and shapes"]
        assert found["resumed to the bit"]
        assert found["whole"] < bound
        assert found["state of the whole"] < 4 * bound


def going_on(ranks, strategy, path, is_cut):
    scene = {"train": partial(loader, 3), "use_distributed_sampler": False, "ckpt_path": path}
    return scenes.fit(ranks, partial(Module, sgd, is_cut, looks=False), strategy=strategy, **scene)[0].weights


@pytest.mark.long
def test_a_checkpoint_of_slices_goes_on_under_ddp_and_on_other_numbers_of_ranks(two_ranks, four_ranks, tmp_path):
    path = tmp_path / "first.ckpt"
    scene = {"train": partial(loader, 3), "use_distributed_sampler": False, "max_epochs": 1, "save_to": path}
    scenes.fit(two_ranks, partial(Module, sgd, looks=False), **scene)
    for ranks in (two_ranks, four_ranks):
        under_ddp, cut = (
            going_on(ranks, *of, path, is_cut) for *of, is_cut in (("ddp", False), ("hybrid_allreduce", True))
        )
        assert difference(cut, under_ddp) < BOUND


def uneven_loader():
    """Other numbers of images, and of batches, on each rank."""
    images = sliced.images_of(2, rank=7 + dist.get_rank())[: 11 - 7 * dist.get_rank()]
    return torch.utils.data.DataLoader(images, batch_size=4)


def validated(precision, averages):
    def one(is_cut):
        callbacks = [MasterWeightAveraging(decay=0.5)] if averages else []
        options = {"looks": False}
        return fit(
            lars, precision, is_cut, val=uneven_loader(), callbacks=callbacks, module_options=options, max_epochs=2
        )

    whole, cut = one(False), one(True)
    found = {name: difference(cut[name], whole[name], least=1.0) for name in ("validated", "metrics", "weights")}
    return found, len(cut["validated"])


@pytest.mark.parametrize(
    ("precision", "averages"), [case("32-true", True, is_long=False), case("32-true", False), case("16-true", True)]
)
def test_validation_takes_any_number_of_images_and_the_average_where_there_is_one(two_ranks, precision, averages):
    counts = []
    for found, count in two_ranks.run(validated, precision, averages):
        assert max(found.values()) < BOUNDS[precision], found
        counts.append(count)
    assert counts == [2 * 3, 2 * 1]  # two epochs: it was the layers that were whole, as ranks had other counts


class Draws(Module):
    """Rank zero alone runs the module in its own hooks at the end of validation, and all compare what they find."""

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero:
            self.validated.append(self.net(torch.ones(1, sliced.NUM_INPUTS)).detach())

    def on_validation_end(self):
        self.on_validation_epoch_end()


def drawn(averages):
    found = []
    for is_cut in (False, True):
        module = Draws(sgd, is_cut, looks=False)
        callbacks = [MasterWeightAveraging(decay=0.5)] if averages else []
        strategy = HybridAllReduceStrategy(comm=Comm(tune="off"), timeout=timedelta(seconds=10))
        # With the sanity check: training goes on with slices after it.
        toy.trainer(strategy=strategy, max_epochs=2, num_sanity_val_steps=1, callbacks=callbacks).fit(
            module, loader(2), loader(1)
        )
        found.append([module.validated, toy.weights(module)])
    return difference(*found, least=1.0), len(found[1][0])


@pytest.mark.parametrize("averages", [True, pytest.param(False, marks=LONG)])
def test_rank_zero_can_run_the_module_in_its_hooks_at_the_end_of_validation(two_ranks, averages):
    for rank, (found, count) in enumerate(two_ranks.run(drawn, averages)):
        assert found < BOUND
        assert count == 3 * (1 if rank else 3)


class Masks(pl.Callback):
    """Which features of fc6 dropout leaves, in each step; and a number of the stream behind the pair."""

    def __init__(self):
        self.masks, self.numbers = [], []

    def on_fit_start(self, trainer, pl_module):
        pl_module.net.dropout.register_forward_hook(lambda *call: self.masks.append((call[-1] != 0).float()))
        torch.manual_seed(5)  # the same stream on all ranks

    def on_train_batch_end(self, *_):
        self.numbers.append(float(torch.rand(())))


def masks():
    seen = Masks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tanh", lambda x: x.abs() + 1)  # zeros are of dropout alone
        fit(sgd, "32-true", True, num=2, callbacks=[seen], module_options={"looks": False, "dropout": 0.5})
    return torch.stack(seen.masks), seen.numbers


def test_dropout_takes_other_features_out_of_each_slice(two_ranks):
    (first, numbers), (second, others) = two_ranks.run(masks)
    assert first.shape == (2, 2 * NUM_IMAGES, 16 // 2)
    assert not torch.equal(first, second)
    assert abs(float((first * second).mean()) - 0.25) < 0.1  # independent: both are there in a quarter of all places
    assert numbers == others  # outside the stream goes on as it was


# ---- what is sent ----------------------------------------------------------------------------------------------------


class AtTheEnd(pl.Callback):
    """The sum of a list after the last step, before layers are gathered."""

    def __init__(self, counts):
        self.counts, self.total = counts, 0

    def on_train_end(self, *_):
        self.total = sum(self.counts)


def collectives():
    """Bytes that a rank sends in the node in one step for its layers, and sums of LARS and verdicts in a fit."""
    sent, sums = [], []
    size = dist.get_world_size()
    gather, exchange, add = slice_exchange.all_gather, dist.all_to_all_single, SlicedFit.add_up_
    with pytest.MonkeyPatch.context() as patch:

        def gathers(whole, own, group):
            if own.is_floating_point():
                sent.append((size - 1) * own.numel() * own.element_size())
            gather(whole, own, group=group)

        def exchanges(arrived, parts, group):
            sent.append((size - 1) * parts.numel() * parts.element_size() // size)
            exchange(arrived, parts, group=group)

        def adds(self, table):
            sums.append("sum")
            add(self, table)

        patch.setattr(slice_exchange, "all_gather", gathers)
        patch.setattr(dist, "all_to_all_single", exchanges)
        patch.setattr(SlicedFit, "add_up_", adds)
        patch.setattr(SlicedFit, "largest", lambda self, value: sums.append("verdict") or value)
        counts = AtTheEnd(sent)
        fit(lars, "16-true", True, num=4, module_options={"looks": False}, callbacks=[counts])
    return counts.total, sums


def test_a_step_sends_images_and_logits_and_one_sum_of_squares(four_ranks):
    of_the_pair, of_the_head = 10 + 14, 14 + NUM_CLASSES / 4
    expected = 4 * 2 * (4 - 1) * NUM_IMAGES * (of_the_pair + of_the_head) * 2  # four steps, fp16
    assert four_ranks.run(collectives) == [(expected, ["sum"] * 4)] * 4


# ---- callbacks -------------------------------------------------------------------------------------------------------


class Spoils(pl.Callback):
    """A trunk that differs on one rank."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1 and dist.get_rank() == 1:
            with torch.no_grad():
                pl_module.net.trunk[0].weight[0, 0] += 1


class LooksAlone(pl.Callback):
    """A state dict that rank zero takes alone, as where numbers went wrong on it."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if dist.get_rank() == 0:
            with run_status(trainer).own_state():
                assert pl_module.state_dict()["net.fc6.weight"].shape == (8, 10)


def checked(spoils):
    callbacks = [LooksAlone(), *([Spoils()] if spoils else []), ReplicaCheck(1)]
    return toy.error_of(fit, sgd, "16-true", True, num=3, callbacks=callbacks, module_options={"looks": False})


def test_the_check_of_replicas_compares_what_all_ranks_have(two_ranks):
    assert two_ranks.run(checked, False) == ["", ""]
    for error in two_ranks.run(checked, True):
        assert error.startswith("ReplicaDriftError")
        assert "`net.trunk.0.weight`" in error


def logged_ratios(is_cut):
    keeps = Keeps()
    settings = {"callbacks": [TrainingMetrics(skip_steps=0)], "logger": keeps, "log_every_n_steps": 1}
    fit(lars, "32-true", is_cut, module_options={"looks": False}, **settings)
    return [value for name in m.trust_ratios_of_group(0) for value in keeps.column(name).values()]


@pytest.mark.long
def test_trust_ratios_that_are_logged_are_those_of_whole_layers(two_ranks):
    whole, cut = (two_ranks.run(logged_ratios, is_cut)[0] for is_cut in (False, True))
    assert len(whole) == 3 * 5
    assert cut == pytest.approx(whole, rel=1e-5)


# ---- refusals --------------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    """A layer that is no plain one."""


def net_with(**layers):
    net = sliced.Net()
    for name, layer in layers.items():
        setattr(net, name, net.get_submodule(layer) if isinstance(layer, str) else layer)
    return net


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ({"fc6": Doubled(10, 16)}, r"^`fc6` \(=Doubled\) must be a torch.nn.Linear"),
        ({"fc6": identity(nn.Linear(10, 16), "weight")}, r"^`fc6` \(with the parameters bias, weight_orig\) must have"),
        ({"also": "fc6"}, "^`fc6` must be in one place to be cut"),
        (
            {"fc6": nn.Linear(10, 15), "fc7": nn.Linear(15, 14)},
            r"^`out_features` of `fc6` \(=15\) must be a multiple of",
        ),
        ({"fc7": nn.Linear(18, 14)}, r"^`out_features` of `fc6` \(=16\) must be `in_features` of `fc7` \(=18\)"),
    ],
)
def test_a_layer_that_cannot_be_cut_is_refused_by_name(layers, text):
    net = net_with(**layers)
    with pytest.raises(ValueError, match=text):
        refusals.refuse_layers(net, net.node_slices, num_slices=2)


def test_names_that_there_are_not_and_groups_of_three_are_refused():
    with pytest.raises(ValueError, match=r"^`fc9` in `node_slices` \(=\[\('fc9',\)\]\) must .* are fc8: write"):
        refusals.refuse_unknown_names(nn.ModuleDict({"fc8": nn.Linear(2, 2)}), [("fc9",)])
    with pytest.raises(ValueError, match=r"must have groups of two names"):
        refusals.refuse_layers(sliced.Net(), [("fc6", "fc7", "fc8")], num_slices=2)


def fit_with(options):
    return toy.error_of(fit, sgd, "32-true", True, num=1, options=options)


@pytest.mark.parametrize(("name", "value"), [("shard_update", "node"), ("between_nodes", LocalSteps(every=2))])
def test_a_fit_is_refused_before_training(two_ranks, name, value):
    for error in two_ranks.run(fit_with, {name: value}):
        names = "[('net.fc6', 'net.fc7'), ('net.fc8',)]"
        assert error.startswith(f"ValueError: `{name}` (={value!r}) and `node_slices` (={names}) exclude each other")


def unfreeze(trainer, module):
    module.net.fc8.weight.requires_grad_(True)


def partly_frozen():
    module = Module(sgd, looks=False)
    module.net.fc8.weight.requires_grad_(False)
    return module


def test_a_slice_that_is_unfrozen_in_the_fit_is_refused(two_ranks):
    scene = {"train": partial(loader, 1), "use_distributed_sampler": False, "max_epochs": 1, "raises": True}
    for seen in scenes.fit(two_ranks, partly_frozen, callbacks=[scenes.at(on_train_start=unfreeze)], **scene):
        words = "RuntimeError: Parameter `net.fc8.weight` (shape (4, 14)) is trained but not averaged"
        assert seen.error.startswith(words)


class TakesState(pl.Callback):
    """Takes the module's state on both ranks, the second a little later, and then on rank zero alone."""

    def __init__(self, folder):
        self.ended = Path(folder, "ended")

    def on_train_epoch_end(self, trainer, pl_module):
        time.sleep(0.2 * dist.get_rank())
        self.shape = pl_module.state_dict()["net.fc6.weight"].shape
        if trainer.is_global_zero:
            pl_module.state_dict()
        end_s = time.monotonic() + 30
        while (
            not self.ended.exists() and time.monotonic() < end_s
        ):  # no process ends here, which would end a collective
            time.sleep(0.05)
        raise FloatingPointError("rank zero has ended" if self.ended.exists() else "rank zero waits")


def state_on_rank_zero(folder):
    sliced_layers.STATE_LIMIT_S, before = 1.0, sliced_layers.STATE_LIMIT_S
    callback = TakesState(folder)
    trainer = toy.trainer(max_epochs=1, use_distributed_sampler=False, callbacks=[callback])
    error = toy.error_of(trainer.fit, Module(sgd, looks=False), loader(1))
    sliced_layers.STATE_LIMIT_S = before
    callback.ended.touch()
    return callback.shape, error


def test_a_state_dict_on_rank_zero_alone_is_told_by_its_name(two_ranks, tmp_path):
    zero, one = two_ranks.run(state_on_rank_zero, str(tmp_path))
    assert zero[0] == one[0] == (16, 10), "whole, where all ranks call it"
    assert zero[1].startswith(
        "RuntimeError: `state_dict()` must be called on all ranks: layers of `node_slices` (=['net."
    )
    assert "rank 1 did not call it within 1 s" in zero[1]
    assert one[1].startswith("FloatingPointError: rank zero has ended")


def uneven_batches():
    return loader(1, size=NUM_IMAGES - dist.get_rank())


@pytest.mark.long
def test_ranks_with_other_numbers_of_images_are_named_in_training(two_ranks):
    scene = {"module": one_module, "train": uneven_batches, "max_epochs": 1, "use_distributed_sampler": False}
    for seen in scenes.fit(two_ranks, raises=True, **scene):
        assert "must have the same size on all ranks that share a layer, and they have [6, 5]" in seen.error


def one_module(num_classes=NUM_CLASSES):
    module = Module(sgd, looks=False)
    if num_classes != NUM_CLASSES:
        module.net.fc8 = nn.Linear(14, num_classes)
    return module


def kinds(trainer, module):
    return [type(one).__name__ for one in (module.net.fc6, module.net.fc8)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "ranks_per_node", "expected", "words"),
    [
        (one_module, 1, ["Linear", "Linear"], "cuts nothing: every node has one rank"),
        (partial(one_module, 9), 2, ["ColumnSlicedLinear", "Linear"], "has 9 classes, which"),
    ],
    ids=["one rank on each node", "classes that do not divide"],
)
def test_what_cannot_be_cut_stays_whole_with_a_warning(two_ranks, module, ranks_per_node, expected, words):
    scene = {"module": module, "train": partial(loader, 1), "max_epochs": 1, "use_distributed_sampler": False}
    scene |= {"ranks_per_node": ranks_per_node, "callbacks": [scenes.at(on_train_start=kinds)], "warns": True}
    for rank, seen in enumerate(scenes.fit(two_ranks, **scene)):
        assert seen.looks["on_train_start"] == [expected]
        assert any(words in text for text in seen.warnings) == (rank == 0)


@pytest.mark.parametrize("file", ["alexnet", "alexnet_bn", "alexnet_bn_imagenet"])
def test_every_alexnet_of_the_recipes_has_the_key(file):
    assert "\nslice_fc: off" in (ROOT / "conf" / "model" / f"{file}.yaml").read_text()
