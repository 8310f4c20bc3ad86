"""Reports of errors and signals on one rank, to all ranks, with the rank that caused them.

    before there is an engine     `SetupWatchdog` names dead, stopped, hanging and failed ranks
    from then on                  the engine's watchdog does (`comm/health/watchdog.py`)

On CUDA the weights may have been updated with gradients that are not averages, so nothing is saved after a failure.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.health.backend_errors import failed_wait, is_of_a_collective
from lightning_hybrid.comm.topology import host_identity
from lightning_hybrid.lightning_names import lightning_error, lightning_types
from lightning_hybrid.strategy.arguments import with_own_names
from lightning_hybrid.strategy.error_summary import RULE, shared_memory_cure, summary_of
from lightning_hybrid.strategy.launcher_report import remove_error_file, write_error_file
from lightning_hybrid.strategy.setup_watchdog import SetupWatchdog

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Environment variable: the reaction of torch's watchdog to an error of NCCL. torch reads it for each process group.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

# By default torch's watchdog ends a process without a message as soon as NCCL reports a lost peer, or after the time
# limit. With this value it only aborts communicators, and the error that follows is reported and explained.
CLEAN_UP_ONLY = "2"

# Environment variable of NCCL: with 1, communicators that are in use at the same time take turns in the host's order,
# which all ranks share. A single communicator, as by default, needs no turns.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"

# Environment variable of torch: with 1, the few blocks of an all-reduce run before the thousands of backward's that
# wait. It is set if all-reduces run in stages, so that the backend's streams have the priority of our own.
HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"

_OF_NCCL = {ERROR_HANDLING: CLEAN_UP_ONLY}
_OF_SEVERAL_COMMUNICATORS = {LAUNCH_ORDER: "1", HIGH_PRIORITY: "1"}

_SIGNALS = "pytorch.trainer.connectors.signal_connector"
_SIGTERM = "pytorch.utilities.exceptions.SIGTERMException"


class SigtermOnAnyRank:
    """Handler of SIGTERM for one fit, in place of Lightning's: it notes the signal, and the next batch raises."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._has_waited_a_batch = False
        self._replace_lightnings_handler()

    def _replace_lightnings_handler(self) -> None:
        # Lightning 2.6 asks rank zero before each batch whether it received a signal, and its handler calls the same
        # collective in the middle of a rank's work: a signal to a rank above zero leaves the ranks waiting in
        # different collectives for good. Here rank zero's signal is obeyed as Lightning does; another rank's by ending
        # its run, of which the others learn within seconds.
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

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        connector = self._trainer._signal_connector
        launcher = self._trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(number)
        connector.received_sigterm = True

    def before_batch(self) -> None:
        """Check on a rank above zero whether it has to end on its own.

        Raises:
            SIGTERMException: The signal came before the last batch, and rank zero has not received one since.
        """
        # One batch later: Lightning asks rank zero before each batch, and a signal to all ranks is obeyed together.
        if self._has_waited_a_batch:
            raise lightning_error(_SIGTERM)
        self._has_waited_a_batch = self._trainer.received_sigterm and self._trainer.global_rank > 0


class FailureReports:
    """Reports of a strategy: errors of this rank go to all ranks, and other errors get the rank that caused them.

    Attributes:
        engine: The engine, which watches the ranks from its creation until it is closed.
        setup_watchdog: The watchdog before there is an engine, and without one.
        module: The module of the run. Its trainer knows whether an error has ended the run.
        ended_by: The error that ended the run, until that has been reported.
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
        """The current watchdog, which names lost ranks."""
        return self.engine or self.setup_watchdog

    # ---- setup -----------------------------------------------------------------------------------------------------

    def begin(
        self, devices: Iterable[torch.device], *, has_several_communicators: bool = False
    ) -> None:
        """Note the error that the caller is handling, and set the environment for the process group.

        torch and NCCL read the variables when the group is created. Values of the user stay.

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
        """Let errors name missing ranks from here on. Collective, if there are several ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.setup_watchdog = watchdog_type(device=device, timeout=timeout)

    def end_setup(self) -> None:
        """End the watchdog of the setup. The engine's watchdog takes over."""
        watchdog = self.setup_watchdog
        self.setup_watchdog = None
        if watchdog is not None:
            watchdog.leave()

    # ---- a signal ----------------------------------------------------------------------------

    def watch_sigterm(self, trainer: pl.Trainer) -> None:
        """Let a SIGTERM to any rank stop all ranks from here on."""
        self._sigterm = SigtermOnAnyRank(trainer)

    def before_batch(self) -> None:
        """Raise an error if a SIGTERM to this rank ends it before the next batch.

        Raises:
            SIGTERMException: As in `SigtermOnAnyRank.before_batch`.
        """
        if self._sigterm is not None:
            self._sigterm.before_batch()

    # ---- an error ----------------------------------------------------------------------------

    @property
    def ending_error(self) -> BaseException | None:
        """The error that ends this rank alone, or None. All ranks obey a signal together, and may save then."""
        error = sys.exc_info()[1]
        if error is self._error_before_setup or isinstance(error, lightning_types(_SIGTERM)):
            return None
        return error

    def is_failing(self) -> bool:
        """Return whether an error ends this rank, so that the other ranks join no more collectives."""
        return self.ending_error is not None

    def refuse_to_save_alone(self, option: str, where: str) -> None:
        """Check that the other ranks save together with this one.

        Args:
            option: The option that needs all ranks to save, for the error.
            where: A clause on where the parts of the saved state are, for the error.

        Raises:
            RuntimeError: An error ends this rank.
        """
        error = self.ending_error
        if error is None:
            return
        self.is_alone()  # Reports to the other ranks: Lightning ends at an error of a callback.
        raise RuntimeError(
            f"{option} cannot save while {type(error).__name__} ends this rank: {where}, and the others do not save "
            "with it. Save regularly (`ModelCheckpoint(every_n_train_steps=...)`), without `save_on_exception`."
        )

    def is_alone(self) -> bool:
        """Return whether an error has ended the run on this rank. If so, report it to the other ranks first."""
        # Callbacks hear of an error before the strategy, and may save (`save_on_exception`).
        trainer = getattr(self.module, "_trainer", None)
        error = self.ending_error
        if trainer is None or trainer.state.status != "interrupted" or error is None:
            return False
        if self.watchdog is not None and failed_wait(error) is None:
            self.watchdog.abort(reason_of(error))
        return True

    def report(self, exception: BaseException, *, rank: int, first_rank: int) -> None:
        """Report an error to the ranks that wait for this one. If another rank caused it, name that rank.

        Args:
            exception: The error. It gets further notes or another message.
            rank: This rank.
            first_rank: The first of the ranks that this process may have started, one of which may have had the error.
        """
        if self.watchdog is not None:
            self._explain_or_abort(self.watchdog, exception, rank)
        else:
            _note_started_rank(exception, first_rank)

        # An error that passed through autograd ends with a stack of our threads, which is of no use to a user.
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
        """Explain an error that another rank caused, or report an error of this rank to the others."""
        wait = failed_wait(exception)
        if is_of_a_collective(exception):
            # A collective of DDP or Lightning, such as the broadcast of buffers: the error keeps its type.
            exception.args = (watchdog.explain(exception),)
            return
        if wait is not None and wait is not exception:
            # torch's pipelining raises an error of its own.
            exception.add_note(watchdog.explain(wait))
            return

        watchdog.abort(reason_of(exception))
        location = f"On rank {rank} (host {host_identity()[0]})"
        notes = getattr(exception, "__notes__", ())
        has_location = "comm: " in str(exception) or any(location in note for note in notes)
        if not has_location:
            exception.add_note(f"{RULE}\n{location}: {summary_of(exception)}")

        # The error may be only a consequence, such as the device's own after its communicators were aborted.
        cause = ""
        if self.engine is not None:
            cause = self.engine.failure
        is_of_this_rank = cause.startswith(f"comm: rank {rank} gave up:")
        if cause and not is_of_this_rank and cause not in str(exception):
            exception.add_note(cause)

    # ---- end ---------------------------------------------------------------------------------

    def end(self, module: pl.LightningModule | None) -> None:
        """Log the step at which the run stopped, and restore the environment that `begin` has set."""
        self.end_setup()
        ended_by = self.ended_by
        self.ended_by = None
        self._sigterm = None
        # Only now: a callback may have written a checkpoint after the error. If ranks were to be spawned and that
        # failed, the module of this process never met its trainer.
        if ended_by is not None and module is not None and module._trainer is not None:
            log_where_it_stopped(module.trainer, ended_by)
        for name in self._variables:
            os.environ.pop(name, None)
        self._variables = ()


def _note_started_rank(exception: BaseException, first_rank: int) -> None:
    """Add the rank of a started process to its error, if Lightning's launcher has raised it here."""
    index = getattr(exception, "error_index", None)
    if index is not None:
        location = f"On rank {first_rank + index} (host {host_identity()[0]})"
        exception.add_note(f"{RULE}\n{location}: {summary_of(exception)}")


def use_own_names(exception: BaseException, *, strategy: str) -> None:
    """Replace the names of DDP in Lightning's advice by those of this `strategy`."""
    if exception.args and isinstance(exception.args[0], str):
        exception.args = (with_own_names(exception.args[0], strategy), *exception.args[1:])


def refuse_after_failure(engine: CommEngine | None) -> None:
    """Raise an engine's failure on CUDA, where the last step may have used gradients that are not averages."""
    if engine is not None and engine.device.type == "cuda":
        engine.raise_if_failed()


def log_where_it_stopped(trainer: pl.Trainer, exception: BaseException) -> None:
    """Report on rank zero the epoch and step at which a fit ended early, and the checkpoint to resume from."""
    is_sigterm = isinstance(exception, lightning_types(_SIGTERM))
    # After an error before the first step there is nothing to resume.
    is_stopped = is_sigterm or isinstance(exception, KeyboardInterrupt)
    is_under_way = trainer.state.fn == "fit" and (trainer.global_step > 0 or is_stopped)
    if not is_under_way or not trainer.is_global_zero:
        return
    newest = _newest_checkpoint(trainer)
    cure = (
        "no checkpoint was written to resume from. Use ModelCheckpoint(every_n_train_steps=...) to write them "
        "regularly, or the callback StopOnSignal() to write one when the run is stopped"
    )
    if newest is not None:
        cure = f"`fit(..., ckpt_path={newest!r})` resumes from the newest checkpoint"
    message = f"The run stopped in epoch {trainer.current_epoch} after step {trainer.global_step}; {cure}."
    if isinstance(exception, KeyboardInterrupt):  # Lightning shows no error
        rank_zero_info(message)
    elif not is_sigterm:
        exception.add_note(message)
    elif getattr(exception, "code", None) is None:  # otherwise `StopOnSignal` has logged it
        rank_zero_info(message)


def _newest_checkpoint(trainer: pl.Trainer) -> str | None:
    """Return the newest checkpoint on disk, or else the first one at a URL."""
    paths: list[str] = []
    for callback in trainer.checkpoint_callbacks:
        last_path = getattr(callback, "last_model_path", "")
        paths.append(last_path or getattr(callback, "best_model_path", ""))
    local_paths = [path for path in paths if os.path.isfile(path)]
    if local_paths:
        return max(local_paths, key=os.path.getmtime)
    for path in paths:
        if "://" in path:
            return path
    return None


def reason_of(exception: BaseException) -> str:
    """Return the reason for which a rank ends, for the other ranks."""
    if isinstance(exception, lightning_types(_SIGTERM)):
        return "it received SIGTERM"
    if isinstance(exception, KeyboardInterrupt):
        return "it was interrupted by Ctrl-C"
    error, _, line_of_user = summary_of(exception).partition("\n  ")
    if line_of_user:
        return f"{error} ({line_of_user})"
    return error
