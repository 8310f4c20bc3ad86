"""Fit with each of the trainer's settings: order of all hooks, state of the trainer, files, weights."""

import functools
import inspect
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests import toy
from tests.battery.as_ddp.trainers import state_of
from tests.battery.case import Plain, Run, behavior, loader


def names_of(kind: type) -> list[str]:
    return [
        name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")
    ]


MODULE_HOOKS = sorted(
    {name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in names_of(kind)}
    | {
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "configure_optimizers",
        "configure_callbacks",
    }
    | {
        "optimizer_step",
        "optimizer_zero_grad",
        "backward",
        "lr_scheduler_step",
        "configure_gradient_clipping",
    }
    | {"clip_gradients", "forward"}
)


class _Loaders:
    def train_dataloader(self) -> Any:
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Noting(_Loaders, Plain):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []


class NotingCallback(pl.Callback):
    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes


class NotingData(_Loaders, pl.LightningDataModule):
    def __init__(self, notes: list[Any]) -> None:
        super().__init__()
        self.notes = notes


def noting(whose: str, name: str, hook: Any) -> Any:
    """Wrap `hook` so that it records each call, with the types of its arguments."""

    @functools.wraps(hook)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.notes.append((whose, name, [type(arg).__name__ for arg in args], sorted(kwargs)))
        return hook(self, *args, **kwargs)

    return noted


for _kind, _whose, _names in (
    (Noting, "module", MODULE_HOOKS),
    (NotingCallback, "callback", names_of(pl.Callback)),
    (
        NotingData,
        "data",
        [*names_of(DataHooks), "setup", "teardown", "state_dict", "load_state_dict"],
    ),
):
    for _name in _names:
        setattr(_kind, _name, noting(_whose, _name, getattr(_kind, _name)))


def left_of(module: pl.LightningModule) -> Any:
    children = list(module.modules())
    weights = list(module.parameters())
    return {
        "state": module.state_dict(),
        "dtype": module.dtype,
        "device": str(module.device),
        "training": [child.training for child in children],
        "requires_grad": [weight.requires_grad for weight in weights],
        "grads": [weight.grad is None for weight in weights],
        "types": [type(weight).__name__ for weight in weights],
        "attributes": [sorted(vars(child)) for child in children],
        "hooks": [
            len(value)
            for child in children
            for name, value in vars(child).items()
            if "_hooks" in name
        ],
        "trainer": module._trainer is not None,
        "epoch": module.current_epoch,
        "step": module.global_step,
        "hparams": module.hparams,
    }


def called(run: Run, method: str, **settings: Any) -> Any:
    module = Noting()
    trainer = run.trainer(callbacks=[NotingCallback(module.notes)], **settings)
    returned = getattr(trainer, method)(module, datamodule=NotingData(module.notes))
    seen = {"returned": returned, "hooks": module.notes, "module": left_of(module)}
    return {**state_of(trainer), **seen, "files": run.files()}


@behavior
def every_phase_in_turn(run: Run) -> Any:
    module = Noting()
    seen = []
    trainer = run.trainer()
    for method in ("validate", "fit", "test", "fit", "predict", "validate"):
        returned = getattr(trainer, method)(module, datamodule=NotingData(module.notes))
        seen.append((method, returned, left_of(module)))
        trainer.fit_loop.epoch_progress.reset()
    return {**state_of(trainer), "seen": seen, "hooks": module.notes}


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "fast_dev_run": {"fast_dev_run": True},
    "overfit_batches": {"overfit_batches": 2},
    "limit_batches": {"limit_train_batches": 3, "limit_val_batches": 0.5},
    "no_validation": {"limit_val_batches": 0},
    "sanity_checking": {"num_sanity_val_steps": 2},
    "val_check_interval": {"val_check_interval": 2},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "max_steps": {"max_steps": 3, "max_epochs": -1},
    "accumulate_grad_batches": {"accumulate_grad_batches": 3},
    "gradient_clip_val": {"gradient_clip_val": 0.01},
    "reload_dataloaders": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "deterministic": {"deterministic": True},
    "detect_anomaly": {"detect_anomaly": True},
    "no_inference_mode": {"inference_mode": False},
    "profiler_simple": {"profiler": "simple"},
    "checkpointing": {"enable_checkpointing": True},
    "logger": {"logger": True, "enable_checkpointing": True},
    "sync_batchnorm": {"sync_batchnorm": True},
    "summary_and_bar": {"enable_progress_bar": True, "enable_model_summary": True},
}


def fit_with(settings: dict[str, Any], run: Run) -> Any:
    if settings.get("logger"):
        settings = settings | {"logger": CSVLogger(run.folder, name="logs", version=0)}
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        return called(run, "fit", **settings), torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


for _name, _settings in SETTINGS.items():
    behavior(functools.partial(fit_with, _settings), name=f"fit_{_name}")
for _method, _short in (("validate", "val"), ("test", "test"), ("predict", "predict")):
    _call = functools.partial(called, method=_method)
    _limits = {f"limit_{_short}_batches": 1}
    behavior(_call, name=_method)
    behavior(
        functools.partial(_call, inference_mode=False), name=f"{_method}_without_inference_mode"
    )
    behavior(functools.partial(_call, **_limits), name=f"{_method}_limited")


@behavior
def random_numbers_of_transforms(run: Run) -> Any:
    class Noisy(toy.Blobs):
        def __getitem__(self, index: int) -> Any:
            return self.images[index], self.targets[index], torch.rand(1)

    class Draws(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            numbers.append([f"{number:.6f}" for number in batch[2].flatten().tolist()])
            return super().training_step(batch[:2], batch_idx)

    numbers: list[Any] = []
    run.fit(Draws(), DataLoader(Noisy(8), batch_size=4), max_epochs=1)
    return numbers
