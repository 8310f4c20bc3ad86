"""A stop by a signal, as schedulers send one before they kill: a checkpoint after the step, on all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.checks import plain_value, require_whole

CHECKPOINT_NAME = "stopped.ckpt"

# A request to a rank: to stop, by the signal of that number, and to requeue. The largest over ranks is obeyed.
NO = 0
REQUEUE = 1000

# A second Ctrl-C later than this ends the run at once. Sooner it may be torchrun's, which hands on the first.
AT_ONCE_AFTER_S = 2.0

# How long `scontrol` may take. Our choice: SLURM's own `MessageTimeout` is 10 s.
REQUEUE_LIMIT_S = 30.0


class StopOnSignal(Callback):
    """A stop after the step that is under way, on SIGTERM or Ctrl-C, with a checkpoint and exit code 143 or 130.

        signal to any rank -> all ranks learn of it before the next batch -> <dirpath>/stopped.ckpt -> exit

    The exit code is a shell's for a process that SIGTERM ended, or SIGINT; other signals count as SIGTERM. Ctrl-C a
    second time ends the run at once, without a checkpoint.

    A run that is resumed from the checkpoint goes on to the bit. The signal is obeyed after at most `every_n_steps`
    whole steps and, where that is under way, one validation; writing the checkpoint comes on top. SLURM leaves 30 s
    before it kills, unless `KillWait` differs.

    The host waits for the answer of all ranks, so on CUDA nothing of the next step is queued up meanwhile; see
    `every_n_steps`. Ranks that Lightning itself started (not torchrun, not SLURM) end with code 0.

    In a job of SLURM's the signal that announces its time limit, Lightning's `SLURMEnvironment.requeue_signal`, is
    obeyed too, and once the checkpoint is on the disk rank zero queues the job again, unless
    `SLURMEnvironment(auto_requeue=False)`. *Every rank must have this callback.*

    Args:
        dirpath: folder of the checkpoint; None: that of the first `ModelCheckpoint`, or else the trainer's
            `default_root_dir`.
        signals: names of the signals that are obeyed, in addition to SLURM's.
        every_n_steps: steps from one question to all ranks to the next. One rank alone obeys after the step.

    Raises:
        ValueError: there is no such signal, or `every_n_steps` is not a whole number, 1 or more.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        signals: tuple[str, ...] | list[str] = ("SIGTERM", "SIGINT"),
        every_n_steps: int = 1,
    ) -> None:
        why = "so often all ranks are asked whether one of them received a signal. Write every_n_steps=1"
        every_n_steps = plain_value(every_n_steps)
        require_whole("every_n_steps", every_n_steps, why)
        self.dirpath = dirpath
        self.signals = [_signal_of(name) for name in signals]
        self.every_n_steps = every_n_steps
        self._num_steps = 0  # begun, since the last question and with it
        self._asked = self._agreed = NO
        self._interrupted_s: float | None = None  # when Ctrl-C came first
        self._steps_of_loggers: int | None = (
            None  # at the checkpoint that is written, or resumed from
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the step that loggers were at, in the checkpoint of a run that was stopped."""
        return {"steps_of_loggers": self._steps_of_loggers} if self._agreed or self._asked else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loggers' step, see `on_train_batch_start`."""
        self._steps_of_loggers = state_dict.get("steps_of_loggers")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget what an earlier fit was asked."""
        self._asked = self._agreed = NO
        self._interrupted_s = None
        self._num_steps = 0

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Queue the job again at SLURM's signal at once: nothing is left to save, and the test has to be repeated."""
        if (
            number := requeue_signal_of(trainer)
        ) is not None and threading.current_thread() is threading.main_thread():
            signal.signal(
                number, lambda *_: rank_zero_info(queue_again()) if trainer.is_global_zero else None
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the handlers."""
        # Lightning, which installed its own before, restores the old ones after the fit.
        # In place of Lightning's handlers. That of SIGTERM calls a collective in the middle of a rank's work, and a
        # rank above zero leaves alone. That of SLURM's signal saves in the middle of a step and then tests the weights
        # of that moment: a file `hpc_ckpt_*` in the run's directory beats those in memory.
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                signal.signal(number, partial(self._on_signal, trainer, NO))
            if (number_of_slurm := requeue_signal_of(trainer)) is not None:
                signal.signal(number_of_slurm, partial(self._on_signal, trainer, REQUEUE))
        # Lightning broadcasts rank zero's flag before every batch; a maximum over ranks takes its place.
        if trainer.world_size > 1:
            loop: Any = trainer.fit_loop.epoch_loop
            loop._broadcast_sigterm_tensor = partial(self._before_batch, trainer)

    on_sanity_check_start = on_train_start  # a signal now is obeyed before the first batch

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore the loggers' step: resumed at the start of an epoch, Lightning counts one more for a validation."""
        if self._steps_of_loggers is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped = self._steps_of_loggers
            self._steps_of_loggers = None

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop now that the step under way at the signal is made."""
        if self._asked:
            self._stop_single_rank(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop here, if a signal came since the last step. Collective."""
        self._stop_if_asked(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the checkpoint. Collective."""
        asked = (
            self._agreed if trainer.world_size > 1 else max(self._asked, self._agreed)
        )  # all save, or none
        if not isinstance(exception, SIGTERMException) or not asked:
            return
        path = self._folder(trainer) / CHECKPOINT_NAME
        loop = trainer.fit_loop.epoch_loop
        # One rank alone stops in the middle of a validation, before Lightning counts the step that it follows.
        self._steps_of_loggers = loop._batches_that_stepped + (
            trainer.validating and not loop._should_accumulate()
        )
        _forget_batches_of_a_whole_epoch(trainer)
        trainer.save_checkpoint(path, weights_only=False)
        by = signal.Signals(asked % REQUEUE)
        code = 128 + (signal.SIGINT if by == signal.SIGINT else signal.SIGTERM)
        # If a rank that Lightning started ends with another code than 0, it kills rank zero, which may still write.
        environment = getattr(trainer.strategy, "cluster_environment", None)
        exception.code = (
            0 if isinstance(environment, LightningEnvironment) and trainer.local_rank > 0 else code
        )
        rank_zero_info(
            f"stopped by {'Ctrl-C' if by == signal.SIGINT else by.name} in epoch {trainer.current_epoch} after step "
            f"{trainer.global_step}; `fit(..., ckpt_path={str(path)!r})` goes on from there; exit code {code}"
        )
        if asked > REQUEUE and trainer.is_global_zero:
            trainer.strategy.checkpoint_io.teardown()  # waits for the disk: SLURM kills some seconds after it was asked
            rank_zero_info(queue_again())

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give Lightning its own broadcast back."""
        trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def _on_signal(
        self, trainer: pl.Trainer, requeue: int, number: int, frame: FrameType | None
    ) -> None:
        # This runs in the middle of anything: no collective, no file, no lock.
        if number == signal.SIGINT:
            now_s = monotonic()
            if self._interrupted_s is not None and now_s - self._interrupted_s > AT_ONCE_AFTER_S:
                raise KeyboardInterrupt
            if self._interrupted_s is None and trainer.is_global_zero:
                # Not `print`: the code that was interrupted may be in the middle of one.
                os.write(
                    2,
                    b"\nCtrl-C: the run stops after this step, with a checkpoint; once more: at once\n",
                )
            self._interrupted_s = now_s if self._interrupted_s is None else self._interrupted_s
        self._asked = max(self._asked, requeue + number)
        self._stop_single_rank(trainer)

    def _stop_single_rank(self, trainer: pl.Trainer) -> None:
        # One rank has no question before a batch to wait for; Lightning reads this flag after each batch.
        if trainer.world_size == 1 and not trainer.fit_loop.epoch_loop._should_accumulate():
            trainer._signal_connector.received_sigterm = True

    def _before_batch(self, trainer: pl.Trainer) -> None:
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return  # the last batch was not the last of a step
        self._num_steps = self._num_steps % self.every_n_steps + 1
        if self._num_steps == 1:
            self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        asked = torch.tensor([self._asked], device=trainer.strategy.root_device)
        if trainer.world_size > 1 and dist.is_initialized():
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        self._agreed = int(
            asked.item()
        )  # not what was asked meanwhile: other ranks have not heard of that
        if self._agreed:
            raise SIGTERMException

    def _folder(self, trainer: pl.Trainer) -> Path:
        if self.dirpath is not None:
            return Path(self.dirpath)
        folder: Any = getattr(trainer.checkpoint_callback, "dirpath", None)
        return Path(folder or trainer.default_root_dir)


def _forget_batches_of_a_whole_epoch(trainer: pl.Trainer) -> None:
    # Between two epochs Lightning still counts the batches of the last one. With `max_steps` it would restore them, and
    # where nothing is validated end the next epoch after one batch.
    epochs = trainer.fit_loop.epoch_progress.total
    loop = trainer.fit_loop.epoch_loop
    if epochs.ready == epochs.completed:
        for progress in (
            loop.batch_progress,
            loop.scheduler_progress,
            loop.automatic_optimization.optim_progress,
        ):
            progress.reset_on_run()


def _signal_of(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError:
        raise ValueError(
            f"`signals` (={name}) must be names of signals, such as SIGTERM or SIGUSR1: there is no such one here."
        ) from None


def requeue_signal_of(trainer: pl.Trainer) -> signal.Signals | None:
    """Return the signal at which the job is to be queued again, Lightning's `requeue_signal`; None: at no signal."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def job_id_of(variables: Mapping[str, str]) -> str:
    """Return the job's name for `scontrol`; a task of an array has its own.

    >>> job_id_of({"SLURM_JOB_ID": "17"})
    '17'
    >>> job_id_of({"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"})
    '17_1'
    """
    if (array := variables.get("SLURM_ARRAY_JOB_ID")) is not None:
        return f"{array}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables["SLURM_JOB_ID"]


def queue_again() -> str:
    """Ask SLURM to end this job and to queue it again; return the result in one line. Call it on one rank only."""
    job_id = job_id_of(os.environ)
    command = ["scontrol", "requeue", job_id]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=REQUEUE_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if done.returncode == 0:
            return f"SLURM job {job_id} is queued again"
        reason = done.stderr.strip() or f"exit code {done.returncode}"
    return f"SLURM job {job_id} could not be queued again by `{' '.join(command)}` ({reason}): submit it again yourself"
