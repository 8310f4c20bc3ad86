"""Places in a run at which a rank can be killed: not by a clock, but by what it is doing."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_hybrid.checkpoint import file as checkpoint_file
from lightning_hybrid.checkpoint import host_copy

OF_A_STEP = ("loading", "forward", "backward", "communication", "optimizer", "after the step", "validation")
OF_A_CHECKPOINT = ("checkpoint: copy", "checkpoint: write", "checkpoint: fsync", "checkpoint: rename")
OF_A_CHECKPOINT_RENAMED = "checkpoint: renamed"
PHASES = (*OF_A_STEP, *OF_A_CHECKPOINT, OF_A_CHECKPOINT_RENAMED, "test")


class DieAt(Callback):
    """Callback that sends this process, or its group, a signal in a phase of a step; once, also over restarts.

    Args:
        mark: A file that says that it has happened, and when.
        phase: One of `PHASES`.
        rank: Rank that dies; None: all of them at once, as when the power fails.
        step: Step, counted from 1. For a checkpoint: the first that is written in this step or later.
        number: Number of the signal.
    """

    def __init__(self, mark: str, phase: str, rank: int | None, step: int, number: int) -> None:
        if phase not in PHASES:
            raise ValueError(f"`phase` (={phase}) must be one of {', '.join(PHASES)}.")
        self.mark, self.phase, self.rank, self.step, self.number = Path(mark), phase, rank, step, number

    def die(self, *_: Any) -> None:
        """Send the signal now."""
        if self.mark.exists():
            return
        self.mark.write_text(str(time.monotonic()))
        if self.rank is None:
            os.killpg(0, self.number)
        else:
            os.kill(os.getpid(), self.number)
        if self.number == signal.SIGKILL:
            time.sleep(60)  # a signal to others of the group may be faster than the one to this process

    def _is_here(self, trainer: pl.Trainer) -> bool:
        return trainer.global_rank == (self.rank or 0) and not self.mark.exists()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the trap for this step."""
        if not self._is_here(trainer) or trainer.global_step + 1 != self.step:
            return
        if self.phase == "loading":
            self.die()
        elif self.phase == "forward":
            next(pl_module.children()).register_forward_hook(self.die)
        elif self.phase == "backward":
            weights = [weight for weight in pl_module.parameters() if weight.requires_grad]
            weights[len(weights) // 2].register_hook(self.die)
        elif self.phase == "communication":
            engine: Any = trainer.strategy._comm.engine  # type: ignore[attr-defined]
            engine.submit = _and_then(engine.submit, self.die)
        elif self.phase == "optimizer":
            optimizer = trainer.optimizers[0]
            optimizer.step = _and_then(optimizer.step, self.die)  # type: ignore[method-assign]
        elif self.phase in OF_A_CHECKPOINT:
            of, name = {
                "checkpoint: copy": (host_copy, "_copy_at"),
                "checkpoint: write": (checkpoint_file._ChecksumFile, "_put"),
                "checkpoint: fsync": (os, "fsync"),
                "checkpoint: rename": (os, "replace"),
            }[self.phase]
            setattr(of, name, _and_then(getattr(of, name), self.die, after=10 if name in ("_put", "_copy_at") else 0))
        elif self.phase == OF_A_CHECKPOINT_RENAMED:
            checkpoint_file.sync_directory = _and_then(checkpoint_file.sync_directory, self.die)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Die after the step, before its checkpoint."""
        if self.phase == "after the step" and self._is_here(trainer) and trainer.global_step == self.step:
            self.die()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Die in the first validation at or after the step."""
        if self.phase == "validation" and self._is_here(trainer) and trainer.global_step >= self.step:
            self.die()

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Die when all training is done."""
        if self.phase == "test" and self._is_here(trainer):
            self.die()


def _and_then(function: Callable[..., Any], die: Callable[[], None], *, after: int = 0) -> Callable[..., Any]:
    """Wrap `function`, to die after call number `after` (from 0); of a rename and an fsync, before it."""
    num_calls = 0
    is_before = function in (os.replace, os.fsync)

    def trapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if is_before and num_calls > after:
            die()
        result = function(*args, **kwargs)
        if not is_before and num_calls > after:
            die()
        return result

    trapped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a schedule looks whether its step is wrapped
    return trapped
