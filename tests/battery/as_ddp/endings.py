"""How fits end, and what they leave in the process; what user code copies and mocks meanwhile."""

from __future__ import annotations

import contextlib
import copy
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
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.battery.as_ddp.case import Plain, Run, loader
from tests.battery.as_ddp.trainers import state_of


def stopped_by_should_stop(run: Run) -> Any:
    class Stops(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop = batch_idx == 1
            return super().training_step(batch, batch_idx)

    trainer = run.trainer(max_epochs=5)
    trainer.fit(Stops(), loader())
    return state_of(trainer)


def skipped_by_none(run: Run) -> Any:
    class Skips(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    trainer = run.trainer()
    trainer.fit(module := Skips(), loader())
    return state_of(trainer), module.state_dict()


def stopped_by_minus_one(run: Run) -> Any:
    class Ends(Plain):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 2 else None

    trainer = run.trainer()
    trainer.fit(module := Ends(), loader())
    return state_of(trainer), module.state_dict()


def error_in(hook: str) -> Any:
    def behaviour(run: Run) -> Any:
        def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("of the user")

        seen: list[Any] = []

        class Notes(pl.Callback):
            def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
                seen.append((type(exception), str(exception), state_of(trainer)))

        module = type("Fails", (Plain,), {hook: fails})()
        trainer = run.trainer(callbacks=[Notes()])
        try:
            trainer.fit(module, loader(), loader())
        except Exception as error:
            seen.append((type(error), error.args, [type(error.__cause__), error.__suppress_context__]))
        return seen, state_of(trainer), module._trainer is not None, str(trainer.state)

    return behaviour


def notes_of_an_error(run: Run) -> Any:
    class Fails(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise LookupError("of the user")
            return super().training_step(batch, batch_idx)

    try:
        run.trainer().fit(Fails(), loader())
    except Exception as error:
        return len(getattr(error, "__notes__", [])) > 0


def overflow(run: Run) -> Any:
    """What one batch whose loss is infinite leaves."""

    class Overflows(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 else loss

    run.trainer(max_epochs=1).fit(module := Overflows(), loader())
    return [bool(torch.isfinite(each).all()) for each in module.parameters()]


def interrupted(run: Run) -> Any:
    class Interrupted(Plain):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                raise KeyboardInterrupt

    trainer, seen = run.trainer(), []
    try:
        trainer.fit(Interrupted(), loader())
    except BaseException as error:
        seen.append((type(error), getattr(error, "code", None)))
    return seen, state_of(trainer), str(trainer.state), trainer.interrupted


def signals_after_a_fit(run: Run) -> Any:
    before = signal.getsignal(signal.SIGTERM)
    run.trainer().fit(Plain(), loader())
    return signal.getsignal(signal.SIGTERM) is before


def state_of_the_process(run: Run) -> Any:
    """What a fit leaves in it, and what it has drawn of random numbers."""
    environment, threads = set(os.environ), {thread.name for thread in threading.enumerate()}
    run.trainer().fit(Plain(), loader(), loader())
    return [
        sorted(set(os.environ) - environment),
        sorted({thread.name for thread in threading.enumerate()} - threads),
        [torch.get_rng_state().sum(), random.random(), np.random.random()],
        [
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        ],
        [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
        [str(warning) for warning in warnings.filters],
        [len(logging.getLogger(name).handlers) for name in ("lightning.pytorch", "lightning", "torch", "")],
        torch.distributed.is_initialized(),
    ]


def copied_within_a_fit(run: Run) -> Any:
    """Of callbacks, of the module and of the trainer, by a callback of the user's."""
    seen: list[Any] = []

    class Copies(pl.Callback):
        def copies(self, trainer: pl.Trainer) -> None:
            callbacks = copy.deepcopy(trainer.callbacks)
            module = copy.deepcopy(trainer.lightning_module)
            other = copy.deepcopy(trainer)
            seen.append(([type(each) for each in callbacks], module.state_dict(), other.global_step))
            seen.append([type(other), type(other.strategy), len(other.callbacks)])

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.copies(trainer)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.copies(trainer)

    trainer = run.trainer(callbacks=[Copies()], enable_progress_bar=True, max_epochs=1)
    trainer.fit(module := Plain(), loader(2))
    copy.deepcopy(trainer)
    return seen, module.state_dict()


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
        run.trainer().fit(Plain(), loader(), loader())
    return counts


def bad_settings(run: Run) -> Any:
    """Errors of what cannot work, by type."""
    return {
        "loader": _error(run.trainer().fit, Plain()),
        "module": _error(run.trainer().fit, torch.nn.Linear(1, 1)),
        "checkpoint": _error(run.trainer().fit, Plain(), loader(), ckpt_path=run.folder / "none.ckpt"),
        "best": _error(run.trainer().validate, Plain(), loader(), ckpt_path="best"),
        "no training_step": _error(run.trainer().fit, pl.LightningModule(), loader()),
        "save before fit": _error(run.trainer().save_checkpoint, run.folder / "a.ckpt"),
        "precision": _error(run.trainer, precision="8"),
        "negative": _error(run.trainer, limit_train_batches=-1),
        "storage_options": _storage_options(run),
    }


def _error(call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except (Exception, MisconfigurationException) as error:
        return type(error), str(error)


def _storage_options(run: Run) -> Any:
    trainer = run.trainer(max_epochs=1)
    trainer.fit(Plain(), loader(1))
    return _error(trainer.save_checkpoint, run.folder / "a.ckpt", storage_options={"a": 1})


BEHAVIOURS = {
    each.__name__: each
    for each in (
        stopped_by_should_stop,
        skipped_by_none,
        stopped_by_minus_one,
        notes_of_an_error,
        overflow,
        interrupted,
        signals_after_a_fit,
        state_of_the_process,
        copied_within_a_fit,
        clocks_that_are_mocked,
        bad_settings,
    )
}
FAILING = ("training_step", "validation_step", "configure_optimizers", "on_train_end", "on_save_checkpoint", "setup")
BEHAVIOURS |= {f"error_in_{hook}": error_in(hook) for hook in FAILING}
