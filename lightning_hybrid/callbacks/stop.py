"""A run that is asked to stop, as schedulers ask before they kill: a checkpoint after the step, on all ranks alike."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

STOPPED_EXIT_CODE = 128 + signal.SIGTERM
"""What the process ends with: 143, as a shell has it for a process that SIGTERM ended."""

CHECKPOINT_NAME = "stopped.ckpt"


class StopOnSignal(Callback):
    """On SIGTERM, end after the step that is under way, with a checkpoint and exit code 143.

        signal to any rank -> all ranks learn of it before the next batch -> <dirpath>/stopped.ckpt -> exit

    The checkpoint is of a moment between two steps, in which everything of the last has been logged, so a run that is
    resumed from it goes on to the bit. The signal is obeyed after at most `every_n_steps` steps and, where that is
    under way, one validation; writing the checkpoint comes on top. SLURM leaves 30 s before it kills, unless `KillWait`
    says other. A step of many batches is made to its end: the gradients of some of them would be lost.

    Lightning's own way is not used: its signal handler calls a collective in the middle of whatever the rank does, and
    a rank above zero that hears of the signal leaves alone. What it asks all ranks before every batch is asked in its
    place, as a sum over ranks instead of rank zero's word: the traffic is the same, or less with `every_n_steps`. The
    host waits for each answer, so on CUDA nothing of the next step is queued up meanwhile.

    Ranks that Lightning itself started (not torchrun, not SLURM) end with code 0: at any other, Lightning's observer
    kills rank zero, which may still be writing.

    *Every rank must have this callback.*

    Args:
        dirpath: Of the checkpoint; None: that of the first `ModelCheckpoint`, or else the trainer's `default_root_dir`.
        signals: That are obeyed, by name; SLURM's `--signal=USR1@120` comes earlier than its SIGTERM.
        every_n_steps: Steps from one question to all ranks to the next. One rank alone obeys after the step.

    Raises:
        ValueError: There is no such signal, or `every_n_steps` is not a whole number, 1 or more.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        signals: tuple[str, ...] | list[str] = ("SIGTERM",),
        every_n_steps: int = 1,
    ) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(
                f"`every_n_steps` (={every_n_steps!r}) must be a whole number, 1 or more: so often all ranks are asked "
                "whether one of them was told to stop. Set callbacks.stop.every_n_steps=1."
            )
        self.dirpath = dirpath
        self.signals = [_signal_of(name) for name in signals]
        self.every_n_steps = every_n_steps
        self._num_steps = 0  # begun, since the last question and with it
        self._is_asked = False
        self._stops = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget what an earlier fit was asked."""
        self._is_asked = self._stops = False
        self._num_steps = 0

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen; to be obeyed before the first batch."""
        self._listen(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen."""
        self._listen(trainer)

    def _listen(self, trainer: pl.Trainer) -> None:
        """Lightning, which has begun to before this, gives the signals back after the fit."""
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                signal.signal(number, partial(self._on_signal, trainer))
        if trainer.world_size > 1:
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = partial(self._before_batch, trainer)  # type: ignore[method-assign]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is made that was under way at the signal."""
        if self._is_asked:
            self._tell_lightning(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop here, if asked since the last step. Collective."""
        self._stop_if_asked(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the checkpoint. Collective."""
        if not isinstance(exception, SIGTERMException) or not (self._is_asked or self._stops):
            return
        path = self._folder(trainer) / CHECKPOINT_NAME
        trainer.save_checkpoint(path)
        exception.code = 0 if _is_started_by_lightning(trainer) else STOPPED_EXIT_CODE
        rank_zero_info(f"stopped by a signal after step {trainer.global_step}: {path}; exit code {STOPPED_EXIT_CODE}")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give Lightning its own question back."""
        trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def _on_signal(self, trainer: pl.Trainer, number: int, frame: FrameType | None) -> None:
        """In the middle of anything: no collective, no file, no lock."""
        self._is_asked = True
        self._tell_lightning(trainer)

    def _tell_lightning(self, trainer: pl.Trainer) -> None:
        """On a rank alone nobody asks before a batch; Lightning looks at this after each."""
        if trainer.world_size == 1 and not trainer.fit_loop.epoch_loop._should_accumulate():
            trainer._signal_connector.received_sigterm = True

    def _before_batch(self, trainer: pl.Trainer) -> None:
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return  # the last batch was not the last of a step
        self._num_steps = self._num_steps % self.every_n_steps + 1
        if self._num_steps == 1:
            self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        asked = torch.tensor([int(self._is_asked)], device=trainer.strategy.root_device)
        if trainer.world_size > 1 and dist.is_initialized():
            dist.all_reduce(asked)
        if asked.item():
            self._stops = True
            raise SIGTERMException

    def _folder(self, trainer: pl.Trainer) -> Path:
        if self.dirpath is not None:
            return Path(self.dirpath)
        folder: Any = getattr(trainer.checkpoint_callback, "dirpath", None)
        return Path(folder or trainer.default_root_dir)


def _is_started_by_lightning(trainer: pl.Trainer) -> bool:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return isinstance(environment, LightningEnvironment) and trainer.local_rank > 0


def _signal_of(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError:
        raise ValueError(
            f"`signals` (={name}) must be names of signals, such as SIGTERM or SIGUSR1: there is no such one here."
        ) from None
