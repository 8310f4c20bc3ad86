"""Methods and attributes of the trainer, and its handling of errors, interruptions and tuners."""

import functools
import inspect
import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils._pytree import tree_map

from tests.battery.case import Plain, Run, behavior, loader


def state_of(trainer: pl.Trainer) -> dict[str, Any]:
    values = {}
    for name in properties(pl.Trainer):
        if name != "model":  # see `model_of_the_trainer`
            values[name] = property_of(trainer, name)
    return {"trainer": values}


def properties(kind: type) -> list[str]:
    """Return the names of the properties of a class."""
    members = inspect.getmembers(kind, lambda member: isinstance(member, property))
    return [name for name, _ in members]


def property_of(owner: Any, name: str) -> Any:
    try:
        value = getattr(owner, name)
    except Exception as error:
        return f"raises {type(error).__name__}"
    if name.endswith(("dataloader", "dataloaders")):  # `class_of_a_loader` checks its class
        return tree_map(loader_in_short, value)
    return value


def loader_in_short(loader: Any) -> Any:
    if loader is None:
        return None
    return type(loader.dataset), type(loader.sampler), loader.batch_size


@behavior
def model_of_the_trainer(run: Run) -> Any:
    seen: list[Any] = []

    class Looks(Plain):
        def configure_optimizers(self) -> Any:
            seen.append(("configure_optimizers", type(self.trainer.model)))
            return super().configure_optimizers()

        def setup(self, stage: str) -> None:
            seen.append(("setup", stage, type(self.trainer.model)))

        def on_fit_start(self) -> None:
            seen.append(("fit", type(self.trainer.model)))

    trainer, _ = run.fit(Looks(), max_epochs=1)
    return seen, type(trainer.model)


@behavior
def class_of_a_loader(run: Run) -> Any:
    return type(run.fit(max_epochs=1)[0].train_dataloader)


@behavior
def state_during_a_fit(run: Run) -> Any:
    seen: list[Any] = []

    class Looking(Plain):
        def configure_optimizers(self) -> Any:
            seen.append(("estimated", self.trainer.estimated_stepping_batches))
            schedule = torch.optim.lr_scheduler.StepLR(super().configure_optimizers(), 1)
            return {
                "optimizer": schedule.optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

        def on_train_start(self) -> None:
            seen.append(("start", state_of(self.trainer)))

        def on_train_batch_end(self, *_: Any) -> None:
            metrics = [
                self.trainer.callback_metrics,
                self.trainer.logged_metrics,
                self.trainer.progress_bar_metrics,
            ]
            types = []
            for values in metrics:
                types += [type(value) for value in values.values()]
            seen.append(("batch", metrics, types))

        def on_validation_epoch_end(self) -> None:
            seen.append(("validation", state_of(self.trainer)))

        def on_train_epoch_end(self) -> None:
            seen.append(("epoch", state_of(self.trainer)))

    trainer, _ = run.fit(Looking(), loader(), loader(), accumulate_grad_batches=2)
    return seen, trainer.lr_scheduler_configs[0].scheduler.get_last_lr()


@behavior
def messages_of_a_fit(run: Run) -> Any:
    lines: list[Any] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            # one of two tips, chosen at random
            if "litlogger" not in text and "litmodels" not in text:
                lines.append((record.levelname, text))

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    handler = Keeps()
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        run.fit(enable_checkpointing=True)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
    return lines


@behavior
def floating_dtypes_seen(run: Run) -> Any:
    """Compare the floating dtypes of batches, activations, losses, gradients, files, predictions and the module."""
    seen: dict[str, Any] = {}

    def note(name: str, *tensors: Any) -> None:
        seen[name] = {str(tensor.dtype)[6:] for tensor in tensors}

    class Looks(Plain):
        def configure_model(self) -> None:
            note("configure_model", torch.zeros(1))

        def configure_optimizers(self) -> Any:
            note("configure_optimizers", self)
            return super().configure_optimizers()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            note("batch", batch[0])
            note("output", self(batch[0]))
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            note("gradient", *(parameter.grad for parameter in self.parameters()))

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            note("file", *checkpoint["state_dict"].values())

    trainer, module = run.fit(Looks(), loader(), loader())
    trainer.save_checkpoint(run.folder / "a.ckpt")
    note("module after", module)
    note("prediction", *trainer.predict(module, loader()))
    note("module after prediction", module)
    return seen


def tuned(mode: str, run: Run) -> Any:
    class Sized(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.lr = 0.1

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(loader(8).dataset, batch_size=self.batch_size)

    module = Sized()
    trainer = run.trainer(max_epochs=1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    if mode == "lr":
        result: Any = Tuner(trainer).lr_find(module, num_training=6, min_lr=1e-4, max_lr=1e-1)
        seen: Any = result.results, result.suggestion(skip_begin=1, skip_end=1), module.lr
    else:
        size = Tuner(trainer).scale_batch_size(module, mode=mode, max_trials=3, init_val=2)
        seen = size, module.batch_size
    are_close = [
        torch.allclose(value.float(), before[name], atol=1e-2)
        for name, value in module.state_dict().items()
    ]
    trainer.fit(module)
    return seen, all(are_close), trainer.global_step, run.files(), module.state_dict()


for _mode in ("lr", "power", "binsearch"):
    behavior(functools.partial(tuned, _mode), name=f"tuned_{_mode}")


@behavior
def resumed(run: Run) -> Any:
    _, _, path = run.saved()
    seen = []
    for epochs in (1, 3):
        options = {"start": {"ckpt_path": path}, "max_epochs": epochs}
        trainer, module = run.fit(None, loader(), loader(), **options)
        state = state_of(trainer)
        metrics = trainer.validate(module, loader(), verbose=False)
        seen.append((state, module.state_dict(), metrics))
    return seen
