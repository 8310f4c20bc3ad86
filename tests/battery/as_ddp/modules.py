"""What modules do by their own hooks, and what can be done with them when a fit has ended."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grad_norm
from torchmetrics import Accuracy

from tests import toy
from tests.battery.as_ddp.fits import left_of
from tests.battery.case import Plain, Run, behaviour, loader, plain_with


def optimizer_of(module: Plain) -> Any:
    return Plain.configure_optimizers(module)


@behaviour
def rate_by_a_metric(run: Run) -> Any:
    def configure_optimizers(self: Any) -> Any:
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer_of(self), patience=0, threshold=10.0)
        return {"optimizer": schedule.optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    module = plain_with(configure_optimizers=configure_optimizers)
    trainer, _ = run.fit(module, loader(), loader(), max_epochs=3)
    return [(group["lr"], sorted(group)) for group in trainer.optimizers[0].param_groups]


@behaviour
def schedules_of_every_interval(run: Run) -> Any:
    rates: list[Any] = []

    class Many(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step", "frequency": 2},
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
            ]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            rates.append((type(scheduler).__name__, metric))
            super().lr_scheduler_step(scheduler, metric)

        def on_train_batch_end(self, *_: Any) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])

    run.fit(Many())
    return rates


@behaviour
def gradients_in_hooks(run: Run) -> Any:
    seen: list[Any] = []

    class Looks(Plain):
        def on_after_backward(self) -> None:
            seen.append(("backward", [each.grad is not None for each in self.parameters()]))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(("step", grad_norm(self, 2), [each.grad.shape for each in self.parameters()]))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append(("zero", [each.grad is None for each in self.parameters()]))

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    return seen, left_of(run.fit(Looks(), accumulate_grad_batches=2)[1])


@behaviour
def step_of_the_user(run: Run) -> Any:
    returned: list[Any] = []

    class Steps(Plain):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (self.trainer.global_step + 1)
            returned.append(optimizer.step(closure=closure))

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def backward(self, loss: Any, *given: Any, **more: Any) -> None:
            returned.append((loss.dtype, loss.dim()))
            loss.backward(*given, **more)

    _, module = run.fit(Steps())
    return returned if run.precision == "32-true" else len(returned), left_of(module)


@behaviour
def logged_in_every_hook(run: Run) -> Any:
    hooks = (
        "on_train_start on_train_epoch_start on_train_batch_start on_before_zero_grad on_before_backward "
        "on_after_backward on_before_optimizer_step on_train_batch_end on_train_epoch_end on_validation_epoch_start "
        "on_validation_batch_start on_validation_batch_end on_validation_epoch_end"
    ).split()

    def logging_in(name: str) -> Any:
        return lambda self, *_, **__: self.log(f"in_{name}", 1.0, sync_dist=True)

    trainer, _ = run.fit(plain_with(**{name: logging_in(name) for name in hooks}), loader(), loader())
    return trainer.callback_metrics, trainer.logged_metrics


@behaviour
def metric_objects(run: Run) -> Any:
    class Measures(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = Accuracy("multiclass", num_classes=toy.NUM_CLASSES)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self(batch[0]), batch[1])
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            self.log_dict({"a": torch.tensor(1.0), "b": 2.0})

    trainer, module = run.fit(Measures(), loader(), loader())
    return trainer.callback_metrics, module.accuracy.update_count, module.state_dict()


@behaviour
def callbacks_of_the_module(run: Run) -> Any:
    def configure_callbacks(self: Any) -> Any:
        return [pl.callbacks.EarlyStopping("loss_epoch", patience=0), pl.callbacks.LearningRateMonitor()]

    module, others = plain_with(configure_callbacks=configure_callbacks), [pl.callbacks.EarlyStopping("other")]
    trainer, _ = run.fit(module, callbacks=others, logger=True, max_epochs=5)
    return [type(each) for each in trainer.callbacks], trainer.early_stopping_callback.monitor, trainer.current_epoch


@behaviour
def evaluated_without_a_module(run: Run) -> Any:
    trainer, _ = run.fit(None, loader(), loader(), enable_checkpointing=True)
    evaluated = [call(dataloaders=loader(), verbose=False) for call in (trainer.validate, trainer.test)]
    return evaluated, trainer.predict(dataloaders=loader()), trainer.ckpt_path


@behaviour
def pickled_after_a_fit(run: Run) -> Any:
    trainer, module = run.fit(None, loader(), loader())
    module.trainer = trainer
    with io.BytesIO() as file:
        torch.save(module, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    copied, again = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    return [left_of(each) for each in (loaded, copied, again)], type(pickle.loads(pickle.dumps(trainer)))


@behaviour
def exported_after_a_fit(run: Run) -> Any:
    _, module = run.fit(max_epochs=1)
    inputs = torch.ones(2, toy.NUM_FEATURES, dtype=module.dtype)
    exported = torch.export.export(module.eval(), (inputs,)).module()
    return exported(inputs), module(inputs), module.freeze(), left_of(module)


@behaviour
def frozen_in_part(run: Run) -> Any:
    module = Plain()
    module.body.requires_grad_(False)
    return left_of(run.fit(module)[1])


@behaviour
def trained_on_after_a_fit(run: Run) -> Any:
    """By a loop of the user's own."""
    _, module = run.fit(max_epochs=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = next(iter(loader()))
    loss = torch.nn.functional.cross_entropy(module(x.to(module.dtype)).float(), y)
    loss.backward()
    optimizer.step()
    return loss.detach(), left_of(module)


@behaviour
def unused_parameters(run: Run) -> Any:
    module = Plain()
    module.extra = torch.nn.Linear(2, 2)
    return left_of(run.fit(module, max_epochs=1, strategy=f"{run.strategy}_find_unused_parameters_true")[1])
