"""How fits end, and what they leave in the process; what user code copies and mocks meanwhile."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch

from tests.battery.as_ddp.trainers import state_of
from tests.battery.case import Plain, Run, behaviour, loader, plain_with


def step_and(change: Any) -> Any:
    """A training step after which `change(module, loss, batch_idx)` gives what is returned."""
    return lambda self, batch, batch_idx: change(self, Plain.training_step(self, batch, batch_idx), batch_idx)


def raises(*_: Any, **__: Any) -> Any:
    raise LookupError("of the user")


@behaviour
def stopped_by_should_stop(run: Run) -> Any:
    def stop(self: Any, loss: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = batch_idx == 1
        return loss

    return state_of(run.fit(plain_with(training_step=step_and(stop)), max_epochs=5)[0])


@behaviour(on_one_rank=True)
def skipped_by_none(run: Run) -> Any:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else Plain.training_step(self, batch, batch_idx)

    trainer, module = run.fit(plain_with(training_step=step))
    return state_of(trainer), module.state_dict()


@behaviour
def stopped_by_minus_one(run: Run) -> Any:
    trainer, module = run.fit(plain_with(on_train_batch_start=lambda self, batch, i: -1 if i == 2 else None))
    return state_of(trainer), module.state_dict()


def error_in(hook: str, run: Run) -> Any:
    seen: list[Any] = []

    class Notes(pl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            seen.append((type(exception), str(exception), state_of(trainer)))

    module, trainer = plain_with(**{hook: raises}), run.trainer(callbacks=[Notes()])
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
    behaviour(functools.partial(error_in, _hook), name=f"error_in_{_hook}", on_one_rank=True)


@behaviour
def notes_of_an_error(run: Run) -> Any:
    fails = step_and(lambda self, loss, batch_idx: raises() if batch_idx == 2 else loss)
    try:
        run.fit(plain_with(training_step=fails))
    except Exception as error:
        return len(getattr(error, "__notes__", [])) > 0


@behaviour
def overflow(run: Run) -> Any:
    """What one batch whose loss is infinite leaves."""
    step = step_and(lambda self, loss, batch_idx: loss * float("inf") if batch_idx == 1 else loss)
    _, module = run.fit(plain_with(training_step=step), max_epochs=1)
    return [bool(torch.isfinite(each).all()) for each in module.parameters()]


@behaviour(on_one_rank=True)
def interrupted(run: Run) -> Any:
    def interrupt(self: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise KeyboardInterrupt

    trainer, seen = run.trainer(), []
    try:
        trainer.fit(plain_with(on_train_batch_start=interrupt), loader())
    except BaseException as error:
        seen.append((type(error), getattr(error, "code", None)))
    return seen, state_of(trainer), str(trainer.state), trainer.interrupted


@behaviour
def signals_after_a_fit(run: Run) -> Any:
    before = signal.getsignal(signal.SIGTERM)
    run.fit()
    return signal.getsignal(signal.SIGTERM) is before


@behaviour
def state_of_the_process(run: Run) -> Any:
    """What a fit leaves in it, and what it has drawn of random numbers."""
    environment, threads = set(os.environ), {thread.name for thread in threading.enumerate()}
    run.fit(None, loader(), loader())
    return [
        sorted(set(os.environ) - environment),
        sorted({thread.name for thread in threading.enumerate()} - threads),
        [torch.get_rng_state().sum(), random.random(), np.random.random()],
        [torch.get_default_dtype(), torch.get_num_threads()],
        [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
        [str(warning) for warning in warnings.filters],
        [len(logging.getLogger(name).handlers) for name in ("lightning.pytorch", "lightning", "torch", "")],
        torch.distributed.is_initialized(),
    ]


@behaviour
def copied_within_a_fit(run: Run) -> Any:
    """Of callbacks, of the module and of the trainer, by a callback of the user's."""
    seen: list[Any] = []

    def copies(trainer: pl.Trainer, *_: Any) -> None:
        callbacks, module = copy.deepcopy(trainer.callbacks), copy.deepcopy(trainer.lightning_module)
        other = copy.deepcopy(trainer)
        seen.append(([type(each) for each in callbacks], module.state_dict(), other.global_step))
        seen.append([type(other), type(other.strategy), len(other.callbacks)])

    class Copies(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            copies(trainer)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            copies(trainer)

    trainer, module = run.fit(None, loader(2), callbacks=[Copies()], enable_progress_bar=True, max_epochs=1)
    copy.deepcopy(trainer)
    return seen, module.state_dict()


@behaviour
def clocks_that_are_mocked(run: Run) -> Any:
    """How often a fit asks each clock of `time` that users replace in tests."""
    counts: dict[str, int] = {}

    def counting(name: str, clock: Any) -> Any:
        def counted() -> Any:
            if "lightning" in sys._getframe(1).f_code.co_filename:
                counts[name] = counts.get(name, 0) + 1
            return clock()

        return counted

    with contextlib.ExitStack() as stack:
        for name in ("perf_counter", "monotonic"):
            stack.enter_context(mock.patch(f"time.{name}", counting(name, getattr(time, name))))
        run.fit(None, loader(), loader())
    return counts


def error_of(call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


@behaviour(on_one_rank=True)
def bad_settings(run: Run) -> Any:
    """Errors of what cannot work, by type."""
    file, fitted = run.folder / "a.ckpt", lambda: run.fit(None, loader(1), max_epochs=1)[0]
    return {
        "loader": error_of(run.trainer().fit, Plain()),
        "module": error_of(run.trainer().fit, torch.nn.Linear(1, 1)),
        "checkpoint": error_of(run.trainer().fit, Plain(), loader(), ckpt_path=run.folder / "none.ckpt"),
        "best": error_of(run.trainer().validate, Plain(), loader(), ckpt_path="best"),
        "no training_step": error_of(run.trainer().fit, pl.LightningModule(), loader()),
        "save before fit": error_of(run.trainer().save_checkpoint, file),
        "precision": error_of(run.trainer, precision="8"),
        "negative": error_of(run.trainer, limit_train_batches=-1),
        "storage_options": error_of(fitted().save_checkpoint, file, storage_options={"a": 1}),
    }
