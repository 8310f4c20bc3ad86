"""Short fit on a simulated clock, with a logger that keeps its rows and a strategy with fixed counters."""

import dataclasses
import time

import torch

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.callbacks import TrainingMetrics, time_to_accuracy, training_metrics
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report import callback
from lightning_hybrid.comm import BucketSummary, CommSummary, Traffic
from tests import toy
from tests.scenes import Columns, Keeps, build


class Module(toy.Toy):
    """`Toy` with logged validation, a schedule, and steps that take half a second of a simulated clock."""

    now_s = 0.0

    def training_step(self, batch, batch_idx):
        Module.now_s += 0.5
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        Module.now_s += 1000.0
        self.log(m.VAL_LOSS, self.loss(batch), sync_dist=True)
        self.log(m.VAL_ACC, 0.5, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log(m.TEST_ACC, 0.75, sync_dist=True)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    validate=True,
    skip_steps=4,
    callbacks=(),
    ckpt_path=None,
    module=Module,
    train=None,
    metrics=None,
    **settings,
):
    """Fit two epochs with `TrainingMetrics`. With two ranks, each epoch has four steps of 2 * 8 images.

    `callbacks` are further callbacks, or functions that create them. `metrics` are options of `TrainingMetrics`.
    """
    logger = Keeps()
    module = build(module)
    settings = {"log_every_n_steps": 2, "precision": "16-true", "logger": logger, **settings}
    callbacks = [TrainingMetrics(skip_steps, **(metrics or {})), *map(build, callbacks)]
    trainer = toy.trainer(callbacks=callbacks, **settings)
    if train is None:
        train = toy.loader()
    val = toy.loader() if validate else None
    modules_with_clock = (training_metrics, callback, time_to_accuracy)
    for module_with_clock in modules_with_clock:
        module_with_clock.perf_counter = lambda: Module.now_s
    try:
        trainer.fit(module, train, val, ckpt_path=ckpt_path)
    finally:  # the process runs other tests after this one
        for module_with_clock in modules_with_clock:
            module_with_clock.perf_counter = time.perf_counter
    return logger, module, trainer


def seen(ranks, **scene):
    """Return, for each rank, logged columns, losses and steps."""
    return ranks.run(rows_of, scene)


def rows_of(scene):
    logger, module, trainer = fit(**scene)
    return Rows(logger.rows, module.losses, trainer.global_step)


@dataclasses.dataclass(frozen=True)
class Rows(Columns):
    """Rows that a logger received, with losses and steps."""

    rows: list
    losses: list
    global_step: int

    def names(self):
        return {name for _, row in self.rows for name in row}


def bucket(index, num_times, in_flight_s, exposed_s):
    return BucketSummary(
        index=index,
        numel=500,
        num_bytes=1000,
        dtype="float16",
        algorithm="flat",
        num_chunks=2,
        traffic=Traffic(least_across=1000.0, across=1500.0, inside=2000.0),
        num_times=num_times,
        in_flight_s=in_flight_s,
        exposed_s=exposed_s,
    )


TWO_STEPS = CommSummary(
    num_steps=2,
    num_buckets=4,
    num_bytes=4000,
    busy_s=0.25,
    exposed_s=0.1,
    least_bytes_across=4000.0,
    bytes_across=6000.0,
    bytes_inside=8000.0,
    buckets=(bucket(0, 2, 0.2, 0.0), bucket(1, 2, 0.4, 0.1)),
)
WINDOWS = {
    "one node": dataclasses.replace(TWO_STEPS, least_bytes_across=0.0, bytes_across=0.0),
    "cuda": dataclasses.replace(
        TWO_STEPS, busy_s=None, exposed_s=None, buckets=(bucket(0, 2, None, None),)
    ),
}


class Counted:
    """Substitute for `CommTrace`. Each drain returns the same two steps."""

    def __init__(self, window):
        self.window = window
        self.seen = CommSummary()
        self.measures_devices = False

    def measure_devices(self):
        self.measures_devices = True

    def drain(self):
        self.seen += self.window
        return self.window

    def total(self):
        return self.seen


def counting(window=TWO_STEPS, **options):
    class Counting(HybridAllReduceStrategy):
        comm_trace = Counted(window)

    return Counting(**options)
