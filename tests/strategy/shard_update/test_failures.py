"""Errors of `shard_update` before training and faults in its exchanges, which are the same on all ranks."""

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_hybrid.comm.engine import stages
from lightning_hybrid.optim import LARS
from tests import toy
from tests.scenes import at
from tests.strategy.shard_update.shared import adamw, fit, sgd


def test_one_rank_on_each_node_is_a_warning_and_trains(two_ranks):
    for seen in fit(two_ranks, sgd, "32-true", num=2, ranks_per_node=1, warns=True):
        assert seen.global_step == 2, f"rank {seen.rank}"
        is_warned = any(
            "has no effect, because the node has only one rank" in text for text in seen.warnings
        )
        assert is_warned == (seen.rank == 0), f"rank {seen.rank}"


def save_nowhere(trainer, *args):
    trainer.save_checkpoint("/dev/null/nowhere.ckpt")


def error_of_a_fault(exchange, at_call, precision, optimizer, callbacks):
    """Return the error of a fit in which the first stage of an exchange fails on rank one."""
    first, *following = stages.EXCHANGES[exchange]
    calls = []

    def run(job, group):
        calls.append(job)
        if len(calls) == at_call and dist.get_rank() == 1:
            raise OSError("no route to host")
        first.run(job, group)

    with pytest.MonkeyPatch.context() as patch:
        stage = stages.Stage(name=first.name, scope=first.scope, run=run)
        patch.setitem(stages.EXCHANGES, exchange, (stage, *following))
        scope = exchange.split("_")[0]
        options = {"num": 2, "callbacks": callbacks, "raises": True}
        if scope == "world":
            options["ranks_per_node"] = 1
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
    # The run has a time limit of a minute here, while the collectives have one of half an hour.
    arguments = (exchange, at_call, precision, optimizer, callbacks)
    errors = two_ranks.run(error_of_a_fault, *arguments, grace_s=30.0)
    expected = f"rank 1 failed on bucket 0 in stage `{stage}` of the {exchange} exchange: OSError"
    for rank, error in enumerate(errors):
        assert expected in error, f"rank {rank}"


def fail(trainer, *args):
    raise ZeroDivisionError("of the user's")


def save_while_failing(trainer, module, exception):
    return toy.error_of(save_nowhere, trainer)


def test_a_checkpoint_while_an_error_ends_the_fit_is_refused(two_ranks):
    callbacks = [at(on_train_batch_end=fail, on_exception=save_while_failing)]
    for seen in fit(two_ranks, sgd, "32-true", num=2, callbacks=callbacks, raises=True):
        assert "of the user's" in seen.error
        (error,) = seen.looks["on_exception"]
        assert error.startswith(
            "RuntimeError: `shard_update` (='node') cannot save a checkpoint after this rank failed with "
            "ZeroDivisionError: "
        )


class ReadsGradients(pl.Callback):
    def on_after_backward(self, trainer, module):
        """Read nothing. The hook alone counts."""


def error_with_a_callback_on_one_rank(precision):
    callbacks = [ReadsGradients] if dist.get_rank() == 0 else []
    return fit(None, lars, precision, "node", num=2, callbacks=callbacks, raises=True).error


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_a_callback_that_reads_gradients_on_one_rank_only_is_an_error_on_all(two_ranks, precision):
    for rank, error in enumerate(two_ranks.run(error_with_a_callback_on_one_rank, precision)):
        assert "gradients that a hook or callback may read" in error, f"rank {rank}: {error}"
