"""What `shard_update` refuses, before training and by name; faults in its exchanges: the same error on all ranks."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.comm import Topology
from lightning_hybrid.comm.engine import stages
from lightning_hybrid.optim import LARS
from tests import toy
from tests.strategy.shard_update.shared import Sizes, adamw, batches, sgd


class Adam(torch.optim.Adam):
    """One of a user's own, which may look at norms."""


def adam_of_ones_own(module):
    return Adam(module.parameters(), lr=0.1)


def adafactor(module):
    return torch.optim.Adafactor(module.parameters(), lr=0.1)


def orthogonal(module):
    return LARS([module.weights[6]], lr=0.1, direction="orthogonal")


def two_over_one(module):
    module.automatic_optimization = False
    return [torch.optim.SGD(module.parameters(), lr=0.1), torch.optim.SGD([module.weights[6]], lr=0.1)]


def error_of_a_fit(optimizer=sgd, precision="32-true", world=None, **options):
    strategy = HybridAllReduceStrategy(shard_update="node", **options)
    if world is not None:
        strategy._comm.topology_of = lambda *_: Topology(rank=dist.get_rank(), nodes=world)
    module = Sizes(optimizer)
    seen = []
    module.on_train_batch_start = lambda *args: seen.append(args)
    trainer = toy.trainer(strategy=strategy, precision=precision, max_epochs=1)
    error = toy.error_of(trainer.fit, module, batches(2))
    return error, len(seen)


def alone():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error, _ = error_of_a_fit(ranks_per_node=1)
    return error, any("shares nothing: every node has one rank" in str(one.message) for one in caught)


def test_one_rank_on_each_node_is_a_warning_and_trains(two_ranks):
    assert two_ranks.run(alone) == [("", True), ("", False)]


# ---- faults --------------------------------------------------------------------------------------------------------


def fails_on_one_rank(exchange, at, precision, optimizer, in_checkpoint=False):
    """Rank 1 raises in this exchange when it comes there for the `at`-th time; the error of a fit."""
    (before,) = stages.NODE_STAGES[exchange]
    calls = []

    def run(job, group):
        calls.append(job)
        if len(calls) == at and dist.get_rank() == 1:
            raise OSError("no route to host")
        before.run(job, group)

    stages.NODE_STAGES[exchange] = (stages.Stage(name=before.name, scope=before.scope, run=run),)
    try:
        scale = {"loss_scale": 1024} if precision == "16-true" else {}
        trainer = toy.trainer(
            strategy=HybridAllReduceStrategy(shard_update="node", **scale), precision=precision, max_epochs=1
        )
        module = Sizes(optimizer)
        if in_checkpoint:
            module.on_train_epoch_end = lambda: trainer.save_checkpoint("/dev/null/nowhere.ckpt")
        error = toy.error_of(trainer.fit, module, batches(2))
    finally:
        stages.NODE_STAGES[exchange] = (before,)
    return error


def lars(module):
    return LARS(module.parameters(), lr=0.1, fused=True)


FAULTS = {
    "in the table of norms": ("node_sum", 1, "16-true", lars, "add_up"),
    "in the gather of weights": ("node_gather", 2, "16-true", adamw, "gather_weights"),
    "in the gather of a checkpoint": ("node_collect", 1, "32-true", adamw, "collect_state"),
}


@pytest.mark.parametrize("where", FAULTS)
def test_a_fault_is_the_same_named_error_on_all_ranks_soon(two_ranks, where):
    exchange, at, precision, optimizer, stage = FAULTS[where]
    arguments = (exchange, at, precision, optimizer, exchange == "node_collect")
    # Soon: the time limit of a run here is a minute, that of the collectives half an hour.
    for error in two_ranks.run(fails_on_one_rank, *arguments, grace_s=30.0):
        assert f"rank 1 failed on bucket 0 in stage `{stage}` of the {exchange} exchange: OSError" in error


def save_while_failing():
    strategy = HybridAllReduceStrategy(shard_update="node")
    trainer = toy.trainer(strategy=strategy, max_epochs=1)
    module = Sizes(sgd)

    def fail(*args):
        raise ZeroDivisionError("of the user's")

    errors = []
    module.on_train_batch_end = fail

    class Saves(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            errors.append(toy.error_of(trainer.save_checkpoint, "/dev/null/nowhere.ckpt"))

    trainer.callbacks.append(Saves())
    return toy.error_of(trainer.fit, module, batches(2)), errors


def test_a_checkpoint_in_the_midst_of_an_error_is_refused(two_ranks):
    for error, errors in two_ranks.run(save_while_failing):
        assert "of the user's" in error
        assert errors[0].startswith(
            "RuntimeError: `shard_update` (='node') cannot save while ZeroDivisionError ends this rank"
        )
