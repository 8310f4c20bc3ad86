"""Numbers that go wrong are reported with rank, batch and layer, once. And the state is there for a look."""

import re
from functools import partial
from pathlib import Path

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
    scene = {"log_every_n_steps": every, "max_epochs": max_epochs, "precision": precision, **scene}
    scene |= {
        "callbacks": [NumericsMonitor(folder, patience=patience)],
        "raises": True,
        "warns": True,
    }
    found = scenes.fit(ranks, module, **scene)
    found = [
        (one.error, [w for w in one.warnings if OWN.search(w)])
        for one in ([found] if ranks is None else found)
    ]
    if ranks is None:
        return found[0]
    return found


OWN = re.compile("was inf|zero, at|do not learn|at its floor")


def test_overflow_without_end_names_rank_host_batch_and_scale_on_every_rank(two_ranks, tmp_path):
    for rank, (error, _) in enumerate(fit(ENDLESS, two_ranks, str(tmp_path))):
        assert error.startswith(
            "EndlessOverflowError: Gradients were inf or nan for 40 steps in a row, up to global"
        )
        assert f" The loss was inf or nan on 1 of 2 ranks: rank 1 (host {HOST}) in batch " in error
        assert (
            "The outputs of all 9 layers were finite: it is in the loss, or in backward." in error
        )
        assert "The scale: " in error
        assert "1 at step " in error
        assert f"On rank {rank} (host {HOST}), in batch " in error
        assert f"Saved for a look: {tmp_path}/numbers/step" in error
    zero, one = (
        torch.load(next(Path(tmp_path, "numbers").glob(f"*rank{r}.pt")), weights_only=True)
        for r in (0, 1)
    )
    assert zero["state_dict"].keys() == toy.Toy().state_dict().keys()
    assert zero["state_dict"]["net.8.weight"].dtype is torch.float32
    assert "state_dict" not in one  # the same as on rank zero
    assert one["batch"][0].shape == (8, toy.NUM_FEATURES)
    assert not torch.equal(zero["batch"][0], one["batch"][0])
    assert one["global_step"] == 41
    assert one["scale_history"][-1][1] == 1.0
    assert "rng_state" in one


class Inverts(nn.Module):
    def forward(self, x):
        return 1 / (x - x)


def test_the_first_layer_that_puts_out_inf_is_named():
    module = toy.Toy()
    module.net.insert(7, Inverts())
    error, _ = fit(module)
    assert "The first layer to put out inf or nan was net.7 (Inverts)." in error


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_where_no_step_is_skipped_the_first_rank_and_step_are_told(two_ranks, precision):
    for error, _ in fit(partial(Spoiled, steps=[3], **NAN), two_ranks, precision=precision):
        assert error.startswith(
            "NonFiniteLossError: The loss is not finite since step 4, on rank 1 first, and precis"
        )
        assert f"rank 1 (host {HOST}) in batch " in error
        assert "resume from a checkpoint written before step 4." in error


def test_a_single_bad_batch_is_a_warning_on_its_rank_and_the_run_goes_on(two_ranks):
    zero, one = fit(partial(Spoiled, steps=[5], **NAN), two_ranks, max_epochs=3)
    assert zero == ("", [])
    error, (warning,) = one
    assert error == ""
    assert warning.startswith(
        f"The loss of 1 batches on rank 1 (host {HOST}) was inf or nan, the last: batch 1 (step 6"
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
    assert "at 3 logged steps in a row up to step 15: these layers do not learn" in warning


def test_gradients_that_are_all_zero_are_told_apart_and_those_now_and_then_are_nothing_to_speak_of():
    error, (warning,) = fit(
        Spoiled(steps=range(99), factor=0.0, rank=None), max_epochs=3, patience=2
    )
    assert error == ""
    assert warning.startswith(
        "All gradients are zero, at 2 logged steps in a row up to step 20: nothing is learned"
    )
    pauses = Spoiled(steps=range(3, 99, 4), factor=0.0, rank=None)  # at every second logged step
    assert fit(pauses, max_epochs=2, every=2, patience=2) == ("", [])


def test_a_scale_that_stays_at_its_floor_is_a_warning(monkeypatch):
    monkeypatch.setattr(numbers_module, "STEPS_AT_FLOOR", 10)
    scale = DynamicLossScale(init_scale=4.0, min_scale=2.0, growth_interval=1000)
    module = Spoiled(steps=[2], rank=0)
    _, warned = fit(module, max_epochs=4, every=5, loss_scale=scale)
    (warning,) = (each for each in warned if "floor" in each)
    assert warning.startswith("`loss_scale` (=2) has been at its floor for 10 steps")


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
    error = scenes.fit(callbacks=callbacks, raises=True).error
    assert error.splitlines()[0] == "RuntimeError: comm: rank 1 does not answer", (
        "what follows says where, not what"
    )
    assert not list(tmp_path.iterdir())


def test_between_logged_steps_and_checks_nothing_is_read(monkeypatch):
    """As on CUDA, where the host would wait. On a CPU the monitor reads at each step."""
    counted = []
    for free in (False, True):
        monkeypatch.setattr(numbers_module, "_reads_are_free", lambda device, free=free: free)
        # by file, from the second step to the ninth, the last before one that is logged
        mode = HostReads()
        reads = at(
            on_train_batch_start=lambda trainer, *_, mode=mode: (
                trainer.global_step == 1 and mode.__enter__()
            ),
            on_train_batch_end=lambda trainer, *_, mode=mode: (
                trainer.global_step == 9 and mode.__exit__(*[None] * 3)
            ),
        )
        callbacks = [reads, ReplicaCheck(every_n_steps=10), NumericsMonitor()]
        scene = {
            "train": toy.loader(128),
            "max_epochs": 1,
            "precision": "16-true",
            "log_every_n_steps": 10,
        }
        scenes.fit(None, Quiet, callbacks=callbacks, **scene)
        counted.append(dict(mode.by_file))
    of_the_monitor = {name for name in counted[1] if name.startswith("callbacks/")}
    assert of_the_monitor == {"callbacks/numerics.py"}
    assert counted[0] == {
        name: num for name, num in counted[1].items() if name not in of_the_monitor
    }


class Quiet(toy.Toy):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)
