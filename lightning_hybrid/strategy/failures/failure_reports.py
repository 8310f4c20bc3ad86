"""Reports that inform all ranks about an error or a signal on one rank.

    before the engine exists      `SetupWatchdog` names dead, stopped, hanging and failed ranks
    from then on                  the engine's watchdog names them (`comm/health/watchdog.py`)

On CUDA the weights may have been updated with gradients that are not averages, so nothing is saved after a failure.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.health.backend_errors import failed_wait, is_of_a_collective
from lightning_hybrid.comm.topology import host_identity
from lightning_hybrid.lightning_names import lightning_error, lightning_types
from lightning_hybrid.strategy.failures.error_summary import RULE, shared_memory_cure, summary_of
from lightning_hybrid.strategy.failures.launcher_report import remove_error_file, write_error_file
from lightning_hybrid.strategy.failures.setup_watchdog import SetupWatchdog
from lightning_hybrid.strategy.user_code_checks import with_own_names

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Environment variable that sets the reaction of torch's watchdog to an NCCL error. torch reads it for each process
# group.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

# By default torch's watchdog ends a process without a message as soon as NCCL reports a lost peer, or after the time
# limit. With this value it only aborts communicators, and the error that follows is reported and explained.
CLEAN_UP_ONLY = "2"

# Environment variable of NCCL: with 1, operations of different communicators run in the order in which the host submits
# them, which is the same on all ranks. A single communicator, as by default, does not need this.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"

# Environment variable of torch: with 1, the few thread blocks of an all-reduce run before the thousands of waiting
# blocks of backward. It is set if all-reduces run in stages, so that the backend's streams have the same priority as
# the streams of this package.
HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"

_OF_NCCL = {ERROR_HANDLING: CLEAN_UP_ONLY}
_OF_SEVERAL_COMMUNICATORS = {LAUNCH_ORDER: "1", HIGH_PRIORITY: "1"}

_SIGNALS = "pytorch.trainer.connectors.signal_connector"
_SIGTERM = "pytorch.utilities.exceptions.SIGTERMException"


class SigtermOnAnyRank:
    """SIGTERM handler for one training run, which stops all ranks if any rank receives the signal.

    It replaces Lightning's handler. The new handler only records the signal. Before the next batch, rank zero announces
    its signal to all ranks, which then stop together. If rank zero has no signal, a later `before_batch` raises the
    error on the rank that has one.

    Attributes:
        error_of_this_rank: The error that stops this rank without the other ranks, or None.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.error_of_this_rank: BaseException | None = None
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop
        # Lightning's own handler may have recorded a signal during the setup.
        self._has_signal = trainer.received_sigterm
        self._has_waited_a_batch = False
        self._announces = False
        self._replace_lightnings_handler()

    def _replace_lightnings_handler(self) -> None:
        # Lightning 2.6 asks rank zero before each batch whether it received a signal. Its handler calls the same
        # collective at any point of a rank's work, so a signal to a rank above zero leaves the ranks waiting forever in
        # different collectives. Here a signal to rank zero stops all ranks before the next batch. A signal to another
        # rank ends that rank, and the watchdog reports this to the others within seconds.
        installed = signal.getsignal(signal.SIGTERM)
        if not isinstance(installed, lightning_types(f"{_SIGNALS}._HandlersCompose")):
            return
        connector_types = lightning_types(f"{_SIGNALS}._SignalConnector")
        notifiers = [kind._sigterm_notifier_fn for kind in connector_types]
        handlers = []
        for handler in installed.signal_handlers:
            if getattr(handler, "__func__", None) in notifiers:
                handler = self._note_signal
            handlers.append(handler)
        installed.signal_handlers = handlers

        self._announces = self._trainer.world_size > 1
        if self._announces:
            self._trainer._signal_connector.received_sigterm = False
            broadcast = self._loop._broadcast_sigterm_tensor
            self._loop._broadcast_sigterm_tensor = partial(self._announce_signal, broadcast)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._has_signal and launcher is not None:
            launcher.kill(number)
        self._has_signal = True
        if not self._announces:
            self._trainer._signal_connector.received_sigterm = True

    def _announce_signal(self, broadcast: Callable[[], None]) -> None:
        """Broadcast before a batch whether rank zero has received the signal.

        Lightning raises the error on a rank that has its flag set, at the end of a batch and without the other ranks,
        which would then wait for this rank. The flag is therefore set only for the broadcast.
        """
        if self._trainer.global_rank == 0:
            self._trainer._signal_connector.received_sigterm = self._has_signal
        broadcast()
        if self._trainer.received_sigterm:
            # `StopOnSignal` has replaced the broadcast, but does not handle SIGTERM.
            self._raise_alone()

    def before_batch(self) -> None:
        """Raise if this rank, but not rank zero, had received SIGTERM before the previous batch.

        Raises:
            SIGTERMException: The signal arrived before the last batch, and rank zero has not received one since.
        """
        # The error is raised one batch later, because all ranks stop together if rank zero has the signal too.
        if self._has_waited_a_batch:
            self._raise_alone()
        is_above_zero = self._announces and self._trainer.global_rank > 0
        self._has_waited_a_batch = self._has_signal and is_above_zero

    def _raise_alone(self) -> None:
        self.error_of_this_rank = lightning_error(_SIGTERM)
        raise self.error_of_this_rank

    def end(self) -> None:
        """Restore Lightning's own method of announcing rank zero's signal."""
        if self._announces:
            self._announces = False
            vars(self._loop).pop("_broadcast_sigterm_tensor", None)


class FailureReports:
    """Reporter that announces this rank's errors to the other ranks, and explains errors that other ranks caused.

    Attributes:
        engine: The communication engine, which watches the ranks from its creation until it is closed.
        setup_watchdog: The watchdog that is used as long as there is no engine.
        module: The module of the run. The state of its trainer shows whether an error has ended the run.
        ended_by: The error that ended the run, until `end` reports it.
    """

    def __init__(self) -> None:
        self.engine: CommEngine | None = None
        self.setup_watchdog: SetupWatchdog | None = None
        self.module: pl.LightningModule | None = None
        self.ended_by: BaseException | None = None
        self._sigterm: SigtermOnAnyRank | None = None
        # The error that the caller is handling while it sets up. It does not end this rank.
        self._error_before_setup: BaseException | None = None
        # The environment variables that `begin` has set.
        self._variables: tuple[str, ...] = ()

    @property
    def watchdog(self) -> CommEngine | SetupWatchdog | None:
        """Current watchdog, which is the engine or the setup watchdog, or None if there is neither."""
        return self.engine or self.setup_watchdog

    # ---- setup -----------------------------------------------------------------------------------------------------

    def begin(
        self, devices: Iterable[torch.device], *, has_several_communicators: bool = False
    ) -> None:
        """Set environment variables of torch and NCCL, and record the exception that is currently handled.

        torch and NCCL read the variables when the group is created. Values that the user has set are kept.

        Args:
            devices: The devices of this node's ranks.
            has_several_communicators: Whether further groups are in use at the same time as the default one.
        """
        self._error_before_setup = sys.exc_info()[1]
        remove_error_file()
        variables: dict[str, str] = {}
        if any(device.type == "cuda" for device in devices):
            variables.update(_OF_NCCL)
            if has_several_communicators:
                variables.update(_OF_SEVERAL_COMMUNICATORS)
        self._variables = tuple(name for name in variables if name not in os.environ)
        os.environ.update({name: variables[name] for name in self._variables})

    def watch_setup(
        self,
        watchdog_type: type[SetupWatchdog],
        device: torch.device,
        timeout: timedelta | None,
    ) -> None:
        """Start the setup watchdog if there are several ranks, so that error messages name missing ranks.

        Collective: every rank must call it, in the same order.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.setup_watchdog = watchdog_type(device=device, timeout=timeout)

    def end_setup(self) -> None:
        """Stop the setup watchdog, because the engine's watchdog replaces it."""
        watchdog = self.setup_watchdog
        self.setup_watchdog = None
        if watchdog is not None:
            watchdog.leave()

    # ---- a signal ----------------------------------------------------------------------------

    def watch_sigterm(self, trainer: pl.Trainer) -> None:
        """Install a SIGTERM handler that stops all ranks if any rank receives the signal."""
        self._sigterm = SigtermOnAnyRank(trainer)

    def before_batch(self) -> None:
        """Raise if this rank has received SIGTERM and must stop before the next batch.

        Raises:
            SIGTERMException: As in `SigtermOnAnyRank.before_batch`.
        """
        if self._sigterm is not None:
            self._sigterm.before_batch()

    # ---- an error ----------------------------------------------------------------------------

    @property
    def ending_error(self) -> BaseException | None:
        """Error that is ending the run on this rank alone, or None.

        A SIGTERM that stops all ranks does not count, because the ranks may save a checkpoint together.
        """
        error = sys.exc_info()[1]
        if error is self._error_before_setup:
            return None
        if isinstance(error, lightning_types(_SIGTERM)):
            is_of_this_rank = (
                self._sigterm is not None and error is self._sigterm.error_of_this_rank
            )
            return error if is_of_this_rank else None
        return error

    def is_failing(self) -> bool:
        """Return whether an error is ending this rank, so that the other ranks no longer join its collectives."""
        return self.ending_error is not None

    def refuse_to_save_alone(self, option: str, where: str) -> None:
        """Raise if this rank is failing and would save a checkpoint without the other ranks.

        Args:
            option: The option that needs all ranks to save, for the error message.
            where: A clause that says where the shards of the saved state are, for the error message.

        Raises:
            RuntimeError: An error is ending this rank.
        """
        error = self.ending_error
        if error is None:
            return
        self.is_alone()  # Reports to the other ranks, because an error of a callback ends Lightning without a report.
        raise RuntimeError(
            f"{option} cannot save a checkpoint after this rank failed with {type(error).__name__}: {where}, and the "
            "other ranks do not take part in this save. Save regularly with "
            "`ModelCheckpoint(every_n_train_steps=...)`, without `save_on_exception`."
        )

    def is_alone(self) -> bool:
        """Return whether an error has ended this rank's run, and if so, report it to the other ranks."""
        # Callbacks receive an error before the strategy does, and may save a checkpoint (`save_on_exception`).
        trainer = getattr(self.module, "_trainer", None)
        error = self.ending_error
        if trainer is None or trainer.state.status != "interrupted" or error is None:
            return False
        if self.watchdog is not None and failed_wait(error) is None:
            self.watchdog.abort(reason_of(error))
        return True

    def report(self, exception: BaseException, *, rank: int, first_rank: int) -> None:
        """Report this rank's error to the other ranks, or name the rank at fault in the error message.

        Args:
            exception: The error, to which notes are added or whose message is changed.
            rank: The index of this rank.
            first_rank: The first of the ranks that this process may have started. The error may come from one of them.
        """
        if self.watchdog is not None:
            self._explain_or_abort(self.watchdog, exception, rank)
        else:
            _note_started_rank(exception, first_rank)

        # An error that passed through autograd ends with a stack of internal threads, which does not help the user.
        message, separator, _ = str(exception).partition("\n\nAt:\n")
        if separator and "comm: " in message:
            exception.args = (message[message.index("comm: ") :],)
        cure = shared_memory_cure(exception)
        if cure:
            exception.add_note(cure)
        write_error_file(exception)

    def _explain_or_abort(
        self, watchdog: CommEngine | SetupWatchdog, exception: BaseException, rank: int
    ) -> None:
        """Add a diagnosis to an error that another rank caused, or report this rank's error to all ranks."""
        wait = failed_wait(exception)
        if is_of_a_collective(exception):
            # A collective of DDP or Lightning failed, such as the broadcast of buffers. The error keeps its type.
            exception.args = (watchdog.explain(exception),)
            return
        if wait is not None and wait is not exception:
            # torch's pipelining wraps the error in another one.
            exception.add_note(watchdog.explain(wait))
            return

        watchdog.abort(reason_of(exception))
        location = f"On rank {rank} (host {host_identity()[0]})"
        notes = getattr(exception, "__notes__", ())
        has_location = "comm: " in str(exception) or any(location in note for note in notes)
        if not has_location:
            exception.add_note(f"{RULE}\n{location}: {summary_of(exception)}")

        # The error may be only a consequence, such as a device error after the communicators were aborted.
        cause = ""
        if self.engine is not None:
            cause = self.engine.failure
        is_of_this_rank = cause.startswith(f"comm: rank {rank} gave up:")
        if cause and not is_of_this_rank and cause not in str(exception):
            exception.add_note(cause)

    # ---- end ---------------------------------------------------------------------------------

    def end(self, module: pl.LightningModule | None) -> None:
        """Log where the run stopped, and unset the environment variables that `begin` set."""
        self.end_setup()
        ended_by = self.ended_by
        self.ended_by = None
        if self._sigterm is not None:
            self._sigterm.end()
            self._sigterm = None
        # This is logged last, because a callback may have written a checkpoint after the error. If spawning the ranks
        # failed, the module of this process has no trainer.
        if ended_by is not None and module is not None and module._trainer is not None:
            log_where_it_stopped(module.trainer, ended_by)
        for name in self._variables:
            os.environ.pop(name, None)
        self._variables = ()


def _note_started_rank(exception: BaseException, first_rank: int) -> None:
    """Add a note with the failed rank to an error that Lightning's launcher raised for a child process."""
    index = getattr(exception, "error_index", None)
    if index is not None:
        location = f"On rank {first_rank + index} (host {host_identity()[0]})"
        exception.add_note(f"{RULE}\n{location}: {summary_of(exception)}")


def use_own_names(exception: BaseException, *, strategy: str) -> None:
    """Replace the names of DDP strategies in an error message by the name of the given strategy."""
    if not exception.args or not isinstance(exception.args[0], str):
        return
    message = exception.args[0]
    renamed = with_own_names(message, strategy)
    # The message of a `KeyError` from a worker is a subclass of `str` that is shown without escapes. `replace` returns
    # a plain `str` even if nothing is replaced.
    if renamed != message:
        exception.args = (renamed, *exception.args[1:])


def refuse_after_failure(engine: CommEngine | None) -> None:
    """Raise if the communication engine has failed on a CUDA device.

    On CUDA the last step may have used gradients that were not averaged.
    """
    if engine is not None and engine.device.type == "cuda":
        engine.raise_if_failed()


def log_where_it_stopped(trainer: pl.Trainer, exception: BaseException) -> None:
    """Log on rank zero the step at which training stopped and the checkpoint to resume from.

    If an error stopped the run, the text becomes a note of the error instead.
    """
    is_sigterm = isinstance(exception, lightning_types(_SIGTERM))
    # After an error before the first step, there is nothing to resume.
    is_stopped = is_sigterm or isinstance(exception, KeyboardInterrupt)
    is_under_way = trainer.state.fn == "fit" and (trainer.global_step > 0 or is_stopped)
    if not is_under_way or not trainer.is_global_zero:
        return
    newest = _newest_checkpoint(trainer)
    if newest is not None:
        cure = f"`fit(..., ckpt_path={newest!r})` resumes from the newest checkpoint"
    elif trainer.global_step == 0:
        cure = "there is nothing to resume from"
    else:
        cure = (
            "no checkpoint was written to resume from. Use ModelCheckpoint(every_n_train_steps=...) to write them "
            "regularly, or the callback StopOnSignal() to write one when the run is stopped"
        )
    message = f"The run stopped in epoch {trainer.current_epoch} after step {trainer.global_step}; {cure}."
    if isinstance(exception, KeyboardInterrupt):  # Lightning does not show the error.
        rank_zero_info(message)
    elif not is_sigterm:
        exception.add_note(message)
    elif getattr(exception, "code", None) is None:  # because otherwise `StopOnSignal` has logged it
        rank_zero_info(message)


def _newest_checkpoint(trainer: pl.Trainer) -> str | None:
    """Return the path of the newest local checkpoint, or else the URL of the first remote one.

    Files that contain only weights do not count, because a run cannot be resumed from them.
    """
    paths: list[str] = []
    local_paths: list[str] = []
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "save_weights_only", False):
            continue
        # The best checkpoint may be much older than the last one. The first of these names is private to Lightning.
        for name in ("_last_checkpoint_saved", "last_model_path", "best_model_path"):
            paths.append(getattr(callback, name, ""))
        # This is the file of Lightning's `OnExceptionCheckpoint`.
        local_paths.append(getattr(callback, "ckpt_path", ""))
    local_paths = [path for path in [*paths, *local_paths] if os.path.isfile(path)]
    if local_paths:
        return max(local_paths, key=os.path.getmtime)
    for path in paths:
        if "://" in path:
            return path
    return None


def reason_of(exception: BaseException) -> str:
    """Return a one-line reason why this rank is ending, for error messages on other ranks."""
    if isinstance(exception, lightning_types(_SIGTERM)):
        return "it received SIGTERM"
    if isinstance(exception, KeyboardInterrupt):
        return "it was interrupted by Ctrl-C"
    error, _, line_of_user = summary_of(exception).partition("\n  ")
    if line_of_user:
        return f"{error} ({line_of_user})"
    return error
