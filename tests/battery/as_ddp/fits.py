"""A fit with each of the trainer's settings: order of all hooks, state of the trainer, files, weights."""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import CSVLogger

from tests.battery.as_ddp.case import Plain, Run, loader
from tests.battery.as_ddp.trainers import state_of

SKIPPED_HOOKS = {"setup", "teardown", "state_dict", "load_state_dict", "state_key"}


def names_of(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]


class NotingCallback(pl.Callback):
    """Notes every hook that a callback has, and what it is called with."""

    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes
        for name in names_of(pl.Callback):
            setattr(self, name, functools.partial(self.note, name, getattr(self, name)))

    def note(self, name: str, hook: Any, *args: Any, **kwargs: Any) -> Any:
        self.notes.append(("callback", name, [type(arg).__name__ for arg in args], sorted(kwargs)))
        return hook(*args, **kwargs)


MODULE_HOOKS = sorted(
    {name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in names_of(kind)}
    | {"training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "configure_callbacks"}
    | {"optimizer_step", "optimizer_zero_grad", "backward", "lr_scheduler_step", "configure_gradient_clipping"}
    | {"clip_gradients", "forward"}
)
LOADERS = {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}


class Noting(Plain):
    """Notes every hook of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def train_dataloader(self) -> Any:
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class NotingData(pl.LightningDataModule):
    """Notes every hook of a datamodule."""

    def __init__(self, notes: list[Any]) -> None:
        super().__init__()
        self.notes = notes

    def train_dataloader(self) -> Any:
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def noting(whose: str, name: str, hook: Any) -> Any:
    """`hook`, which notes that it is called, with arguments of which types."""

    @functools.wraps(hook)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.notes.append((whose, name, [type(arg).__name__ for arg in args], sorted(kwargs)))
        return hook(self, *args, **kwargs)

    return noted


for _name in MODULE_HOOKS:
    setattr(Noting, _name, noting("module", _name, getattr(Noting, _name)))
for _name in [*names_of(DataHooks), "setup", "teardown", "state_dict", "load_state_dict"]:
    setattr(NotingData, _name, noting("data", _name, getattr(NotingData, _name)))


def fit(run: Run, **settings: Any) -> Any:
    """All that a fit with these settings does and leaves."""
    module = Noting()
    callbacks = [NotingCallback(module.notes), *settings.pop("callbacks", [])]
    trainer = run.trainer(callbacks=callbacks, **settings)
    trainer.fit(module, datamodule=NotingData(module.notes))
    return {**state_of(trainer), "hooks": module.notes, "module": left_of(module), "files": run.files()}


def left_of(module: pl.LightningModule) -> Any:
    """What remains of a module: its values, dtype, device, flags and gradients."""
    return {
        "state": module.state_dict(),
        "dtype": module.dtype,
        "device": str(module.device),
        "training": [child.training for child in module.modules()],
        "requires_grad": [each.requires_grad for each in module.parameters()],
        "grads": [each.grad is None for each in module.parameters()],
        "types": [type(each).__name__ for each in module.parameters()],
        "attributes": [sorted(vars(child)) for child in module.modules()],
        "hooks": [len(value) for child in module.modules() for name, value in vars(child).items() if "_hooks" in name],
        "trainer": module._trainer is not None,
        "epoch": module.current_epoch,
        "step": module.global_step,
        "hparams": module.hparams,
    }


def evaluate(run: Run, what: str, **settings: Any) -> Any:
    module = Noting()
    trainer = run.trainer(callbacks=[NotingCallback(module.notes)], **settings)
    returned = getattr(trainer, what)(module, datamodule=NotingData(module.notes))
    return {**state_of(trainer), "returned": returned, "hooks": module.notes, "module": left_of(module)}


def every_phase_in_turn(run: Run) -> Any:
    module, seen = Noting(), []
    trainer = run.trainer()
    for what in ("validate", "fit", "test", "fit", "predict", "validate"):
        seen.append((what, getattr(trainer, what)(module, datamodule=NotingData(module.notes)), left_of(module)))
        trainer.fit_loop.epoch_progress.reset()
    return {**state_of(trainer), "seen": seen, "hooks": module.notes}


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run_2": {"fast_dev_run": 2, "logger": True, "enable_checkpointing": True},
    "overfit_batches": {"overfit_batches": 2},
    "overfit_batches_half": {"overfit_batches": 0.5},
    "limit_batches": {"limit_train_batches": 3, "limit_val_batches": 0.5},
    "no_validation": {"limit_val_batches": 0},
    "no_training": {"limit_train_batches": 0},
    "sanity_checking": {"num_sanity_val_steps": 2},
    "all_sanity_checking": {"num_sanity_val_steps": -1},
    "val_check_interval": {"val_check_interval": 2},
    "val_check_interval_half": {"val_check_interval": 0.5},
    "val_check_interval_over_epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "max_steps": {"max_steps": 3, "max_epochs": -1},
    "max_steps_0": {"max_steps": 0},
    "max_epochs_0": {"max_epochs": 0},
    "min_epochs": {"min_epochs": 2, "max_epochs": 3},
    "min_steps": {"min_steps": 5, "max_epochs": 3},
    "max_time": {"max_time": timedelta(hours=1)},
    "max_time_over": {"max_time": timedelta(seconds=0)},
    "accumulate_grad_batches": {"accumulate_grad_batches": 3},
    "gradient_clip_val": {"gradient_clip_val": 0.01},
    "gradient_clip_by_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "reload_dataloaders": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "no_distributed_sampler": {"use_distributed_sampler": False},
    "deterministic": {"deterministic": True},
    "deterministic_warn": {"deterministic": "warn"},
    "benchmark": {"benchmark": True},
    "detect_anomaly": {"detect_anomaly": True},
    "no_inference_mode": {"inference_mode": False},
    "profiler_simple": {"profiler": "simple"},
    "profiler_advanced": {"profiler": "advanced"},
    "checkpointing": {"enable_checkpointing": True},
    "logger": {"logger": True, "enable_checkpointing": True},
    "sync_batchnorm": {"sync_batchnorm": True},
    "barebones": {"barebones": True},
    "log_rarely": {"log_every_n_steps": 3},
    "summary_and_bar": {"enable_progress_bar": True, "enable_model_summary": True},
}


def _fit_with(name: str) -> Any:
    def behaviour(run: Run) -> Any:
        settings = dict(SETTINGS[name])
        if settings.get("barebones"):
            return barebones(run)
        if settings.pop("logger", None):
            settings["logger"] = CSVLogger(run.folder, name="logs", version=0)
        before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        try:
            return fit(run, **settings), torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(before[0])
            torch.backends.cudnn.benchmark = before[1]

    return behaviour


def barebones(run: Run) -> Any:
    """Which takes no setting that switches off what it switches off."""
    module = Noting()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if not torch.distributed.is_initialized() else torch.distributed.get_world_size(),
        strategy=run.strategy,
        precision=run.precision,
        max_epochs=1,
        barebones=True,
        default_root_dir=run.folder,
    )
    trainer.fit(module, loader())
    return {**state_of(trainer), "module": left_of(module), "hooks": module.notes, "files": run.files()}


BEHAVIOURS = {f"fit_{name}": _fit_with(name) for name in SETTINGS}
BEHAVIOURS |= {what: functools.partial(evaluate, what=what) for what in ("validate", "test", "predict")}
BEHAVIOURS |= {
    f"{what}_without_inference_mode": functools.partial(evaluate, what=what, inference_mode=False)
    for what in ("validate", "test", "predict")
}
BEHAVIOURS |= {
    f"{what}_limited": functools.partial(evaluate, what=what, **{f"limit_{short}_batches": 1})
    for what, short in (("validate", "val"), ("test", "test"), ("predict", "predict"))
}
BEHAVIOURS["every_phase_in_turn"] = every_phase_in_turn
