"""Callbacks with `shard_update`: averages, the replica check, metrics, and writes outside of a step."""

import copy
import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from lightning_hybrid.callbacks import MasterWeightAveraging, ReplicaCheck
from tests.scenes import Saves, at, same, this_rank
from tests.strategy.shard_update.shared import (
    Sizes,
    adamw,
    assert_same,
    batches,
    fit,
    sgd,
    weights_of,
)
from tests.strategy.shard_update.test_sharded_fit import lars

LONG = pytest.mark.long


def averages(ranks, shard_update, ema, path):
    callbacks = [
        at(on_validation_epoch_end=weights_of),
        partial(ema, decay=0.75),
        Saves(path, epoch=1),
    ]
    scene = {
        "num": 2,
        "val": partial(batches, 1),
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
        "callbacks": callbacks,
    }
    observations = [
        [seen.weights, seen.looks] for seen in fit(ranks, sgd, "16-true", shard_update, **scene)
    ]
    file = torch.load(path, weights_only=True)
    return observations, file["state_dict"], file["current_model_state"]


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize(
    "ema", [MasterWeightAveraging, pytest.param(pl.callbacks.EMAWeightAveraging, marks=LONG)]
)
def test_averages_of_parts_are_those_of_whole_master_weights(two_ranks, ema, tmp_path):
    whole = averages(two_ranks, "off", ema, tmp_path / "ema.ckpt")
    shared = averages(two_ranks, "node", ema, tmp_path / "ema.ckpt")
    assert same(whole, shared)


@torch.no_grad()
def spoil(rank, kind, trainer, module, outputs, batch, batch_idx):
    if batch_idx == 0 and this_rank() == rank:
        weight = module.weights[6]
        if kind == "master":
            trainer.strategy.run_status.master_parts[id(weight)][7] *= 1 + 2**-20
        if kind == "momentum":
            trainer.optimizers[0].state[weight]["momentum_buffer"][7] += 1.0


def fit_with_check(ranks, precision, spoiled):
    callbacks = [at(on_train_batch_end=partial(spoil, 3, spoiled)), partial(ReplicaCheck, 1)]
    options = {"callbacks": callbacks, "ranks_per_node": 2, "num": 2, "raises": True}
    return fit(ranks, sgd, precision, **options)


@pytest.mark.parametrize(
    ("spoiled", "precision", "named"),
    [
        ("master", "16-true", "the fp32 values of"),
        ("momentum", "32-true", "`momentum_buffer` of the optimizer for"),
    ],
)
def test_the_check_of_replicas_names_a_part_that_differs_from_that_of_another_node(
    four_ranks, spoiled, precision, named
):
    for seen in fit_with_check(four_ranks, precision, spoiled):
        error = seen.error
        assert error.startswith("ReplicaDriftError: The ranks no longer have the same weights")
        assert f": elements {0 if '0 to' in error else 49152} to" in error
        assert named in error
        assert "`weights.6` on rank 3 (host " in error
        assert "differs from its value on rank 1 (host " in error


def test_the_check_of_replicas_accepts_parts_that_agree_between_nodes(four_ranks):
    for seen in fit_with_check(four_ranks, "16-true", spoiled=""):
        assert seen.error == "", f"rank {seen.rank}"


def write_data(module):
    # Half precision can represent these values: a rank could not halve the fp32 values of other ranks' shards.
    weight = module.weights[-2]
    weight.data.copy_(weight.detach().to(torch.float16) * 0.5)


@torch.no_grad()
def copy_in_place(module):
    weight = module.weights[4]
    weight.copy_(torch.linspace(4, 8, 64).half().repeat(len(weight) // 64 + 1)[: len(weight)])


@torch.no_grad()
def clamp(module):
    module.weights[6].clamp_(2.0, 4.0)


def load_exact_values(module):
    module.load_state_dict(
        {"weights.5": torch.linspace(0, 1, module.weights[5].numel())}, strict=False
    )


def load_its_own_state_dict(module):
    module.load_state_dict(module.state_dict())


def write_and_save(do, path, trainer, module, outputs, batch, batch_idx):
    if batch_idx == 1:
        do(module)
        trainer.save_checkpoint(path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("precision", "scope"),
    [
        ("16-true", {"shard_update": "node"}),
        ("16-true", {"shard_update": "world", "ranks_per_node": 1}),
        pytest.param("32-true", {"shard_update": "node"}, marks=LONG),
    ],
)
@pytest.mark.parametrize(
    "do", [write_data, copy_in_place, clamp, load_exact_values, load_its_own_state_dict]
)
def test_a_write_between_steps_is_in_the_next_checkpoint_and_in_the_next_step(
    two_ranks, do, precision, scope, tmp_path
):
    files = []
    weights = []
    for setting in ("off", scope["shard_update"]):
        path = tmp_path / f"{setting}.ckpt"
        write = partial(write_and_save, do, path)
        callbacks = [at(on_train_batch_end=write, on_train_batch_start=weights_of)]
        options = {**scope, "shard_update": setting, "callbacks": callbacks, "num": 3}
        runs = fit(two_ranks, sgd, precision, **options)
        files.append(torch.load(path, weights_only=True)["state_dict"])
        weights.append([(seen.weights, seen.looks["on_train_batch_start"]) for seen in runs])
    assert same(*files)
    assert same(*weights)


def load_momentum(trainer, module, outputs, batch, batch_idx):
    """Load optimizer state in a callback, first the optimizer's own and then whole tensors as from a file."""
    optimizer = trainer.optimizers[0]
    if batch_idx == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    if batch_idx == 1:
        state = optimizer.state_dict()
        for index, parameter in enumerate(module.parameters()):
            momentum = torch.linspace(0, 1, parameter.numel()).view(parameter.shape)
            state["state"][index]["momentum_buffer"] = momentum
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("precision", ["16-true", pytest.param("32-true", marks=LONG)])
def test_optimizer_state_that_a_callback_loads_stays_in_fp32(two_ranks, precision):
    assert_same(two_ranks, sgd, precision, callbacks=[at(on_train_batch_end=load_momentum)])


def swa():
    return pl.callbacks.StochasticWeightAveraging(
        swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1
    )


@pytest.mark.filterwarnings(
    "ignore:Found keys that are not in the model state dict but in the checkpoint"
)
@pytest.mark.long
def test_stochastic_weight_averaging_averages_whole_master_weights(two_ranks):
    scene = {"num": 2, "max_epochs": 3, "callbacks": [swa]}
    whole = fit(two_ranks, sgd, "16-true", "off", **scene)
    shared = fit(two_ranks, sgd, "16-true", "node", **scene)
    for rank, seen in enumerate(shared):
        assert same(seen.weights, whole[rank].weights), f"rank {rank}"


def call_in_a_hook(trainer, module, outputs, batch, batch_idx):
    """Call the module from a callback, in the context of a step."""
    with torch.no_grad(), trainer.precision_plugin.forward_context():
        return module.training_step(batch, batch_idx).float()


@pytest.mark.parametrize(
    "scope", [{"shard_update": "node"}, {"shard_update": "world", "ranks_per_node": 1}]
)
def test_a_call_between_steps_in_the_context_of_one_gives_the_same(two_ranks, scope):
    scene = {**scope, "num": 2, "callbacks": [at(on_train_batch_end=call_in_a_hook)]}
    whole = fit(two_ranks, sgd, "16-true", **scene | {"shard_update": "off"})
    shared = fit(two_ranks, sgd, "16-true", **scene)
    for rank, seen in enumerate(shared):
        assert same(seen.looks, whole[rank].looks), f"rank {rank}"


class StepsBySelf(Sizes):
    """Module whose manual loop calls the wrapped torch optimizer directly, with a closure in every other step."""

    def __init__(self, *args, has_closures=True, **options):
        super().__init__(*args, **options)
        self.automatic_optimization = False
        self.has_closures = has_closures

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)

        def closure():
            optimizer.zero_grad()
            loss = Sizes.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        if batch_idx % 2 and self.has_closures:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize(
    "scope", [{"shard_update": "node"}, {"shard_update": "world", "ranks_per_node": 1}]
)
def test_a_step_past_lightning_runs_on_the_parts(two_ranks, scope):
    assert_same(two_ranks, sgd, "16-true", module=partial(StepsBySelf, sgd), **scope)


def test_a_step_past_lightning_runs_on_the_parts_of_fp32_parameters(two_ranks):
    assert_same(two_ranks, sgd, "32-true", module=partial(StepsBySelf, sgd, has_closures=False))
    expected = "RuntimeError: `closure` cannot be passed to SGD.step directly"
    for seen in fit(two_ranks, sgd, "32-true", module=partial(StepsBySelf, sgd), raises=True):
        assert seen.error.startswith(expected), f"rank {seen.rank}"


def copies(trainer, module, *args):
    """Return the rounded values of copies and state dicts of the module, and their dtypes."""
    values = [*copy.deepcopy(module.weights)]
    values += [*pickle.loads(pickle.dumps(module.weights))]
    values += [*module.weights.state_dict().values()]
    return [value.detach().half() for value in values], {value.dtype for value in values}


def test_copies_and_state_dicts_are_in_fp32(two_ranks):
    scene = {"num": 2, "callbacks": [at(on_train_batch_end=copies)]}
    whole = fit(two_ranks, sgd, "16-true", "off", **scene)
    for seen in fit(two_ranks, sgd, "16-true", "node", **scene):
        assert same(seen.looks, whole[seen.rank].looks), f"rank {seen.rank}"
        for _, dtypes in seen.looks["on_train_batch_end"]:
            assert dtypes == {torch.float32}, f"rank {seen.rank}"


def replace_data(trainer, module, outputs, batch, batch_idx):
    module.weights[6].data = module.weights[6].detach().float()


def test_memory_of_another_dtype_is_refused_by_name(two_ranks):
    callbacks = [at(on_train_batch_end=replace_data)]
    expected = "RuntimeError: `weights.6.data` was replaced by a tensor of shape (64, 128, 3, 3)"
    for seen in fit(two_ranks, sgd, "16-true", num=2, callbacks=callbacks, raises=True):
        assert seen.error.startswith(expected), f"rank {seen.rank}"


def replace_optimizer(make, trainer, module):
    """Replace the optimizer by another kind from the second epoch on, as a user's schedule may do."""
    if trainer.current_epoch == 1:
        trainer.strategy.optimizers = [make(module)]


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
@pytest.mark.parametrize("make", [adamw, lars])
def test_an_optimizer_that_replaces_another_updates_parts_too(two_ranks, make, precision, tmp_path):
    def fit_with(setting):
        callbacks = [
            at(on_train_epoch_start=partial(replace_optimizer, make)),
            at(on_train_end=weights_of),
            partial(Saves, tmp_path / f"{setting}.ckpt", epoch=1),
        ]
        scene = {"max_epochs": 2, "num": 2, "callbacks": callbacks}
        return fit(two_ranks, sgd, precision, setting, **scene)

    whole = fit_with("off")
    for seen in fit_with("node"):
        assert same(seen.weights, whole[seen.rank].weights), f"rank {seen.rank}"
        assert same(seen.looks, whole[seen.rank].looks), f"rank {seen.rank}"
    expected = torch.load(tmp_path / "off.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "node.ckpt", weights_only=True)
    assert same(saved["optimizer_states"], expected["optimizer_states"])
