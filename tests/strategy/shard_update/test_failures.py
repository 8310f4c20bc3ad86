"""What `shard_update` refuses, before training and by name; faults in its exchanges: the same error on all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.comm.engine import stages
from lightning_hybrid.optim import LARS
from tests import toy
from tests.scenes import at, fit
from tests.strategy.shard_update.shared import Sizes, adamw, batches, sgd


def sharded(two_ranks, module=sgd, **scene):
    return fit(two_ranks, partial(Sizes, module), train=partial(batches, 2), max_epochs=1, shard_update="node", **scene)


def test_one_rank_on_each_node_is_a_warning_and_trains(two_ranks):
    for rank, seen in enumerate(sharded(two_ranks, ranks_per_node=1, warns=True)):
        assert seen.global_step == 1
        assert any("shares nothing: every node has one rank" in text for text in seen.warnings) == (rank == 0)


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


def fail(trainer, *args):
    raise ZeroDivisionError("of the user's")


def save_while_failing(trainer, module, exception):
    return toy.error_of(trainer.save_checkpoint, "/dev/null/nowhere.ckpt")


def test_a_checkpoint_in_the_midst_of_an_error_is_refused(two_ranks):
    callbacks = [at(on_train_batch_end=fail, on_exception=save_while_failing)]
    for seen in sharded(two_ranks, callbacks=callbacks, raises=True):
        assert "of the user's" in seen.error
        (error,) = seen.looks["on_exception"]
        words = "RuntimeError: `shard_update` (='node') cannot save while ZeroDivisionError ends this rank"
        assert error.startswith(words)
