"""Ends of fits, the traces that they leave in process and module, and user code that mocks something meanwhile."""

import copy
import functools
import io
import logging
import os
import pickle
import random
import threading
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from tests.battery.as_ddp.fits import left_of
from tests.battery.as_ddp.trainers import state_of
from tests.battery.case import Plain, Run, behavior, loader, plain_with


def step_and(change: Any) -> Any:
    """Return a training step that returns `change(module, loss, batch_idx)`."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = Plain.training_step(self, batch, batch_idx)
        return change(self, loss, batch_idx)

    return training_step


def raises(*_: Any, **__: Any) -> Any:
    raise LookupError("of the user")


@behavior
def stopped_by_should_stop(run: Run) -> Any:
    def stop(self: Any, loss: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = batch_idx == 1
        return loss

    trainer, _ = run.fit(plain_with(training_step=step_and(stop)), max_epochs=5)
    return state_of(trainer)


def error_in(hook: str, run: Run) -> Any:
    seen: list[Any] = []

    class Notes(pl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            seen.append((type(exception), str(exception), state_of(trainer)))

    module = plain_with(**{hook: raises})
    trainer = run.trainer(callbacks=[Notes()])
    try:
        trainer.fit(module, loader(), loader())
    except Exception as error:
        seen.append((type(error), error.args, [type(error.__cause__), error.__suppress_context__]))
    return seen, state_of(trainer), module._trainer is not None, str(trainer.state)


for _hook in (
    "training_step",
    "validation_step",
    "configure_optimizers",
    "on_train_end",
    "on_save_checkpoint",
    "setup",
):
    behavior(functools.partial(error_in, _hook), name=f"error_in_{_hook}", on_one_rank=True)


@behavior
def notes_of_an_error(run: Run) -> Any:
    fails = step_and(lambda self, loss, batch_idx: raises() if batch_idx == 2 else loss)
    try:
        run.fit(plain_with(training_step=fails))
    except Exception as error:
        return len(getattr(error, "__notes__", [])) > 0


@behavior
def overflow(run: Run) -> Any:
    step = step_and(lambda self, loss, batch_idx: loss * float("inf") if batch_idx == 1 else loss)
    _, module = run.fit(plain_with(training_step=step), max_epochs=1)
    return [bool(torch.isfinite(parameter).all()) for parameter in module.parameters()]


@behavior
def state_of_the_process(run: Run) -> Any:
    environment = set(os.environ)
    threads = {thread.name for thread in threading.enumerate()}
    run.fit(None, loader(), loader())
    return [
        sorted(set(os.environ) - environment),
        sorted({thread.name for thread in threading.enumerate()} - threads),
        [torch.get_rng_state().sum(), random.random(), np.random.random()],
        [torch.get_default_dtype(), torch.get_num_threads()],
        [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
        [str(warning) for warning in warnings.filters],
        [
            len(logging.getLogger(name).handlers)
            for name in ("lightning.pytorch", "lightning", "torch", "")
        ],
        torch.distributed.is_initialized(),
    ]


@behavior
def step_of_the_user(run: Run) -> Any:
    returned: list[Any] = []

    class Steps(Plain):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
        ) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (self.trainer.global_step + 1)
            returned.append(optimizer.step(closure=closure))

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            returned.append((loss.dtype, loss.dim()))
            loss.backward(*args, **kwargs)

    _, module = run.fit(Steps())
    return returned if run.precision == "32-true" else len(returned), left_of(module)


@behavior
def pickled_after_a_fit(run: Run) -> Any:
    trainer, module = run.fit(None, loader(), loader())
    module.trainer = trainer
    with io.BytesIO() as file:
        torch.save(module, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    copied = copy.deepcopy(module)
    unpickled = pickle.loads(pickle.dumps(module))
    trainer_again = pickle.loads(pickle.dumps(trainer))
    return [left_of(copy_) for copy_ in (loaded, copied, unpickled)], type(trainer_again)
