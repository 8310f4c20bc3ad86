"""Refusals of `shard_update` before training, and faults in its exchanges: the same error on all ranks."""

import pytest
import torch.distributed as dist

from lightning_hybrid.comm.engine import stages
from lightning_hybrid.optim import LARS
from tests import toy
from tests.scenes import at
from tests.strategy.shard_update.shared import adamw, fit, sgd


def test_one_rank_on_each_node_is_a_warning_and_trains(two_ranks):
    for rank, seen in enumerate(
        fit(two_ranks, sgd, "32-true", num=2, ranks_per_node=1, warns=True)
    ):
        assert seen.global_step == 2
        assert any("shares nothing: every node has one rank" in text for text in seen.warnings) == (
            rank == 0
        )


def save_nowhere(trainer, *args):
    trainer.save_checkpoint("/dev/null/nowhere.ckpt")


def fails_on_one_rank(exchange, at_call, precision, optimizer, callbacks):
    before, *others = stages.EXCHANGES[exchange]
    calls = []

    def run(job, group):
        calls.append(job)
        if len(calls) == at_call and dist.get_rank() == 1:
            raise OSError("no route to host")
        before.run(job, group)

    with pytest.MonkeyPatch.context() as patch:
        stage = stages.Stage(name=before.name, scope=before.scope, run=run)
        patch.setitem(stages.EXCHANGES, exchange, (stage, *others))
        scope = exchange.split("_")[0]
        options = {"num": 2, "callbacks": callbacks, "raises": True}
        options |= {"ranks_per_node": 1} if scope == "world" else {}
        return fit(None, optimizer, precision, scope, **options).error


def lars(module):
    return LARS(module.parameters(), lr=0.1, fused=True)


@pytest.mark.parametrize(
    ("exchange", "at_call", "precision", "optimizer", "stage", "callbacks"),
    [
        ("node_sum", 1, "16-true", lars, "add_up", []),
        ("node_gather", 2, "16-true", adamw, "gather_weights", []),
        (
            "node_collect",
            1,
            "32-true",
            adamw,
            "collect_state",
            [at(on_train_epoch_end=save_nowhere)],
        ),
        ("world_gather", 1, "16-true", adamw, "gather_weights_across", []),
    ],
    ids=[
        "in the table of norms",
        "in the gather of weights",
        "in the gather of a checkpoint",
        "behind a forward",
    ],
)
def test_a_fault_is_the_same_named_error_on_all_ranks_soon(
    two_ranks, exchange, at_call, precision, optimizer, stage, callbacks
):
    # Soon: the time limit of a run here is a minute, that of the collectives half an hour.
    for error in two_ranks.run(
        fails_on_one_rank, exchange, at_call, precision, optimizer, callbacks, grace_s=30.0
    ):
        assert (
            f"rank 1 failed on bucket 0 in stage `{stage}` of the {exchange} exchange: OSError"
            in error
        )


def fail(trainer, *args):
    raise ZeroDivisionError("of the user's")


def save_while_failing(trainer, module, exception):
    return toy.error_of(save_nowhere, trainer)


def test_a_checkpoint_in_the_midst_of_an_error_is_refused(two_ranks):
    callbacks = [at(on_train_batch_end=fail, on_exception=save_while_failing)]
    for seen in fit(two_ranks, sgd, "32-true", num=2, callbacks=callbacks, raises=True):
        assert "of the user's" in seen.error
        (error,) = seen.looks["on_exception"]
        words = "RuntimeError: `shard_update` (='node') cannot save while ZeroDivisionError ends this rank"
        assert error.startswith(words)
