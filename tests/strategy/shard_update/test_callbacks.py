"""Callbacks where the ranks of a node share the update: averages, the check of replicas, metrics, outside writes."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.callbacks import MasterWeightAveraging, ReplicaCheck, TrainingMetrics
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.optim import LAMB, LARS
from tests import toy
from tests.scenes import Keeps, same
from tests.strategy.shard_update.shared import Sizes, batches, fit, sgd


class AsIsThere(pl.callbacks.EMAWeightAveraging):
    """Lightning's own average."""


def averages(shard_update, ema, path):
    """Weights after the fit, what validation saw, and the weights in a file."""
    seen = []

    class Looks(pl.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            seen.append([weight.detach().clone() for weight in pl_module.parameters()])

    module = Sizes(sgd)
    module.validation_step = lambda batch, batch_idx: None
    strategy = HybridAllReduceStrategy(shard_update=shard_update, loss_scale=1024)
    trainer = toy.trainer(
        strategy=strategy, precision="16-true", callbacks=[Looks(), ema(decay=0.75)], num_sanity_val_steps=0
    )
    module.on_train_epoch_end = lambda: trainer.save_checkpoint(f"{path}/ema.ckpt")
    trainer.fit(module, batches(2), batches(1))
    file = torch.load(f"{path}/ema.ckpt", weights_only=True)
    return toy.weights(module), seen, file["state_dict"], file["current_model_state"]


def averages_of_both(ema, path):
    return [same(*pair) for pair in zip(averages("off", ema, path), averages("node", ema, path), strict=True)]


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("ema", [MasterWeightAveraging, pytest.param(AsIsThere, marks=pytest.mark.long)])
def test_averages_of_parts_are_those_of_whole_masters(two_ranks, ema, tmp_path):
    assert two_ranks.run(averages_of_both, ema, str(tmp_path)) == [[True] * 4] * 2


# ---- the check of replicas -----------------------------------------------------------------------------------------


class Spoils(pl.Callback):
    """On one rank, changes what it has of the largest tensor."""

    def __init__(self, rank, what):
        self.rank, self.what = rank, what

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 0 and dist.get_rank() == self.rank:
            weight = module.weights[6]
            if self.what == "master":
                trainer.precision_plugin.masters.pair_of(weight).master[7] *= 1 + 2**-20
            if self.what == "momentum":
                trainer.optimizers[0].state[weight]["momentum_buffer"][7] += 1.0


def checked(rank, what, precision):
    scale = {"loss_scale": 1024} if precision == "16-true" else {}
    trainer = toy.trainer(
        strategy=HybridAllReduceStrategy(shard_update="node", ranks_per_node=2, **scale),
        precision=precision,
        max_epochs=1,
        callbacks=[Spoils(rank, what), ReplicaCheck(1)],
        use_distributed_sampler=False,
    )
    return toy.error_of(trainer.fit, Sizes(sgd), batches(2))


@pytest.mark.parametrize(("what", "precision"), [("master", "16-true"), ("momentum", "32-true")])
def test_the_check_of_replicas_compares_parts_with_those_of_other_nodes(four_ranks, what, precision):
    kind = "the fp32 master" if what == "master" else "`momentum_buffer` of the optimizer for"
    errors = four_ranks.run(checked, 3, what, precision)
    assert four_ranks.run(checked, 4, what, precision) == [""] * 4  # no rank of four spoils anything
    for error in errors:
        assert error.startswith("ReplicaDriftError: The ranks no longer hold the same model")
        assert f": elements {0 if '0 to' in error else 49152} to" in error
        assert kind in error
        assert "`weights.6` on rank 3 (host " in error
        assert "is not that of rank 1 (host " in error


# ---- metrics -------------------------------------------------------------------------------------------------------


def large(module, kind):
    return kind([weight for weight in module.weights if weight.numel() > 1], lr=0.1, weight_decay=1e-3, fused=True)


def ratios(kind, shard_update):
    keeps = Keeps()
    fit(
        partial(large, kind=kind),
        "16-true",
        shard_update,
        logger=keeps,
        log_every_n_steps=1,
        callbacks=[TrainingMetrics(skip_steps=0)],
    )
    names = m.trust_ratios_of_group(0)
    return [value for name in names for value in keeps.column(name).values()]


@pytest.mark.parametrize("kind", [pytest.param(LARS, marks=pytest.mark.long), LAMB])
def test_trust_ratios_that_are_logged_are_those_of_whole_tensors(two_ranks, kind):
    whole, shared = (two_ranks.run(ratios, kind, setting)[0] for setting in ("off", "node"))
    assert len(whole) == 12
    assert shared == pytest.approx(whole, rel=1e-3)  # of masters here, of their half-precision copies there


# ---- writes from outside -------------------------------------------------------------------------------------------


class Writes(pl.Callback):
    """What user code does to weights: clamps, a write through `.data`, a state dict put back, one of a part loaded."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 0:
            module.weights[6].clamp_(-0.125, 0.125)
            module.weights[-2].data.mul_(0.5)
        if batch_idx == 1:
            module.load_state_dict(module.state_dict())
        if batch_idx == 2:
            module.load_state_dict({"weights.5": torch.linspace(0, 1, module.weights[5].numel())}, strict=False)


def written(shard_update, precision):
    return fit(sgd, precision, shard_update, callbacks=[Writes()])


@pytest.mark.parametrize("precision", ["16-true", pytest.param("32-true", marks=pytest.mark.long)])
def test_writes_to_weights_reach_the_parts(two_ranks, precision):
    whole, shared = (two_ranks.run(written, setting, precision) for setting in ("off", "node"))
    assert same(whole, shared)
