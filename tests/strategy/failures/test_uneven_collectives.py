"""Collectives that every rank enters even if ranks differ. In each test, one rank behaves differently."""

import os

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid import LocalSteps
from lightning_hybrid.callbacks import NumericsMonitor, StopOnSignal, TrainingMetrics, numerics
from tests import toy
from tests.scenes import Spoiled, at, fit, same

LIMIT_S = 40.0  # a deadlock would last 45 s, the timeout of the pool's groups


class FailsOnRankOne(toy.Toy):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and dist.get_rank() == 1:
            raise FloatingPointError("of the user")
        self.log("train/loss", self.loss(batch), on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


class StepsOfItsOwn(toy.Toy):
    """Module with manual optimization, which need not return a loss. Rank one returns none."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if dist.get_rank() == 0:
            return loss.detach()
        return None


class SignalOnRankOne(toy.Toy):
    """Module in which rank one has received a signal, and is ended by another error as a signal would end it."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and dist.get_rank() == 1:
            self.trainer.callbacks[0]._request = 15
            raise SIGTERMException
        return super().training_step(batch, batch_idx)


def local_steps_with_nan():
    """Fit on two nodes of one rank, of which one skips its steps, and return the number of steps."""
    scene = {
        "module": Spoiled(steps=range(99), rank=1),
        "ranks_per_node": 1,
        "between_nodes": LocalSteps(every=4),
        "callbacks": [NumericsMonitor()],
        "precision": "16-true",
        "max_epochs": 3,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "PROBE_AFTER", 2)
        return fit(None, **scene).global_step


def test_a_node_that_skips_its_own_steps_waits_for_no_other_node(two_ranks):
    assert two_ranks.run(local_steps_with_nan, timeout_s=LIMIT_S) == [12, 12]


def test_a_rank_that_saves_on_its_own_error_waits_for_no_other_and_a_new_fit_works(
    two_ranks, tmp_path
):
    callbacks = [ModelCheckpoint(tmp_path, save_on_exception=True)]
    scene = {"max_epochs": 1, "callbacks": callbacks, "enable_checkpointing": True, "raises": True}
    rank_0, rank_1 = fit(two_ranks, FailsOnRankOne, timeout_s=LIMIT_S, **scene)
    assert rank_1.error.startswith("FloatingPointError: of the user")
    assert "comm: rank 1 gave up: FloatingPointError: of the user" in rank_0.error
    rank_0, rank_1 = fit(two_ranks, max_epochs=1)
    assert same(rank_0.parameters, rank_1.parameters)


def names_logged(trainer, module):
    return sorted(trainer.logged_metrics)


def test_every_rank_logs_the_loss_of_the_ranks_that_return_one(two_ranks):
    callbacks = [TrainingMetrics(skip_steps=0), at(on_train_end=names_logged)]
    scene = {"max_epochs": 1, "log_every_n_steps": 1, "callbacks": callbacks}
    rank_0, rank_1 = fit(two_ranks, StepsOfItsOwn, timeout_s=LIMIT_S, **scene)
    (names,) = rank_0.looks["on_train_end"]
    assert "train/loss" in names
    assert rank_1.looks["on_train_end"] == [names]


def signal_of_one_rank(folder):
    trainer = toy.trainer(max_epochs=1, callbacks=[StopOnSignal(dirpath=folder)])
    try:
        trainer.fit(SignalOnRankOne(), toy.loader())
    except (RuntimeError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_signal_that_the_ranks_have_not_agreed_on_saves_nothing(two_ranks, tmp_path):
    error_0, error_1 = two_ranks.run(signal_of_one_rank, str(tmp_path), timeout_s=LIMIT_S)
    assert "comm: rank 1 gave up: it received SIGTERM" in error_0
    assert error_1.startswith("SIGTERMException")
    assert not os.listdir(tmp_path)
