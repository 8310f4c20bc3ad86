"""User code that copies callbacks or the trainer within a fit, as it may under `ddp`."""

import copy

from lightning.pytorch.loggers import CSVLogger

from lightning_hybrid import Comm, DurableCheckpointIO
from lightning_hybrid import callbacks as own
from recipes.training.callbacks.seed_each_step import SeedEachStep
from tests import toy
from tests.scenes import at, fit, same


def copied(trainer, *_):
    one = copy.deepcopy(trainer)
    names = [[type(each).__name__ for each in callbacks] for callbacks in (one.callbacks, trainer.callbacks)]
    assert names[0] == names[1]
    assert one.callbacks[0] is not trainer.callbacks[0]
    return True


def test_our_callbacks_and_the_trainer_can_be_copied_within_a_fit(tmp_path):
    kinds = (own.TrainingMetrics, own.NumericsMonitor, own.ReplicaCheck, own.StopOnSignal)
    copies = at(on_fit_start=copied, on_train_batch_end=copied)
    scene = {"train": toy.loader(32), "precision": "16-true", "max_epochs": 1}
    found = fit(
        comm=Comm(tune="on"),
        checkpoint_io=DurableCheckpointIO(in_background=True),
        callbacks=[own.RunReport(str(tmp_path)), *(kind() for kind in kinds), SeedEachStep(0), copies],
        logger=CSVLogger(tmp_path),
        **scene,
    )
    assert list(map(len, found.looks.values())) == [1, 4]
    assert same(found.weights, fit(callbacks=[SeedEachStep(0)], **scene).weights), "a copy changes nothing"
