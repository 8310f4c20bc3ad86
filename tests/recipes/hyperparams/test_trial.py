"""Trials are real runs of the training recipe: validated, tested if allowed, ended when they have lost."""

import math
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from recipes.hyperparams.trial import TrainTrial, common_of
from recipes.hyperparams.trial_log import TrialOutcome
from recipes.hyperparams.trial_pool import run_safely
from recipes.hyperparams.trial_ranks import run_on_ranks
from recipes.training.classifier import Classifier

SMALL = (
    "recipe=claim_digits",
    "global_batch_size=600",  # two steps an epoch
    "batch_size_per_rank=null",
    "label_smoothing=0.0",
    "warmup_epochs=0.5",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "precision=32-true",
    "logger=none",
    "callbacks=none",
    "+trainer.enable_checkpointing=false",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)


def trial(*overrides, limits=(), objective="val/loss", **changes):
    runner = TrainTrial(base=SMALL, objective=objective, mode="min", run_dir="/nowhere", **changes)
    return run_safely(runner, overrides, limits)


def test_a_trial_is_repeatable_and_tested_unless_testing_is_off():
    import sklearn.datasets  # noqa: F401  sets variables of OpenMP when it is first imported

    before = dict(os.environ)
    tested, untested = trial("optim.lr=4"), trial("optim.lr=4", "trainer.limit_test_batches=0")
    assert dict(os.environ) == before  # its seed and its launcher's variables are no other program's
    assert tested.status == untested.status == "done"
    assert 0 <= tested.metrics["test/acc"] <= 1
    assert "test/acc" not in untested.metrics
    assert tested.value == untested.value == tested.metrics["val/loss"]
    assert tested.curve == untested.curve
    assert [fraction for fraction, _ in tested.curve] == [0.5, 1.0]
    assert tested.metrics["num_steps"] == 4


def test_a_loss_that_is_not_finite_ends_the_trial():
    lost = trial("optim=sgd", "optim.lr=1e30", "warmup_epochs=0")
    assert lost.status == "diverged"
    assert lost.value is None
    assert "train/loss is" in lost.reason
    assert lost.metrics["num_steps"] < 4


def test_a_trial_that_ends_at_chance_has_diverged_although_its_loss_is_finite(monkeypatch):
    """A network of dead units: the same logits for every image, of which only the last bias still learns."""
    whole = Classifier.forward
    monkeypatch.setattr(Classifier, "forward", lambda module, images: 0.0 * whole(module, images))
    lost = trial("optim.lr=4")
    assert (lost.status, lost.value) == ("diverged", None)
    assert lost.metrics["val/loss"] == pytest.approx(math.log(10))
    assert (
        lost.reason == f"val/acc is {lost.metrics['val/acc']:.4g} at the end, no better than guessing one of 10 classes"
    )
    assert "test/acc" not in lost.metrics


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.width=0.0001", "`width` (=0.0001) must leave every layer"),
        ("trainer.max_epochs=1", "`objective` (=val/los) must be something that validation logs"),
    ],
)
def test_a_configuration_that_cannot_be_is_a_failed_trial_with_the_reason(override, reason):
    failed = trial(override, objective="val/los")
    assert failed.status == "failed"
    assert reason in failed.reason


def trial_that_is_lost_on_a_rank():
    whole = Classifier.training_step

    def lost(module, batch, batch_idx):
        return whole(module, batch, batch_idx) * (math.nan if module.global_rank == 1 else 1.0)

    with mock.patch.object(Classifier, "training_step", lost):
        return trial("trainer.devices=2", "strategy.ranks_per_node=1")


def test_a_loss_that_one_rank_has_lost_ends_the_trial_on_all_at_the_same_step(two_ranks):
    one, other = two_ranks.run(trial_that_is_lost_on_a_rank, timeout_s=180.0)
    assert (one.status, one.metrics["num_steps"]) == (other.status, other.metrics["num_steps"]) == ("diverged", 1)


@dataclass(frozen=True)
class Places:
    """The outcome has this process's place in the world; `bad`: rank 1 ends so, while the others wait."""

    bad: str = ""

    def __call__(self, overrides, limits):
        rank = int(os.environ["LOCAL_RANK"])
        if self.bad:
            if rank == 1:
                os._exit(3) if self.bad == "dies" else Path("/nowhere/x").read_text()
            time.sleep(600)
        return TrialOutcome(overrides=overrides, status="done", value=rank, metrics={"pid": os.getpid()})


@pytest.mark.long
def test_ranks_of_a_trial_are_processes_of_which_none_is_left_when_one_fails():
    overrides, before = ("optim.lr=1",), set(multiprocessing.active_children())
    done = run_on_ranks(Places(), overrides, (), num_ranks=3)
    assert (done.status, done.value) == ("done", 0)
    assert done.metrics["pid"] != os.getpid()
    assert run_on_ranks(Places("fails"), overrides, (), num_ranks=2).reason.startswith("FileNotFoundError")
    assert run_on_ranks(Places("dies"), overrides, (), num_ranks=2).reason == "the process of rank 1 ended"
    assert set(multiprocessing.active_children()) == before


def test_what_trials_have_in_common_is_all_but_their_own():
    assert common_of(SMALL, ("optim.lr=1",)) == common_of(SMALL) != common_of((*SMALL, "optim.lr=2"))
