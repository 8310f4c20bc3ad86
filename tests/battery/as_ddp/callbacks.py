"""Every callback that Lightning ships, in a fit; a new one is missing in `CALLBACKS` until it is added."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.battery.as_ddp.case import Plain, Run, barrier, loader
from tests.battery.as_ddp.checkpoints import Falls
from tests.battery.as_ddp.trainers import state_of


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

    def behaviour(run: Run) -> Any:
        callback, model = make(), module()
        trainer = run.trainer(
            callbacks=[callback],
            logger=CSVLogger(run.folder, name="logs", version=0),
            **{"max_epochs": 4, **settings},
        )
        trainer.fit(model, loader(), loader())
        barrier()
        metrics = run.folder / "logs/version_0/metrics.csv"
        return [
            state_of(trainer),
            getattr(model, "seen", None),
            model.state_dict(),
            callback.state_dict(),
            metrics.read_text() if metrics.exists() and run.precision == "32-true" else None,
            run.files(),
            type(callback),
        ]

    return behaviour


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


def stats(run: Run) -> Any:
    """Names of what DeviceStatsMonitor logs; the values are a test's own."""
    names: list[Any] = []

    class Names(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            names.append((sorted(metrics), step))

    monitor = callbacks.DeviceStatsMonitor(cpu_stats=None)
    trainer = run.trainer(callbacks=[monitor], logger=Names(run.folder), max_epochs=1)
    known = mock.patch("lightning.pytorch.callbacks.device_stats_monitor._PSUTIL_AVAILABLE", True)
    with known, mock.patch("lightning.pytorch.accelerators.cpu.get_cpu_stats", return_value={"cpu_percent": 1.0}):
        trainer.fit(Plain(), loader())
    return names


def throughput(run: Run) -> Any:
    """With a clock of the test's own, as in tests of users."""
    seen: list[Any] = []

    class Keeps(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            seen.append(({name: value for name, value in metrics.items() if name.startswith("train|")}, step))

    monitor = callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
    ticks = iter(range(1000))
    trainer = run.trainer(callbacks=[monitor], logger=Keeps(run.folder), max_epochs=2)
    with mock.patch("time.perf_counter", side_effect=lambda: float(next(ticks))):
        trainer.fit(Plain(), loader())
    return seen, next(ticks)


def timed(run: Run) -> Any:
    """Timer, with a clock that goes by a minute each time that it is read."""
    minutes = iter(range(0, 60_000, 60))
    timer = callbacks.Timer(duration=timedelta(minutes=5), interval="step")
    trainer = run.trainer(callbacks=[timer], max_epochs=5)
    with mock.patch("time.monotonic", side_effect=lambda: float(next(minutes))):
        trainer.fit(Plain(), loader())
        elapsed = timer.time_elapsed(), timer.time_remaining(), timer.state_dict()
    return elapsed, state_of(trainer)


def failing(run: Run) -> Any:
    """OnExceptionCheckpoint."""

    class Fails(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise LookupError
            return super().training_step(batch, batch_idx)

    trainer = run.trainer(callbacks=[callbacks.OnExceptionCheckpoint(run.folder)], enable_checkpointing=True)
    try:
        trainer.fit(Fails(), loader())
    except LookupError:
        module = Plain.load_from_checkpoint(run.folder / "on_exception.ckpt")
    return run.files(), module.state_dict()


def summary(make: Callable[[], Any]) -> Callable[[Run], Any]:
    def behaviour(run: Run) -> Any:
        callback, said = make(), []
        with mock.patch.object(type(callback), "summarize", lambda *given, **more: said.append((given, more))):
            run.trainer(callbacks=[callback], max_epochs=1).fit(Plain(), loader())
        return said

    return behaviour


def shown(make: Callable[[], Any]) -> Callable[[Run], Any]:
    """What a progress bar is told: totals, descriptions and metrics."""

    def behaviour(run: Run) -> Any:
        seen: list[Any] = []
        bar = make()

        class Looks(pl.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
                metrics = {name: value for name, value in bar.get_metrics(trainer, module).items() if name != "v_num"}
                seen.append((metrics, bar.total_train_batches, bar.train_description, getattr(bar, "is_enabled", None)))

        trainer = run.trainer(callbacks=[bar, Looks()], max_epochs=1, enable_progress_bar=True)
        with mock.patch("sys.stdout"), mock.patch("sys.stderr"):
            trainer.fit(Plain(), loader(), loader())
        return seen, bar.total_val_batches, trainer.progress_bar_callback is bar

    return behaviour


class Bar(callbacks.ProgressBar):
    """Of the user, who shows nothing."""

    def disable(self) -> None: ...

    def enable(self) -> None: ...


def batch_size_found(run: Run) -> Any:
    trainer = run.trainer(callbacks=[callbacks.BatchSizeFinder(max_trials=2)], max_epochs=1)
    try:
        trainer.fit(Watched(), loader())
    except Exception as error:
        return type(error), str(error)


def rate_found(run: Run) -> Any:
    finder = callbacks.LearningRateFinder(min_lr=1e-4, max_lr=1e-2, num_training_steps=6)
    trainer = run.trainer(callbacks=[finder], max_epochs=1)
    trainer.fit(module := Plain(), loader(4))
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
    run.trainer(callbacks=[callbacks.LambdaCallback(**hooks)]).fit(Plain(), loader(), loader())
    return calls


def pruned(**settings: Any) -> Callable[[], Any]:
    return lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5, **settings)


def spikes(run: Run) -> Any:
    class Skips(callbacks.SpikeDetection):
        seen: list[Any] = []

        def on_train_batch_end(self, *given: Any, **more: Any) -> None:
            super().on_train_batch_end(*given, **more)
            self.seen.append((self.last_val, self.bad_batches))

    Skips.seen = []
    spiked = Skips(mode="min", window=2, warmup=2, exclude_batches_path=str(run.folder / "skipped.json"))
    trainer = run.trainer(callbacks=[spiked], max_epochs=1)
    trainer.fit(module := Plain(), loader())
    return Skips.seen, module.state_dict(), run.files()


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
BEHAVIOURS = {f"callback_{name}": behaviour for name, behaviour in CALLBACKS.items()}
BEHAVIOURS["callback_EarlyStopping_on_nan"] = fitted(
    lambda: callbacks.EarlyStopping("score", check_finite=True, divergence_threshold=0.55), max_epochs=5
)
BEHAVIOURS["callback_two_of_a_kind"] = fitted(
    lambda: callbacks.LearningRateMonitor("epoch"), Falls, enable_checkpointing=True
)
