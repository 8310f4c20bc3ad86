"""Step checkpoints, which are not written where a resumed run would miss a validation."""

import lightning.pytorch as pl
import pytest
import torch

from recipes.training.callbacks.step_checkpoint import StepCheckpoint
from tests import toy
from tests.scenes import at, fit


def saving(folder, **options):
    return StepCheckpoint(folder, "{step}", save_top_k=-1, **options)


OF_CALLBACK = ("every_n_train_steps", "save_on_train_epoch_end", "save_last")


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every_n_train_steps": 3}, [3, 6, 9, 12, 15]),
        ({"every_n_train_steps": 4, "val": None}, [4, 8, 12, 16]),
        ({"every_n_train_steps": 4, "val_check_interval": 4}, [5, 8, 13, 16]),
        ({"every_n_train_steps": 3, "val_check_interval": 2}, [3, 7, 9, 13, 15]),
        (
            {"every_n_train_steps": 2, "accumulate_grad_batches": 2, "val_check_interval": 5},
            [2, 4, 6, 8],
        ),
        (
            {"every_n_train_steps": 2, "accumulate_grad_batches": 2, "val_check_interval": 4},
            [3, 4, 7, 8],
        ),
        ({"every_n_train_steps": 1, "fast_dev_run": True}, []),
        ({"save_on_train_epoch_end": True}, [8, 16]),
    ],
    ids=str,
)
def test_a_checkpoint_gives_way_to_validation_and_end_of_epoch(one_rank, tmp_path, settings, steps):
    """The fit has 2 epochs of 8 steps."""
    callback_options = {}
    scene = {"val": toy.loader, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    for name, value in settings.items():
        if name in OF_CALLBACK:
            callback_options[name] = value
        else:
            scene[name] = value
    fit(one_rank, callbacks=[saving(tmp_path, **callback_options)], **scene)
    assert sorted(int(path.stem.partition("=")[2]) for path in tmp_path.glob("*.ckpt")) == steps


class Ends(pl.Callback):
    """Callback that counts finished epochs, also in the checkpoint."""

    num_ended = 0

    def on_train_epoch_end(self, trainer, module):
        self.num_ended += 1

    def state_dict(self):
        return {"num_ended": self.num_ended}


def test_the_checkpoint_of_the_last_step_of_an_epoch_knows_that_it_has_ended(one_rank, tmp_path):
    """Lightning's own callback saves before the end of the epoch, which a resumed run would then skip."""
    saves = saving(tmp_path, every_n_train_steps=4, save_last=True)
    fit(one_rank, callbacks=[Ends(), saves], enable_checkpointing=True)
    checkpoints = {}
    num_ended = {}
    for path in tmp_path.glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        checkpoints[path.stem] = checkpoint
        num_ended[path.stem] = checkpoint["callbacks"]["Ends"]["num_ended"]
    assert num_ended == {"step=4": 0, "step=8": 1, "step=12": 1, "step=16": 2, "last": 2}
    assert checkpoints["last"]["global_step"] == 16


def gone(trainer, module):
    if trainer.global_step == 8:
        raise OSError("gone")


def step(trainer, module):
    return trainer.global_step


@pytest.mark.filterwarnings("ignore:You're resuming", "ignore:Checkpoint directory")
def test_a_run_that_broke_in_validation_validates_when_it_goes_on(one_rank, tmp_path):
    """Lightning's own callback saves step 8 before the validation, which the resumed run would never make."""
    options = {"val": toy.loader, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    for look in (gone, step):
        newest = max(map(str, tmp_path.glob("*.ckpt")), default=None)
        callbacks = [at(on_validation_start=look), saving(tmp_path, every_n_train_steps=4)]
        options |= {"callbacks": callbacks, "ckpt_path": newest}
        (seen,) = fit(one_rank, raises=look is gone, **options)
    assert seen.looks["on_validation_start"] == [8, 16]
