"""User code that copies callbacks or the trainer within a fit, as it may under `ddp`."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_hybrid import Comm, DurableCheckpointIO, HybridAllReduceStrategy
from lightning_hybrid import callbacks as own
from recipes.training.callbacks.seed_each_step import SeedEachStep
from tests import toy


class Copies(pl.Callback):
    def __init__(self):
        self.num_copies = 0

    def on_fit_start(self, trainer, module):
        copied = copy.deepcopy(trainer)
        assert [type(one) for one in copied.callbacks] == [type(one) for one in copy.deepcopy(trainer.callbacks)]
        assert copied.callbacks[0] is not trainer.callbacks[0]
        self.num_copies += 1

    def on_train_batch_end(self, trainer, module, *_):
        self.on_fit_start(trainer, module)


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_our_callbacks_and_the_trainer_can_be_copied_within_a_fit(tmp_path, precision):
    kinds = (own.TrainingMetrics, own.NumericsMonitor, own.ReplicaCheck)
    report = own.RunReport(str(tmp_path))
    copies = Copies()
    trainer = toy.trainer(
        strategy=HybridAllReduceStrategy(comm=Comm(tune="on"), checkpoint_io=DurableCheckpointIO(in_background=True)),
        precision=precision,
        callbacks=[report, *(kind() for kind in kinds), own.StopOnSignal(), SeedEachStep(0), copies],
        logger=CSVLogger(tmp_path),
        max_epochs=1,
    )
    trainer.fit(module := toy.Toy(), toy.loader(32))
    assert copies.num_copies == 5
    alone = toy.Toy()
    toy.trainer(precision=precision, max_epochs=1, callbacks=[SeedEachStep(0)]).fit(alone, toy.loader(32))
    assert toy.same_bits(toy.weights(module), toy.weights(alone)), "a copy changes nothing"
