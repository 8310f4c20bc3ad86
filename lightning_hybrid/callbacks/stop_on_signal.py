"""Callback that saves a checkpoint and stops the run when the process receives a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
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
from lightning_utilities.core import rank_zero

from lightning_hybrid.checks import plain_value, require_whole
from lightning_hybrid.run_status import run_status

CHECKPOINT_NAME = "stopped.ckpt"

# A request is the number of the signal that stops the run, plus `REQUEUE` if the job should be
# requeued. The largest request of all ranks is used.
NO = 0
REQUEUE = 1000

AT_ONCE_AFTER_S = 2.0
"""Seconds after which a second Ctrl-C stops the run at once.

An earlier signal may come from torchrun, which forwards the first Ctrl-C.
"""

REQUEUE_LIMIT_S = 30.0
"""Seconds that `scontrol` may take. We chose this value. SLURM's own `MessageTimeout` is 10 s."""


class StopOnSignal(Callback):
    """Callback that finishes the step, saves a checkpoint and exits on SIGTERM or Ctrl-C.

        signal to any rank -> all ranks agree before the next batch -> <dirpath>/stopped.ckpt -> exit

    A run that resumes from the checkpoint is bit-identical to an uninterrupted run. As in a shell,
    the exit code is 130 after Ctrl-C, and 143 after SIGTERM and other signals. Ranks started by
    Lightning itself, without torchrun or SLURM, exit with 0. A second Ctrl-C stops the run at once,
    without a checkpoint.

    A signal takes effect after at most `every_n_steps` optimizer steps. If a validation loop is
    running, it is finished first. Then the checkpoint is written. SLURM kills the job 30 s after
    the signal, unless `KillWait` is set to a different time.

    At each check, the host waits for all ranks. On CUDA, this prevents the host from queueing the
    next step early. A larger `every_n_steps` reduces the cost.

    On SLURM, the callback also handles the signal that announces the time limit, Lightning's
    `SLURMEnvironment.requeue_signal`. Once the checkpoint is on disk, rank zero requeues the job,
    unless `SLURMEnvironment(auto_requeue=False)` is used. *Every rank must have this callback.*

    Args:
        dirpath: Folder for the checkpoint. If None, the folder of the first `ModelCheckpoint` or
            the trainer's `default_root_dir` is used.
        signals: Name or names of the signals to handle, in addition to SLURM's.
        every_n_steps: Number of steps between two checks over all ranks. A single rank checks after
            every step.

    Raises:
        ValueError: A signal is unknown or a number, or `every_n_steps` is not a positive integer.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        signals: str | tuple[str, ...] | list[str] = ("SIGTERM", "SIGINT"),
        every_n_steps: int = 1,
    ) -> None:
        why = (
            "every `every_n_steps` steps, all ranks check whether one of them received a signal. Set "
            "every_n_steps=1"
        )
        every_n_steps = plain_value(every_n_steps)
        require_whole("every_n_steps", every_n_steps, why)
        self.dirpath = dirpath
        names = [signals] if isinstance(signals, str) else signals
        self.signals = [_signal_of(name) for name in names]
        self.every_n_steps = every_n_steps
        self._num_steps = 0  # steps begun since the last check, including the step of the check
        self._request = NO  # request of this rank
        self._agreed_request = NO  # largest request of all ranks
        self._interrupted_s: float | None = None  # time of the first Ctrl-C
        # Step counter of the loggers in the checkpoint that is being written or was loaded.
        self._logger_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the loggers' step counter, but only while the run is being stopped."""
        if self._agreed_request or self._request:
            return {"steps_of_loggers": self._logger_step}
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the loggers' step counter, which `on_train_batch_start` applies to the trainer."""
        self._logger_step = state_dict.get("steps_of_loggers")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore Lightning's own signal handlers, in case an earlier `fit` call failed before it restored them."""
        _restore_handlers(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Discard stop requests of an earlier `fit` call, and record requests from now on."""
        self._request = NO
        self._agreed_request = NO
        self._interrupted_s = None
        self._num_steps = 0
        # Lightning registers its own handlers before it sets up the loaders. Its SIGTERM handler
        # calls a collective, which deadlocks while other ranks wait in another collective. Until
        # `on_train_start`, requests are only recorded, and the first batch stops the run.
        connector: Any = trainer._signal_connector
        if signal.SIGTERM in self.signals:
            connector._sigterm_notifier_fn = partial(self._record, NO)
        connector._slurm_sigusr_handler_fn = partial(self._record, REQUEUE)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install a handler that requeues the job as soon as SLURM's signal arrives.

        There is no state to save, because an interrupted test must be repeated.
        """

        def requeue(*_: Any) -> None:
            if trainer.is_global_zero:
                rank_zero_info(queue_again())

        number = requeue_signal_of(trainer)
        if number is not None and _is_main_thread():
            signal.signal(number, requeue)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers.

        When the fit ends, Lightning restores the handlers that were installed before it.
        """
        # Our handlers replace Lightning's. Lightning's SIGTERM handler calls a collective in the
        # middle of a rank's work, and ranks other than zero exit on their own. Its handler of
        # SLURM's signal saves a checkpoint in the middle of a step. A later test would use the
        # weights of that checkpoint, because a file `hpc_ckpt_*` in the run's directory takes
        # precedence over the weights in memory.
        if _is_main_thread():
            for number in self.signals:
                signal.signal(number, partial(self._on_signal, trainer, NO))
            requeue_number = requeue_signal_of(trainer)
            if requeue_number is not None:
                signal.signal(requeue_number, partial(self._on_signal, trainer, REQUEUE))
        # Before every batch, Lightning broadcasts rank zero's SIGTERM flag. A maximum over all
        # ranks replaces this broadcast.
        if trainer.world_size > 1:
            loop: Any = trainer.fit_loop.epoch_loop
            loop._broadcast_sigterm_tensor = partial(self._before_batch, trainer)

    on_sanity_check_start = on_train_start  # a signal takes effect before the first training batch

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the trainer's step counter for loggers to the value from the checkpoint.

        This undoes an increment by Lightning when it resumes at the start of an epoch.
        """
        if self._logger_step is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped = self._logger_step
            self._logger_step = None

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop a single-rank run if a signal arrived during the step."""
        if self._request:
            self._stop_single_rank(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the run if any rank received a signal since the last step.

        Collective: every rank must call it, in the same order.
        """
        self._stop_if_asked(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Save the checkpoint and set the exit code if a signal stopped the run.

        Collective: every rank must call it, in the same order.
        """
        request = self._agreed_request  # equal on all ranks, so that all or none of them save
        if trainer.world_size == 1:
            request = max(self._request, self._agreed_request)
        if not isinstance(exception, SIGTERMException) or not request:
            return

        path = os.path.join(self._folder(trainer), CHECKPOINT_NAME)
        loop = trainer.fit_loop.epoch_loop
        self._logger_step = loop._batches_that_stepped
        if trainer.validating and not loop._should_accumulate():
            # A single-rank run can stop during validation, before Lightning has counted the
            # preceding training step.
            self._logger_step += 1
        _forget_batches_of_finished_epoch(trainer)
        trainer.save_checkpoint(path, weights_only=False)

        received = signal.Signals(request % REQUEUE)
        signal_name = received.name
        exit_code = 128 + signal.SIGTERM
        if received == signal.SIGINT:
            signal_name = "Ctrl-C"
            exit_code = 128 + signal.SIGINT
        exception.code = exit_code
        # A rank that Lightning started must exit with 0. With another exit code, Lightning would
        # kill rank zero, which may still be writing.
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment) and trainer.local_rank > 0:
            exception.code = 0
        _report_stop(trainer, path, signal_name, exit_code)
        if request > REQUEUE and trainer.is_global_zero:
            # This waits until the checkpoint is on disk, because SLURM kills the job a few seconds
            # after the request.
            trainer.strategy.checkpoint_io.teardown()
            rank_zero_info(queue_again())

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore Lightning's own signal handlers and its broadcast of the SIGTERM flag."""
        trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        _restore_handlers(trainer)

    def _on_signal(
        self, trainer: pl.Trainer, requeue: int, number: int, frame: FrameType | None
    ) -> None:
        # A signal handler can interrupt any code of the main thread, so it must not use
        # collectives, files or locks.
        if number == signal.SIGINT:
            self._on_interrupt(trainer)
        self._record(requeue, number)
        self._stop_single_rank(trainer)

    def _record(self, requeue: int, number: int, frame: FrameType | None = None) -> None:
        self._request = max(self._request, requeue + number)

    def _on_interrupt(self, trainer: pl.Trainer) -> None:
        now_s = monotonic()
        if self._interrupted_s is None:
            if trainer.is_global_zero:
                # `print` is not safe here, because the interrupted code may be inside a `print`.
                message = (
                    b"\nCtrl-C: the run will save a checkpoint and stop after this step. Press Ctrl-C again to stop "
                    b"at once.\n"
                )
                os.write(2, message)
            self._interrupted_s = now_s
        elif now_s - self._interrupted_s > AT_ONCE_AFTER_S:
            raise KeyboardInterrupt

    def _stop_single_rank(self, trainer: pl.Trainer) -> None:
        # A single-rank run can stop without a check. Lightning reads this flag after each batch.
        if trainer.world_size == 1 and not trainer.fit_loop.epoch_loop._should_accumulate():
            trainer._signal_connector.received_sigterm = True

    def _before_batch(self, trainer: pl.Trainer) -> None:
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return  # the last batch did not end a step
        self._num_steps = self._num_steps % self.every_n_steps + 1
        if self._num_steps == 1:
            self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        """Stop the run on all ranks if any rank received a signal.

        Collective: every rank must call it, in the same order.
        """
        request = torch.tensor([self._request], device=trainer.strategy.root_device)
        if trainer.world_size > 1 and dist.is_initialized():
            trace = run_status(trainer).comm_trace
            waiting = nullcontext() if trace is None else trace.waiting()
            with waiting:
                dist.all_reduce(request, op=dist.ReduceOp.MAX)
        # A signal that arrives during the all-reduce is not considered until the next check,
        # because the other ranks do not know about it.
        self._agreed_request = int(request.item())
        if self._agreed_request:
            raise SIGTERMException

    def _folder(self, trainer: pl.Trainer) -> str:
        # The folder may be a URL such as s3://bucket/run, which a `Path` would change to s3:/bucket/run.
        if self.dirpath is not None:
            return str(self.dirpath)
        folder: Any = getattr(trainer.checkpoint_callback, "dirpath", None)
        return str(folder or trainer.default_root_dir)


def _report_stop(trainer: pl.Trainer, path: str, signal_name: str, exit_code: int) -> None:
    """Log the step at which the run stopped, and the path of the checkpoint.

    Only the first rank of each launch logs the message.
    """
    if trainer.global_rank != 0:
        return
    checkpoint = f"To resume, call `fit(..., ckpt_path={path!r})`"
    if not trainer.is_global_zero:
        # In an elastic run every host is launched separately, and only the first host writes.
        checkpoint = (
            f"This host has written no checkpoint, because only the first host of the run writes {path!r}, and only "
            "when that host is stopped. The other hosts continue until then"
        )
    message = (
        f"stopped by {signal_name} in epoch {trainer.current_epoch} after step {trainer.global_step}. "
        f"{checkpoint}. Exit code: {exit_code}"
    )
    # `rank_zero_info` is silent on a host that is not the first.
    rank_zero.log.info(message)


def _forget_batches_of_finished_epoch(trainer: pl.Trainer) -> None:
    """Reset Lightning's batch counters if the run stopped between two epochs.

    With `max_steps` Lightning would otherwise restore the counters of the finished epoch and,
    without validation, end the next epoch after one batch.
    """
    epochs = trainer.fit_loop.epoch_progress.total
    loop = trainer.fit_loop.epoch_loop
    if epochs.ready == epochs.completed:
        loop.batch_progress.reset_on_run()
        loop.scheduler_progress.reset_on_run()
        loop.automatic_optimization.optim_progress.reset_on_run()


def _restore_handlers(trainer: pl.Trainer) -> None:
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        vars(trainer._signal_connector).pop(name, None)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _signal_of(name: str) -> signal.Signals:
    if isinstance(name, int):
        raise ValueError(
            f"`signals` contains {name!r}, but must contain names of signals, not numbers. Set "
            "signals=['SIGTERM'], for example."
        )
    try:
        return signal.Signals[name]
    except KeyError:
        raise ValueError(
            f"`signals` contains {name}, which is not a signal on this operating system. Use SIGTERM or SIGUSR1, for "
            "example."
        ) from None


def requeue_signal_of(trainer: pl.Trainer) -> signal.Signals | None:
    """Return the signal upon which the SLURM job is requeued, or None if requeueing is disabled."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def job_id_of(variables: Mapping[str, str]) -> str:
    """Return the SLURM job ID for `scontrol`, including the task ID if the job is an array task.

    >>> job_id_of({"SLURM_JOB_ID": "17"})
    '17'
    >>> job_id_of({"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"})
    '17_1'
    """
    array = variables.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables["SLURM_JOB_ID"]


def queue_again() -> str:
    """Requeue this SLURM job, and return a line of text that describes the result.

    Requeueing ends the running job. Only one rank may call this function.
    """
    job_id = job_id_of(os.environ)
    command = ["scontrol", "requeue", job_id]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=REQUEUE_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if process.returncode == 0:
            return f"SLURM job {job_id} was requeued"
        reason = process.stderr.strip() or f"exit code {process.returncode}"
    return (
        f"SLURM job {job_id} could not be requeued by `{' '.join(command)}` ({reason}). Submit the job again "
        "with `sbatch`."
    )
