"""Trials as real runs of the training recipe: validated, optionally tested, and stopped when they have failed."""

import math
from unittest import mock

import pytest

from recipes.cli import launch
from recipes.hyperparams.processes import run_safely
from recipes.hyperparams.trial import TrainTrial, settings_of
from recipes.training.classifier import Classifier

SMALL = (
    "recipe=claim_digits",
    "global_batch_size=600",  # two steps per epoch
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


@pytest.fixture(autouse=True)
def _environment_as_it_was(monkeypatch):
    """Restore the environment after a trial, in which Lightning leaves its seed.

    A trial in a separate process takes the seed with it when it ends.
    """
    for name in launch.LAUNCH_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def trial(*overrides, ask_pruner=lambda report: False, objective="val/loss"):
    run_trial = TrainTrial(base=SMALL, objective=objective, run_dir="/nowhere")
    return run_safely(run_trial, overrides, ask_pruner)


def test_a_trial_is_repeatable_and_tested_unless_testing_is_off():
    reports = []
    again = []
    tested = trial("optim.lr=4", ask_pruner=reports.append)
    untested = trial("optim.lr=4", "trainer.limit_test_batches=0", ask_pruner=again.append)
    assert tested.status == untested.status == "done"
    assert 0 <= tested.metrics["test/acc"] <= 1
    assert "test/acc" not in untested.metrics
    assert tested.value == untested.value == tested.metrics["val/loss"]
    assert reports == again
    assert [report.percent for report in reports] == [50, 100]
    assert reports[-1].value == tested.value
    assert tested.metrics["num_steps"] == 4


def test_a_trial_that_the_pruner_stops_trains_no_further():
    stopped = trial("optim.lr=4", ask_pruner=lambda report: True)
    assert (stopped.status, stopped.value) == ("stopped", None)
    assert stopped.metrics["num_steps"] == 2
    assert stopped.reason.endswith("was worse than other trials after 50 % of the run")


def test_a_loss_that_is_not_finite_ends_the_trial():
    lost = trial("optim=sgd", "optim.lr=1e30", "warmup_epochs=0")
    assert lost.status == "diverged"
    assert lost.value is None
    assert "train/loss is" in lost.reason
    assert lost.metrics["num_steps"] < 4


def test_a_trial_that_ends_at_chance_has_diverged_although_its_loss_is_finite(monkeypatch):
    """The network has only dead units and returns equal logits for all images. Only its last bias still learns."""
    whole = Classifier.forward
    monkeypatch.setattr(Classifier, "forward", lambda module, images: 0.0 * whole(module, images))
    lost = trial("optim.lr=4")
    assert (lost.status, lost.value) == ("diverged", None)
    assert lost.metrics["val/loss"] == pytest.approx(math.log(10))
    assert (
        lost.reason
        == f"val/acc is {lost.metrics['val/acc']:.4g} at the end, no better than guessing among 10 classes"
    )
    assert "test/acc" not in lost.metrics


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.width=0.0001", "`width` (=0.0001) is too small"),
        ("trainer.max_epochs=1", "`objective` (=val/los) is not a metric that validation logs"),
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
    rank_0, rank_1 = two_ranks.run(trial_that_is_lost_on_a_rank, timeout_s=180.0)
    assert (
        (rank_0.status, rank_0.metrics["num_steps"])
        == (rank_1.status, rank_1.metrics["num_steps"])
        == ("diverged", 1)
    )


def test_settings_of_trials_change_with_all_that_they_share():
    settings = settings_of(SMALL, objective="val/loss", mode="min")
    assert settings == settings_of(SMALL, objective="val/loss", mode="min")
    assert settings != settings_of((*SMALL, "optim.lr=2"), objective="val/loss", mode="min")
    assert settings != settings_of(SMALL, objective="val/acc", mode="min")
