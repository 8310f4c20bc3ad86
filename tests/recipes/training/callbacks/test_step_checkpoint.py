"""Checkpoints of steps are not written where a resumed run would leave out a validation."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from recipes.training.callbacks.step_checkpoint import StepCheckpoint
from tests import toy


class Validations(pl.Callback):
    """After which steps there was one; in one of them the run breaks."""

    def __init__(self, breaks_at=None):
        self.steps, self.breaks_at = [], breaks_at

    def on_validation_start(self, trainer, module):
        if trainer.global_step == self.breaks_at:
            raise OSError("gone")
        self.steps.append(trainer.global_step)


def steps_saved(folder, validates=True, **settings):
    """Of 2 epochs of 8 steps."""
    own = {name: settings.pop(name) for name in ("every_n_train_steps", "save_on_train_epoch_end") if name in settings}
    saves = StepCheckpoint(folder, "{step}", save_top_k=-1, **own)
    trainer = toy.trainer(callbacks=[saves], enable_checkpointing=True, num_sanity_val_steps=0, **settings)
    trainer.fit(toy.Toy(), toy.loader(), toy.loader() if validates else None)
    return sorted(int(path.stem.partition("=")[2]) for path in Path(folder).glob("*.ckpt"))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every_n_train_steps": 3}, [3, 6, 9, 12, 15]),
        ({"every_n_train_steps": 4}, [4, 8, 12, 16]),
        ({"every_n_train_steps": 4, "validates": False}, [4, 8, 12, 16]),
        ({"every_n_train_steps": 4, "val_check_interval": 4}, [5, 8, 13, 16]),
        ({"every_n_train_steps": 3, "val_check_interval": 2}, [3, 7, 9, 13, 15]),
        ({"every_n_train_steps": 2, "accumulate_grad_batches": 2}, [2, 4, 6, 8]),
        ({"every_n_train_steps": 2, "accumulate_grad_batches": 2, "val_check_interval": 5}, [2, 4, 6, 8]),
        ({"every_n_train_steps": 2, "accumulate_grad_batches": 2, "val_check_interval": 4}, [3, 4, 7, 8]),
        ({"every_n_train_steps": 1, "fast_dev_run": True}, []),
        ({"save_on_train_epoch_end": True}, [8, 16]),
    ],
    ids=str,
)
def test_a_checkpoint_gives_way_to_validation_and_end_of_epoch(one_rank, tmp_path, settings, steps):
    assert one_rank.run(_steps_saved, str(tmp_path), settings) == [steps]


def _steps_saved(folder, settings):
    return steps_saved(folder, **settings)


class Ends(pl.Callback):
    """How many epochs have ended, in the checkpoint too."""

    num_ended = 0

    def on_train_epoch_end(self, trainer, module):
        self.num_ended += 1

    def state_dict(self):
        return {"num_ended": self.num_ended}


def ends_in_checkpoints(folder):
    """Step -> epochs that had ended; in `last.ckpt` the step it is of."""
    saves = StepCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=4, save_last=True)
    toy.trainer(callbacks=[Ends(), saves], enable_checkpointing=True).fit(toy.Toy(), toy.loader())
    found = {path.stem: torch.load(path, weights_only=True) for path in Path(folder).glob("*.ckpt")}
    ends = {name: content["callbacks"]["Ends"]["num_ended"] for name, content in found.items()}
    return ends, found["last"]["global_step"]


def test_the_checkpoint_of_the_last_step_of_an_epoch_knows_that_it_has_ended(one_rank, tmp_path):
    """Lightning's own callback writes it before: a resumed run leaves the end of that epoch out."""
    ends = {"step=4": 0, "step=8": 1, "step=12": 1, "step=16": 2, "last": 2}
    assert one_rank.run(ends_in_checkpoints, str(tmp_path)) == [(ends, 16)]


def broken_and_resumed(folder):
    """Steps validated by a run that breaks in the validation after the first epoch, then by the one that goes on."""
    found = []
    for breaks_at in (8, None):
        validations, newest = Validations(breaks_at), max(Path(folder).glob("*.ckpt"), default=None)
        saves = StepCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=4)
        callbacks = [validations, saves]
        trainer = toy.trainer(callbacks=callbacks, enable_checkpointing=True, num_sanity_val_steps=0)
        warnings.filterwarnings("ignore", message="You're resuming|Checkpoint directory")
        try:
            trainer.fit(toy.Toy(), toy.loader(), toy.loader(), ckpt_path=newest and str(newest))
        except OSError:
            assert breaks_at is not None
        found.append(validations.steps)
    return found


def test_a_run_that_broke_in_validation_validates_when_it_goes_on(one_rank, tmp_path):
    """Lightning's own callback writes step 8 before the validation, and the resumed run never makes it."""
    assert one_rank.run(broken_and_resumed, str(tmp_path)) == [[[], [8, 16]]]
