"""Reports of invalid numbers with rank, batch and layer, once each, and with the state saved for inspection."""

import re
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import NumericsMonitor, ReplicaCheck
from lightning_hybrid.callbacks import numerics as numbers_module
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests import scenes, toy
from tests.precision.test_optimizer_protocol import HostReads
from tests.scenes import Spoiled, at

HOST = numbers_module.host_identity()[0]


NAN = {"factor": float("nan")}
ENDLESS = partial(Spoiled, steps=range(2, 1000), rank=1, **NAN)


def fit(
    module,
    ranks=None,
    folder=None,
    *,
    patience=3,
    precision="16-true",
    max_epochs=20,
    every=10,
    **scene,
):
    """Fit with the monitor, and return its error and its warnings, by rank if `ranks` are given."""
    scene = {
        "log_every_n_steps": every,
        "max_epochs": max_epochs,
        "precision": precision,
        **scene,
        "callbacks": [NumericsMonitor(folder, patience=patience)],
        "raises": True,
        "warns": True,
    }
    result = scenes.fit(ranks, module, **scene)
    if ranks is None:
        return error_and_warnings(result)
    return [error_and_warnings(seen) for seen in result]


def error_and_warnings(seen):
    return seen.error, [message for message in seen.warnings if OF_MONITOR.search(message)]


OF_MONITOR = re.compile("was inf|zero at|do not learn|at its minimum")


def test_overflow_without_end_names_rank_host_batch_and_scale_on_every_rank(two_ranks, tmp_path):
    for rank, (error, _) in enumerate(fit(ENDLESS, two_ranks, str(tmp_path))):
        expected_begin = (
            "EndlessOverflowError: Gradients were inf or nan for 40 consecutive steps, up to global"
        )
        assert error.startswith(expected_begin), f"on rank {rank}: {error}"
        for words in (
            f" The loss was inf or nan on 1 of 2 ranks: rank 1 (host {HOST}) in batch ",
            "The outputs of all 9 layers were finite, so the loss or backward is the cause.",
            "Recent scales: ",
            "1 at step ",
            f"The error occurred on rank {rank} (host {HOST}) in batch ",
            f"The state was saved for inspection: {tmp_path}/numbers/step",
        ):
            assert words in error, f"on rank {rank}"
    saved_by_rank_0 = saved_by(0, tmp_path)
    saved_by_rank_1 = saved_by(1, tmp_path)
    assert saved_by_rank_0["state_dict"].keys() == toy.Toy().state_dict().keys()
    assert saved_by_rank_0["state_dict"]["net.8.weight"].dtype is torch.float32
    assert "state_dict" not in saved_by_rank_1  # it equals that on rank zero
    assert saved_by_rank_1["batch"][0].shape == (8, toy.NUM_FEATURES)
    assert not torch.equal(saved_by_rank_0["batch"][0], saved_by_rank_1["batch"][0])
    assert saved_by_rank_1["global_step"] == 41
    assert saved_by_rank_1["scale_history"][-1][1] == 1.0
    assert "rng_state" in saved_by_rank_1


def saved_by(rank, folder):
    (path,) = Path(folder, "numbers").glob(f"*rank{rank}.pt")
    return torch.load(path, weights_only=True)


class Inverts(nn.Module):
    def forward(self, x):
        return 1 / (x - x)


def test_the_first_layer_that_puts_out_inf_is_named():
    module = toy.Toy()
    module.net.insert(7, Inverts())
    error, _ = fit(module)
    assert "The first layer whose output had inf or nan was net.7 (Inverts)." in error


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_where_no_step_is_skipped_the_first_rank_and_step_are_told(two_ranks, precision):
    results = fit(partial(Spoiled, steps=[3], **NAN), two_ranks, precision=precision)
    expected_begin = (
        "NonFiniteLossError: The loss has not been finite since step 4, first on rank 1."
    )
    for rank, (error, _) in enumerate(results):
        assert error.startswith(expected_begin), f"on rank {rank}: {error}"
        assert f"rank 1 (host {HOST}) in batch " in error, f"on rank {rank}"
        assert "resume from a checkpoint written before step 4." in error, f"on rank {rank}"


def test_a_single_bad_batch_is_a_warning_on_its_rank_and_the_run_goes_on(two_ranks):
    rank_0, rank_1 = fit(partial(Spoiled, steps=[5], **NAN), two_ranks, max_epochs=3)
    assert rank_0 == ("", [])
    error, (warning,) = rank_1
    assert error == ""
    assert warning.startswith(
        f"The loss of 1 batches on rank 1 (host {HOST}) was inf or nan (last: batch 1 (step 6"
    )


class Dead(toy.Toy):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.net[6].bias.fill_(-1e4)  # the LayerNorm behind it


def test_a_layer_that_died_is_a_warning_after_three_logged_steps_and_once():
    error, (warning,) = fit(Dead(), max_epochs=4, every=5)
    assert error == ""
    assert "The gradient of `net.1.weight`, `net.1.bias`, `net.2.weight`, " in warning
    assert "`net.5.weight`, ... (9 of 10)" in warning
    assert "at 3 consecutive logged steps up to step 15, so these layers do not learn" in warning


def test_gradients_that_are_all_zero_are_told_apart_and_those_now_and_then_are_nothing_to_speak_of():
    all_zero = Spoiled(steps=range(99), factor=0.0, rank=None)
    error, (warning,) = fit(all_zero, max_epochs=3, patience=2)
    assert error == ""
    assert warning.startswith(
        "All gradients were zero at 2 consecutive logged steps up to step 20, so the model does not learn"
    )
    pauses = Spoiled(steps=range(3, 99, 4), factor=0.0, rank=None)  # in every second logged step
    assert fit(pauses, max_epochs=2, every=2, patience=2) == ("", [])


def test_a_scale_that_stays_at_its_floor_is_a_warning(monkeypatch):
    monkeypatch.setattr(numbers_module, "STEPS_AT_FLOOR", 10)
    scale = DynamicLossScale(init_scale=4.0, min_scale=2.0, growth_interval=1000)
    module = Spoiled(steps=[2], rank=0)
    _, warned = fit(module, max_epochs=4, every=5, loss_scale=scale)
    (warning,) = [message for message in warned if "minimum" in message]
    assert warning.startswith("`loss_scale` (=2) has been at its minimum for 10 steps")


def test_a_label_that_no_class_has_is_described_and_the_batch_saved(tmp_path):
    loader = DataLoader([(toy.Blobs(4).images, torch.tensor([0, 1, 99, 2]))], batch_size=None)
    error, _ = fit(toy.Toy(), folder=str(tmp_path), train=loader)
    assert error.startswith("IndexError: Target 99 is out of bounds.")
    assert "[1] int64 [4]: from 0 to 99." in error
    (path,) = Path(tmp_path, "numbers").iterdir()
    assert torch.load(path, weights_only=True)["batch"][1].tolist() == [0, 1, 99, 2]


def gives_up(*_):
    raise RuntimeError("comm: rank 1 does not answer")


def test_errors_of_communication_are_left_alone(tmp_path):
    callbacks = [NumericsMonitor(str(tmp_path)), at(on_train_batch_start=gives_up)]
    first_line, *_ = scenes.fit(callbacks=callbacks, raises=True).error.splitlines()
    # The following lines say where it was raised.
    assert first_line == "RuntimeError: comm: rank 1 does not answer"
    assert not list(tmp_path.iterdir())


def test_between_logged_steps_and_checks_nothing_is_read(monkeypatch):
    """A read would block the host on CUDA. On a CPU the monitor reads in each step."""
    counted = []
    for is_free in (False, True):
        monkeypatch.setattr(
            numbers_module, "_reads_are_free", lambda device, is_free=is_free: is_free
        )
        reads = ReadsFromStep1To9()
        callbacks = [reads, ReplicaCheck(every_n_steps=10), NumericsMonitor()]
        scene = {
            "train": toy.loader(128),
            "max_epochs": 1,
            "precision": "16-true",
            "log_every_n_steps": 10,
        }
        scenes.fit(None, Quiet, callbacks=callbacks, **scene)
        counted.append(dict(reads.host_reads.by_file))
    when_costly, when_free = counted
    of_callbacks = [name for name in when_free if name.startswith("callbacks/")]
    assert of_callbacks == ["callbacks/numerics.py"]
    del when_free["callbacks/numerics.py"]
    assert when_costly == when_free


class ReadsFromStep1To9(pl.Callback):
    """Counter of host reads by file, from the second step to the ninth, which is the last before a logged one."""

    def __init__(self):
        self.host_reads = HostReads()

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 1:
            self.host_reads.__enter__()

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 9:
            self.host_reads.__exit__(None, None, None)


class Quiet(toy.Toy):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)
