"""The metrics of an epoch that was interrupted in its middle are those of the whole epoch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import MeanMetric

from lightning_hybrid.callbacks import KeepEpochMetrics
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


class Averaging(toy.Toy):
    def __init__(self):
        super().__init__()
        self.train_loss = MeanMetric()
        self.seen = {}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.train_loss(loss)
        self.log("object", self.train_loss, on_step=False, on_epoch=True)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=5)
        self.log("own", loss, on_step=False, on_epoch=True, batch_size=5)
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=5)
        return loss

    def on_train_end(self):
        self.seen = {name: value.item() for name, value in self.trainer.callback_metrics.items()}


def averages(folder, resume=None, with_callback=True):
    keeps = [KeepEpochMetrics()] if with_callback else []
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=4)
    module = Averaging()
    trainer = toy.trainer(callbacks=[*keeps, saves], enable_checkpointing=True, max_epochs=1)
    trainer.fit(module, Place(), ckpt_path=resume)
    return module.seen


@AS_MEANT
def test_the_averages_of_an_interrupted_epoch_are_those_of_all_of_it(two_ranks, tmp_path):
    """Sums of float32 in the same order: equal to the bit. Without the callback they are of the last two batches."""
    expected = two_ranks.run(averages, str(tmp_path))
    assert expected[0].keys() == {"object", "mean", "own", "sum"}
    assert expected[0]["own"] != expected[1]["own"]
    path = str(tmp_path / "step=4.ckpt")
    assert two_ranks.run(averages, str(tmp_path), path) == expected
    (rest, _) = two_ranks.run(averages, str(tmp_path), path, False)
    assert all(rest[name] != expected[0][name] for name in rest)


def states_of(folder):
    return toy.error_of(averages, folder, f"{folder}/step=4.ckpt")


@AS_MEANT
def test_sums_of_another_number_of_ranks_belong_to_nobody(one_rank, two_ranks, tmp_path):
    two_ranks.run(averages, str(tmp_path))
    assert torch.load(tmp_path / "step=4.ckpt", weights_only=True)["epoch_metrics"][1]["logged"]
    (told,) = one_rank.run(states_of, str(tmp_path))
    assert "`world_size` (=1) is not that of the checkpoint (=2)" in told  # a warning, which is an error in tests
