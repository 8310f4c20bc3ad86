"""The metrics of an epoch that was interrupted in its middle are those of the whole epoch."""

from __future__ import annotations

import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import MeanMetric, Metric

from lightning_hybrid.callbacks import KeepEpochMetrics, StepCheckpoint
from lightning_hybrid.callbacks.epoch_metrics import KEY
from tests import toy

AS_MEANT = pytest.mark.filterwarnings(
    "ignore:It is recommended to use", "ignore:Checkpoint directory .* exists and is not empty"
)  # a rank's own value is what is wanted, and a directory for all runs


class Place:
    """Batches of one rank, other than the other's, with a place to go on from."""

    def __init__(self):
        self.batches_done = 0

    def __len__(self):
        return 6

    def __iter__(self):
        blobs = toy.Blobs(64)
        start, self.batches_done = self.batches_done % 6, self.batches_done % 6
        for batch in range(start, 6):
            first = 10 * batch + 5 * dist.get_rank()
            self.batches_done += 1
            yield blobs.images[first : first + 5], blobs.targets[first : first + 5]

    def state_dict(self):
        return {"batches_done": self.batches_done}

    def load_state_dict(self, state):
        self.batches_done = state["batches_done"]


class Spread(Metric):
    """States of the two kinds that a sum is not: averaged over updates, and a list."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("all", [], dist_reduce_fx="cat")

    def update(self, loss):
        self.mean = loss.detach()
        self.all.append(loss.detach().reshape(1))

    def compute(self):
        values = torch.cat(self.all) if isinstance(self.all, list) else self.all
        return self.mean + values.max() - values.min()


class Averaging(toy.Toy):
    def __init__(self):
        super().__init__()
        self.train_loss, self.spread, self.val_loss, self.unused = MeanMetric(), Spread(), MeanMetric(), MeanMetric()
        self.seen = {}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.train_loss(loss)
        self.spread(loss)
        self.log("object", self.train_loss, on_step=False, on_epoch=True)
        self.log("spread", self.spread, on_step=False, on_epoch=True)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=5)
        self.log("own", loss, on_step=False, on_epoch=True, batch_size=5)
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=5)
        self.log("latest", loss, batch_size=5)
        if batch_idx % 2 == 1:  # not in the first batch after a resume
            self.log("odd", loss, on_step=False, on_epoch=True, batch_size=5)
        if batch_idx == 0 and self.trainer.max_epochs > 1:  # not again in the epoch of the resume
            self.log("first", loss, on_step=False, on_epoch=True, batch_size=5)
        return loss

    def validation_step(self, batch, batch_idx):
        self.val_loss(self.loss(batch))
        self.log("val", self.val_loss, on_step=False, on_epoch=True)

    def on_train_epoch_start(self):
        if self.trainer.current_epoch > 0:
            self.read(self.trainer.current_epoch - 1)

    def on_train_end(self):
        self.read(self.trainer.current_epoch - 1)

    def read(self, epoch):
        """Of epochs, to compare."""
        self.seen[epoch] = {name: value.item() for name, value in self.trainer.callback_metrics.items()}


EPOCH_VALUES = {"object", "spread", "mean", "own", "sum", "odd"}


def each_second_step(folder):
    return StepCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2)


def averages(folder, resume=None, with_callback=True, validates=False, num_epochs=1):
    """By epochs. Checkpoints after steps 2, 4, 6, ..., or with `validates` in the validations there."""
    warnings.filterwarnings("ignore", message="`world_size`|You're resuming from a checkpoint that ended before")
    keeps = [KeepEpochMetrics()] if with_callback else []
    in_validation = partial(ModelCheckpoint, folder, "{step}", save_top_k=-1, monitor="val")
    saves = in_validation() if validates else each_second_step(folder)
    module = Averaging()
    settings = {"val_check_interval": 2, "num_sanity_val_steps": 0} if validates else {"limit_val_batches": 0}
    trainer = toy.trainer(callbacks=[*keeps, saves], enable_checkpointing=True, max_epochs=num_epochs, **settings)
    trainer.fit(module, Place(), toy.loader(), ckpt_path=resume)
    return module.seen


@pytest.mark.sampled(2)
@AS_MEANT
@pytest.mark.parametrize("validates", [False, True], ids=["after a step", "in a validation"])
def test_the_averages_of_an_interrupted_epoch_are_those_of_all_of_it(two_ranks, tmp_path, validates):
    """Sums of float32 in the same order: equal to the bit. Without the callback they are of the last two batches."""
    expected = two_ranks.run(averages, str(tmp_path), None, True, validates)
    assert expected[0][0].keys() == EPOCH_VALUES | {"latest"} | ({"val"} if validates else set())
    assert expected[0][0]["own"] != expected[1][0]["own"]
    path = str(tmp_path / "step=4.ckpt")
    assert two_ranks.run(averages, str(tmp_path), path, True, validates) == expected
    (rest, _) = two_ranks.run(averages, str(tmp_path), path, False, validates)
    assert all(rest[0][name] != expected[0][0][name] for name in EPOCH_VALUES)
    saved = torch.load(path, weights_only=True)[KEY]
    assert all(own["metrics"].keys() == {"train_loss", "spread"} for own in saved)
    assert all(len(own["logged"]) == 4 for own in saved)  # mean, own, sum, odd: `latest` is of no epoch


@AS_MEANT
def test_a_finished_epoch_is_not_added_to_the_next(one_rank, tmp_path):
    (expected,) = one_rank.run(averages, str(tmp_path), None, True, False, 2)
    path = str(tmp_path / "step=6.ckpt")
    assert KEY not in torch.load(path, weights_only=True)
    (resumed,) = one_rank.run(averages, str(tmp_path), path, True, False, 2)
    assert resumed[1] == expected[1] != expected[0]
    (resumed,) = one_rank.run(averages, str(tmp_path), str(tmp_path / "step=4.ckpt"), True, False, 2)
    assert resumed[1] == expected[1]


class Checkpoints(pl.Callback):
    """As they are, before anybody copies them."""

    def __init__(self):
        self.taken = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        checkpoint = {}
        trainer.callbacks[0].on_save_checkpoint(trainer, module, checkpoint)
        self.taken.append(checkpoint.get(KEY))


def taken(folder, resume):
    checkpoints = Checkpoints()
    trainer = toy.trainer(
        callbacks=[KeepEpochMetrics(), checkpoints, each_second_step(folder)], enable_checkpointing=True, max_epochs=1
    )
    trainer.fit(Averaging(), Place(), ckpt_path=resume)
    return checkpoints.taken


@AS_MEANT
def test_a_checkpoint_before_the_first_batch_after_a_resume_keeps_what_was_kept(one_rank, tmp_path):
    """As when the run has to stop at once. And later batches change no checkpoint that was taken before."""
    one_rank.run(averages, str(tmp_path))
    (whole,) = one_rank.run(taken, str(tmp_path), None)
    (resumed,) = one_rank.run(taken, str(tmp_path), str(tmp_path / "step=4.ckpt"))
    ((one,), (other,)) = whole[4], resumed[0]
    assert one["metrics"].keys() == {"train_loss", "spread"}
    for name, (num_updates, states) in one["metrics"].items():
        assert num_updates == other["metrics"][name][0] == 4
        assert str(states) == str(other["metrics"][name][1])
    assert str(one["logged"]) == str(other["logged"])


def of_another_world(folder):
    trainer = toy.trainer(
        callbacks=[KeepEpochMetrics(), each_second_step(folder)], enable_checkpointing=True, max_epochs=1
    )
    error = toy.error_of(trainer.fit, Averaging(), Place(), ckpt_path=f"{folder}/step=4.ckpt")
    return error, averages(folder, f"{folder}/step=4.ckpt"), averages(folder, f"{folder}/step=4.ckpt", False)


@AS_MEANT
def test_sums_of_another_number_of_ranks_belong_to_nobody(one_rank, two_ranks, tmp_path):
    two_ranks.run(averages, str(tmp_path))
    ((error, with_callback, without),) = one_rank.run(of_another_world, str(tmp_path))
    assert "`world_size` (=1) is not that of the checkpoint (=2)" in error  # a warning, which is an error in tests
    assert with_callback == without
