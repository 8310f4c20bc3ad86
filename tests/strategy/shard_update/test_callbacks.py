"""Callbacks where the ranks of a node share the update: averages, the check of replicas, metrics, outside writes."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from lightning_hybrid.callbacks import MasterWeightAveraging, ReplicaCheck
from tests.scenes import Saves, at, same, this_rank
from tests.strategy.shard_update.shared import assert_same, batches, fit, sgd, weights_of

LONG = pytest.mark.long


def averages(ranks, shard_update, ema, path):
    callbacks = [at(on_validation_epoch_end=weights_of), partial(ema, decay=0.75), Saves(path, epoch=1)]
    scene = {"num": 2, "val": partial(batches, 1), "num_sanity_val_steps": 0, "max_epochs": 2, "callbacks": callbacks}
    seen = fit(ranks, sgd, "16-true", shard_update, **scene)
    file = torch.load(path, weights_only=True)
    return [[one.weights, one.looks] for one in seen], file["state_dict"], file["current_model_state"]


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("ema", [MasterWeightAveraging, pytest.param(pl.callbacks.EMAWeightAveraging, marks=LONG)])
def test_averages_of_parts_are_those_of_whole_masters(two_ranks, ema, tmp_path):
    whole, shared = (averages(two_ranks, setting, ema, tmp_path / "ema.ckpt") for setting in ("off", "node"))
    assert same(whole, shared)


@torch.no_grad()
def spoil(rank, what, trainer, module, outputs, batch, batch_idx):
    if batch_idx == 0 and this_rank() == rank:
        weight = module.weights[6]
        if what == "master":
            trainer.strategy.run_status.master_parts[id(weight)][7] *= 1 + 2**-20
        if what == "momentum":
            trainer.optimizers[0].state[weight]["momentum_buffer"][7] += 1.0


@pytest.mark.parametrize(
    ("what", "precision", "kind"),
    [
        ("master", "16-true", "the fp32 values of"),
        ("momentum", "32-true", "`momentum_buffer` of the optimizer for"),
        ("", "16-true", ""),
    ],
)
def test_the_check_of_replicas_compares_parts_with_those_of_other_nodes(four_ranks, what, precision, kind):
    callbacks = [at(on_train_batch_end=partial(spoil, 3, what)), partial(ReplicaCheck, 1)]
    for seen in fit(four_ranks, sgd, precision, callbacks=callbacks, ranks_per_node=2, num=2, raises=True):
        error = seen.error
        if not what:
            assert error == ""
            continue
        assert error.startswith("ReplicaDriftError: The ranks no longer hold the same model")
        assert f": elements {0 if '0 to' in error else 49152} to" in error
        assert kind in error
        assert "`weights.6` on rank 3 (host " in error
        assert "is not that of rank 1 (host " in error


@torch.no_grad()
def write(trainer, module, outputs, batch, batch_idx):
    """What user code does to weights: clamps, a write through `.data`, a state dict put back, one of a part loaded."""
    if batch_idx == 0:
        module.weights[6].clamp_(-0.125, 0.125)
        module.weights[-2].data.mul_(0.5)
    if batch_idx == 1:
        module.load_state_dict(module.state_dict())
    if batch_idx == 2:
        module.load_state_dict({"weights.5": torch.linspace(0, 1, module.weights[5].numel())}, strict=False)


@pytest.mark.parametrize("precision", ["16-true", pytest.param("32-true", marks=LONG)])
def test_writes_to_weights_reach_the_parts(two_ranks, precision):
    assert_same(two_ranks, sgd, precision, callbacks=[at(on_train_batch_end=write)])
