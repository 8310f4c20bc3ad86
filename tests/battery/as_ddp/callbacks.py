"""Every callback that Lightning ships, in a fit; a new one is missing in `CALLBACKS` until it is added."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.battery.as_ddp.checkpoints import Falls
from tests.battery.as_ddp.trainers import state_of
from tests.battery.case import Plain, Run, barrier, behaviour, loader, plain_with


class Watched(Plain):
    """Logs metrics that callbacks monitor, and keeps its weights after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.batch_size = 4
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.body(x)).relu())

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]

    def on_validation_epoch_end(self) -> None:
        self.log("score", torch.tensor([0.5, 0.4, 0.45, 0.6, 0.7][self.current_epoch]), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.seen.append([each.detach().clone() for each in self.parameters()])


class Backbone(Watched):
    """With the name that BackboneFinetuning looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.body


def fitted(make: Callable[[], Any], module: type[Plain] = Watched, **settings: Any) -> Callable[[Run], Any]:
    """A fit with the callback: its state, what was logged, the weights and the files."""

    def seen_by(run: Run) -> Any:
        callback, logger = make(), CSVLogger(run.folder, name="logs", version=0)
        known = {"callbacks": [callback], "logger": logger, "max_epochs": 4}
        trainer, model = run.fit(module(), loader(), loader(), **(known | settings))
        barrier()
        metrics = run.folder / "logs/version_0/metrics.csv"
        text = metrics.read_text() if metrics.exists() and run.precision == "32-true" else None
        seen, states = getattr(model, "seen", None), [model.state_dict(), callback.state_dict()]
        return [state_of(trainer), seen, *states, text, run.files(), type(callback)]

    return seen_by


class Writer(callbacks.BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.calls: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
        self.calls.append(("batch", given))

    def write_on_epoch_end(self, trainer: Any, module: Any, *given: Any) -> None:
        self.calls.append(("epoch", given))


def predictions_written(run: Run) -> Any:
    writer = Writer()
    returned = run.trainer(callbacks=[writer]).predict(Plain(), loader())
    return writer.calls, returned


class Unfreezes(callbacks.BaseFinetuning):
    """Of the user."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.norm, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(module.norm, optimizer, lr=0.01)


class Keeps(CSVLogger):
    """Keeps what is logged, and when."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((metrics, step))


def stats(run: Run) -> Any:
    """Names of what DeviceStatsMonitor logs; the values are a test's own."""
    monitor, logger = callbacks.DeviceStatsMonitor(cpu_stats=None), Keeps(run.folder)
    known = mock.patch("lightning.pytorch.callbacks.device_stats_monitor._PSUTIL_AVAILABLE", True)
    with known, mock.patch("lightning.pytorch.accelerators.cpu.get_cpu_stats", return_value={"cpu_percent": 1.0}):
        run.fit(callbacks=[monitor], logger=logger, max_epochs=1)
    return [(sorted(metrics), step) for metrics, step in logger.rows]


def throughput(run: Run) -> Any:
    """With a clock of the test's own, as in tests of users."""
    monitor = callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
    ticks, logger = iter(range(1000)), Keeps(run.folder)
    with mock.patch("time.perf_counter", side_effect=lambda: float(next(ticks))):
        run.fit(callbacks=[monitor], logger=logger)
    trained = [({name: row[name] for name in row if name.startswith("train|")}, step) for row, step in logger.rows]
    return trained, next(ticks)


def timed(run: Run) -> Any:
    """Timer, with a clock that goes by a minute each time that it is read."""
    minutes = iter(range(0, 60_000, 60))
    timer = callbacks.Timer(duration=timedelta(minutes=5), interval="step")
    with mock.patch("time.monotonic", side_effect=lambda: float(next(minutes))):
        trainer, _ = run.fit(callbacks=[timer], max_epochs=5)
        elapsed = timer.time_elapsed(), timer.time_remaining(), timer.state_dict()
    return elapsed, state_of(trainer)


def failing(run: Run) -> Any:
    """OnExceptionCheckpoint."""

    def fails(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise LookupError
        return Plain.training_step(self, batch, batch_idx)

    try:
        saves = callbacks.OnExceptionCheckpoint(run.folder)
        run.fit(plain_with(training_step=fails), callbacks=[saves], enable_checkpointing=True)
    except LookupError:
        module = Plain.load_from_checkpoint(run.folder / "on_exception.ckpt")
    return run.files(), module.state_dict()


def summary(make: Callable[[], Any]) -> Callable[[Run], Any]:
    def seen_by(run: Run) -> Any:
        callback, said = make(), []
        with mock.patch.object(type(callback), "summarize", lambda *given, **more: said.append((given, more))):
            run.fit(callbacks=[callback], max_epochs=1)
        return said

    return seen_by


def shown(make: Callable[[], Any]) -> Callable[[Run], Any]:
    """What a progress bar is told: totals, descriptions and metrics."""

    def seen_by(run: Run) -> Any:
        seen: list[Any] = []
        bar = make()

        class Looks(pl.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
                metrics = {name: value for name, value in bar.get_metrics(trainer, module).items() if name != "v_num"}
                seen.append((metrics, bar.total_train_batches, bar.train_description, getattr(bar, "is_enabled", None)))

        settings = {"callbacks": [bar, Looks()], "max_epochs": 1, "enable_progress_bar": True}
        with mock.patch("sys.stdout"), mock.patch("sys.stderr"):
            trainer, _ = run.fit(None, loader(), loader(), **settings)
        return seen, bar.total_val_batches, trainer.progress_bar_callback is bar

    return seen_by


class Bar(callbacks.ProgressBar):
    """Of the user, who shows nothing."""

    def disable(self) -> None: ...

    def enable(self) -> None: ...


def batch_size_found(run: Run) -> Any:
    try:
        run.fit(Watched(), callbacks=[callbacks.BatchSizeFinder(max_trials=2)], max_epochs=1)
    except Exception as error:
        return type(error), str(error)


def rate_found(run: Run) -> Any:
    finder = callbacks.LearningRateFinder(min_lr=1e-4, max_lr=1e-2, num_training_steps=6)
    trainer, module = run.fit(callbacks=[finder], max_epochs=1)
    assert finder.optimal_lr is not None
    return finder.optimal_lr.results, trainer.global_step, module.state_dict()


def called(run: Run) -> Any:
    """LambdaCallback, in all of its hooks."""
    calls: list[Any] = []
    hooks = {
        name: (lambda *given, _name=name, **more: calls.append((_name, [type(each) for each in given], sorted(more))))
        for name in (
            "setup on_fit_start on_train_start on_train_epoch_start on_train_batch_start on_before_zero_grad "
            "on_before_backward on_after_backward on_before_optimizer_step on_train_batch_end on_train_epoch_end "
            "on_validation_start on_validation_batch_end on_validation_end on_train_end on_fit_end teardown"
        ).split()
    }
    run.fit(None, loader(), loader(), callbacks=[callbacks.LambdaCallback(**hooks)])
    return calls


def pruned(**settings: Any) -> Callable[[], Any]:
    return lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5, **settings)


def spikes(run: Run) -> Any:
    seen: list[Any] = []

    class Skips(callbacks.SpikeDetection):
        def on_train_batch_end(self, *given: Any, **more: Any) -> None:
            super().on_train_batch_end(*given, **more)
            seen.append((self.last_val, list(self.bad_batches)))

    path = str(run.folder / "skipped.json")
    spiked = Skips(mode="min", window=2, warmup=2, exclude_batches_path=path)
    _, module = run.fit(callbacks=[spiked], max_epochs=1)
    return seen, module.state_dict(), run.files()


CALLBACKS: dict[str, Callable[[Run], Any]] = {
    "BackboneFinetuning": fitted(lambda: callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=9), Backbone),
    "BaseFinetuning": fitted(Unfreezes, max_epochs=2),
    "BasePredictionWriter": predictions_written,
    "BatchSizeFinder": batch_size_found,
    "Callback": fitted(pl.Callback),
    "Checkpoint": fitted(callbacks.Checkpoint, enable_checkpointing=True),
    "DeviceStatsMonitor": stats,
    "EarlyStopping": fitted(lambda: callbacks.EarlyStopping("score", patience=1), max_epochs=5),
    "GradientAccumulationScheduler": fitted(lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 3: 3})),
    "LambdaCallback": called,
    "LearningRateFinder": rate_found,
    "LearningRateMonitor": fitted(lambda: callbacks.LearningRateMonitor("step", log_momentum=True)),
    "ModelCheckpoint": fitted(lambda: callbacks.ModelCheckpoint(monitor="score"), enable_checkpointing=True),
    "ModelPruning": fitted(pruned(parameters_to_prune=None, use_lottery_ticket_hypothesis=True), max_epochs=3),
    "ModelSummary": summary(lambda: callbacks.ModelSummary(max_depth=2)),
    "OnExceptionCheckpoint": failing,
    "ProgressBar": shown(Bar),
    "RichModelSummary": summary(lambda: callbacks.RichModelSummary(max_depth=2)),
    "RichProgressBar": shown(callbacks.RichProgressBar),
    "StochasticWeightAveraging": fitted(lambda: callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)),
    "SpikeDetection": spikes,
    "ThroughputMonitor": throughput,
    "Timer": timed,
    "TQDMProgressBar": shown(callbacks.TQDMProgressBar),
    "EMAWeightAveraging": fitted(lambda: callbacks.EMAWeightAveraging(decay=0.5)),
    "WeightAveraging": fitted(lambda: callbacks.WeightAveraging()),
}
for _name, _seen_by in CALLBACKS.items():
    behaviour(_seen_by, name=f"callback_{_name}", on_one_rank=_name == "OnExceptionCheckpoint")
on_nan = callbacks.EarlyStopping("score", check_finite=True, divergence_threshold=0.55)
behaviour(fitted(lambda: copy.deepcopy(on_nan), max_epochs=5), name="callback_EarlyStopping_on_nan")
two = fitted(lambda: callbacks.LearningRateMonitor("epoch"), Falls, enable_checkpointing=True)
behaviour(two, name="callback_two_of_a_kind")
