"""Methods and attributes of the trainer, and what it does with errors, interruptions and tuners."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.utils._pytree import tree_map

from tests.battery.as_ddp.case import Plain, Run, loader


def state_of(trainer: pl.Trainer) -> dict[str, Any]:
    """Every public property of the trainer, by value or by type."""
    names = [name for name, _ in inspect.getmembers(pl.Trainer, lambda one: isinstance(one, property))]
    return {"trainer": {name: property_of(trainer, name) for name in names if name != "model"}}  # `wrapped_model`


def property_of(owner: Any, name: str) -> Any:
    try:
        value = getattr(owner, name)
    except Exception as error:
        return f"raises {type(error).__name__}"
    if name.endswith(("dataloader", "dataloaders")):  # its class: `class_of_a_loader`
        return tree_map(
            lambda one: one if one is None else (type(one.dataset), type(one.sampler), one.batch_size), value
        )
    return value


def model_of_the_trainer(run: Run) -> Any:
    """Its class in hooks: wrapped in DDP, or not yet."""
    seen: list[Any] = []

    class Looks(Plain):
        def configure_optimizers(self) -> Any:
            seen.append(("configure_optimizers", type(self.trainer.model)))
            return super().configure_optimizers()

        def setup(self, stage: str) -> None:
            seen.append(("setup", stage, type(self.trainer.model)))

        def on_fit_start(self) -> None:
            seen.append(("fit", type(self.trainer.model)))

    trainer = run.trainer(max_epochs=1)
    trainer.fit(Looks(), loader())
    return seen, type(trainer.model)


def class_of_a_loader(run: Run) -> Any:
    trainer = run.trainer(max_epochs=1)
    trainer.fit(Plain(), loader())
    return type(trainer.train_dataloader)


class Looking(Plain):
    """Takes down what the trainer says in the middle of a fit."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Any:
        self.seen.append(("estimated", self.trainer.estimated_stepping_batches))
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self.seen.append(("start", state_of(self.trainer)))

    def on_train_batch_end(self, *args: Any) -> None:
        metrics = [self.trainer.callback_metrics, self.trainer.logged_metrics, self.trainer.progress_bar_metrics]
        self.seen.append(("batch", metrics, [type(each) for every in metrics for each in every.values()]))

    def on_validation_epoch_end(self) -> None:
        self.seen.append(("validation", state_of(self.trainer)))

    def on_train_epoch_end(self) -> None:
        self.seen.append(("epoch", state_of(self.trainer)))


def state_during_a_fit(run: Run) -> Any:
    module = Looking()
    trainer = run.trainer(accumulate_grad_batches=2)
    trainer.fit(module, loader(), loader())
    return module.seen, trainer.lr_scheduler_configs[0].scheduler.get_last_lr()


def printed(run: Run) -> Any:
    said = io.StringIO()
    trainer = run.trainer()
    with contextlib.redirect_stdout(said):
        trainer.print("once", 1, sep="-")
        trainer.fit(Prints(), loader(1))
    return said.getvalue()


class Prints(Plain):
    def on_train_start(self) -> None:
        self.print("module", self.global_rank)
        self.trainer.print("trainer")


def messages_of_a_fit(run: Run) -> Any:
    """What Lightning's loggers write: levels and texts."""
    lines: list[Any] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (
                "litlogger" not in (text := record.getMessage()) and "litmodels" not in text
            ):  # one of two tips, by chance
                lines.append((record.levelname, text))

    loggers, handler = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")], Keeps()
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.INFO)
        each.addHandler(handler)
    try:
        run.trainer(enable_checkpointing=True).fit(Plain(), loader())
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.removeHandler(handler)
            each.setLevel(level)
    return lines


def init_module(run: Run) -> Any:
    trainer, seen = run.trainer(), []
    for empty in (None, False, True):
        with trainer.init_module(empty_init=empty):
            module = Plain()
        seen.append([(each.dtype, each.device.type, each.requires_grad) for each in module.parameters()])
    return seen


def configure_model(run: Run) -> Any:
    class Late(Plain):
        num_calls = 0

        def configure_model(self) -> None:
            self.num_calls += 1
            self.seen = [torch.zeros(1).dtype, torch.get_default_dtype(), self.head.weight.dtype]

    trainer = run.trainer(max_epochs=1)
    trainer.fit(module := Late(), loader(1))
    return module.num_calls, module.seen


def default_dtype_in_steps(run: Run) -> Any:
    class Looks(Plain):
        seen: tuple[Any, ...] = ()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            type(self).seen = torch.get_default_dtype(), torch.zeros(1).dtype, torch.is_grad_enabled()
            return super().training_step(batch, batch_idx)

    run.trainer(max_epochs=1).fit(Looks(), loader(1))
    return Looks.seen, torch.get_default_dtype()


def floating_dtypes_seen(run: Run) -> Any:
    """By width, in every precision: of batches, activations, losses, gradients, files, predictions and the module."""
    seen: dict[str, Any] = {}

    class Looks(Plain):
        def configure_model(self) -> None:
            seen["configure_model"] = str(torch.zeros(1).dtype)[6:]

        def configure_optimizers(self) -> Any:
            seen["configure_optimizers"] = str(self.dtype)[6:]
            return super().configure_optimizers()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen["batch"] = str(batch[0].dtype)[6:]
            seen["output"] = str(self(batch[0]).dtype)[6:]
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen["gradient"] = {str(each.grad.dtype)[6:] for each in self.parameters()}

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            seen["file"] = {str(each.dtype)[6:] for each in checkpoint["state_dict"].values()}

    trainer = run.trainer()
    trainer.fit(module := Looks(), loader(), loader())
    trainer.save_checkpoint(run.folder / "a.ckpt")
    seen["module after"] = str(module.dtype)[6:]
    predictions = trainer.predict(module, loader())
    assert predictions is not None
    seen["prediction"] = {str(each.dtype)[6:] for each in predictions}
    seen["module after prediction"] = str(module.dtype)[6:]
    return seen


def tuned(what: str) -> Any:
    def behaviour(run: Run) -> Any:
        class Sized(Plain):
            def __init__(self) -> None:
                super().__init__()
                self.batch_size = 2
                self.lr = 0.1

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(loader(8).dataset, batch_size=self.batch_size)

        module, trainer = Sized(), run.trainer(max_epochs=1)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        if what == "lr":
            found = Tuner(trainer).lr_find(module, num_training=6, min_lr=1e-4, max_lr=1e-1)
            assert found is not None
            seen: Any = found.results, found.suggestion(skip_begin=1, skip_end=1), module.lr
        else:
            seen = Tuner(trainer).scale_batch_size(module, mode=what, max_trials=3, init_val=2), module.batch_size
        now = module.state_dict()
        same = all(torch.allclose(value.float(), before[name], atol=1e-2) for name, value in now.items())
        trainer.fit(module)
        return seen, same, trainer.global_step, run.files(), module.state_dict()

    return behaviour


def logged_by_a_logger(run: Run) -> Any:
    calls: list[Any] = []

    class Notes(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            calls.append(("metrics", metrics, step))

        def log_hyperparams(self, params: Any = None, *args: Any) -> None:
            calls.append(("hyperparams", params))

        def log_graph(self, *args: Any) -> None:
            calls.append(("graph",))

        def after_save_checkpoint(self, callback: Any) -> None:
            calls.append(("checkpoint", callback.best_model_path))

        def save(self) -> None:
            calls.append(("save",))

        def finalize(self, status: str) -> None:
            calls.append(("finalize", status))

    logger = Notes(run.folder, name="logs", version=0)
    trainer = run.trainer(logger=logger, enable_checkpointing=True)
    trainer.fit(Plain(), loader(), loader())
    trainer.test(Plain(), loader(), verbose=False)
    return calls


def profiled_actions(run: Run) -> Any:
    trainer = run.trainer(profiler="simple", enable_checkpointing=True)
    trainer.fit(Plain(), loader(2), loader(2))
    return {name: len(times) for name, times in trainer.profiler.recorded_durations.items()}


def resumed(run: Run) -> Any:
    first = run.trainer(max_epochs=1)
    first.fit(Plain(), loader())
    first.save_checkpoint(run.folder / "a.ckpt")
    seen = []
    for epochs in (1, 3):
        trainer = run.trainer(max_epochs=epochs)
        trainer.fit(module := Plain(), loader(), loader(), ckpt_path=run.folder / "a.ckpt")
        seen.append((state_of(trainer), module.state_dict(), trainer.validate(module, loader(), verbose=False)))
    return seen


def trained_twice(run: Run) -> Any:
    trainer = run.trainer(max_epochs=1)
    trainer.fit(module := Plain(), loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    other = run.trainer(max_epochs=1)
    other.fit(module, loader())
    return state_of(trainer), state_of(other), module.state_dict()


def metrics_of_every_kind(run: Run) -> Any:
    class Logs(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("int", batch_idx)
            self.log("float", 0.5, on_step=True, on_epoch=True)
            self.log(
                "tensor", torch.tensor(batch_idx + self.global_rank), reduce_fx="max", on_epoch=True, sync_dist=True
            )
            self.log("double", torch.tensor(0.1, dtype=torch.float64))
            self.log_dict({"a": torch.tensor(1), "b": torch.tensor(True)}, rank_zero_only=True)
            self.log("sum", 1.0, reduce_fx="sum", on_epoch=True, on_step=False)
            return {"loss": super().training_step(batch, batch_idx), "extra": batch_idx}

    trainer = run.trainer()
    trainer.fit(Logs(), loader(), loader())
    return trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics


def evaluation_with_several_loaders(run: Run) -> Any:
    class Several(Plain):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().validation_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().predict_step(batch, batch_idx), dataloader_idx

    trainer, module = run.trainer(), Several()
    returned = trainer.validate(module, [loader(2), loader(1)], verbose=False)
    return returned, trainer.predict(module, [loader(2), loader(1)]), trainer.callback_metrics


BEHAVIOURS = {
    each.__name__: each
    for each in (
        state_during_a_fit,
        class_of_a_loader,
        model_of_the_trainer,
        printed,
        messages_of_a_fit,
        init_module,
        configure_model,
        default_dtype_in_steps,
        floating_dtypes_seen,
        logged_by_a_logger,
        profiled_actions,
        resumed,
        trained_twice,
        metrics_of_every_kind,
        evaluation_with_several_loaders,
    )
}
BEHAVIOURS |= {f"tuned_{what}": tuned(what) for what in ("lr", "power", "binsearch")}
