"""Errors and signals on one rank: reported to all ranks, and explained where another rank is the cause.

    before there is an engine     a watchdog of its own names dead, stopped, hanging and failed ranks
    from then on                  the engine's does (`comm/health/watchdog.py`)

On CUDA the weights may have taken a step with gradients that are no averages: nothing is saved after a failure.
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
from lightning_hybrid.comm.health.watchdog import failed_wait, is_of_a_collective
from lightning_hybrid.comm.topology import host_identity
from lightning_hybrid.lightning_names import lightning_error, lightning_types
from lightning_hybrid.strategy.arguments import with_own_names
from lightning_hybrid.strategy.error_summary import RULE, shared_memory_cure, summary_of
from lightning_hybrid.strategy.setup_watchdog import SetupWatchdog

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Environment variable: what torch's watchdog does with an error of NCCL; torch reads it for each process group.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

# By default torch's watchdog ends a process without a word as soon as NCCL reports a lost peer, or after the time
# limit. Here it only aborts communicators, and the error that follows is reported and explained.
CLEAN_UP_ONLY = "2"

# Environment variable of NCCL: 1 has communicators that are in use at the same time take turns in the host's order,
# which is that of all ranks. A single one, as by default, needs no turns.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"

# Environment variable of torch: 1 has the few blocks of a sum go before the thousands of backward's that wait. It is
# set where sums go stage by stage, so that the backend's have the priority of our own streams.
HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"

_OF_NCCL = {ERROR_HANDLING: CLEAN_UP_ONLY}
_OF_SEVERAL_COMMUNICATORS = {LAUNCH_ORDER: "1", HIGH_PRIORITY: "1"}

_SIGNALS = "pytorch.trainer.connectors.signal_connector"
_SIGTERM = "pytorch.utilities.exceptions.SIGTERMException"


class SigtermOnAnyRank:
    """Handler of SIGTERM for one fit, in place of Lightning's: it notes the signal, and the next batch raises."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._was_asked = False
        # Lightning 2.6 asks rank zero before each batch whether it received a signal, and its handler calls the same
        # collective in the middle of what a rank does: a signal to a rank above zero leaves the ranks waiting in
        # different collectives for good. Here rank zero's signal is obeyed as Lightning does; another rank's by ending
        # its run, of which the others learn within seconds.
        installed = signal.getsignal(signal.SIGTERM)
        if isinstance(installed, lightning_types(f"{_SIGNALS}._HandlersCompose")):
            notifiers = [
                kind._sigterm_notifier_fn
                for kind in lightning_types(f"{_SIGNALS}._SignalConnector")
            ]
            installed.signal_handlers = [
                self._note if getattr(one, "__func__", None) in notifiers else one
                for one in installed.signal_handlers
            ]

    def _note(self, number: int, frame: FrameType | None) -> None:
        connector, launcher = self._trainer._signal_connector, self._trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(number)
        connector.received_sigterm = True

    def before_batch(self) -> None:
        """Check on a rank above zero whether it has to end on its own.

        Raises:
            SIGTERMException: the signal came before the last batch, and rank zero, asked since, has not received it.
        """
        # One batch later: Lightning asks rank zero before each batch, and a signal to all ranks is obeyed together.
        if self._was_asked:
            raise lightning_error(_SIGTERM)
        self._was_asked = self._trainer.received_sigterm and self._trainer.global_rank > 0


class FailureReports:
    """What a strategy knows of errors: it reports those of this rank to all, and names the rank that caused others.

    `engine`: watches from when it is made until it is closed; before that, and without one, `setup_watchdog` does.
    `module`: of the run; its trainer knows whether an error has ended it.
    """

    def __init__(self) -> None:
        self.engine: CommEngine | None = None
        self.setup_watchdog: SetupWatchdog | None = None
        self.module: pl.LightningModule | None = None
        self.ended_by: BaseException | None = None  # the run; until its end has been reported
        self.sigterm: SigtermOnAnyRank | None = None
        self._handled_before: BaseException | None = None  # by the caller, while it sets up
        self._has_set: tuple[str, ...] = ()

    @property
    def watchdog(self) -> CommEngine | SetupWatchdog | None:
        """What names lost ranks now."""
        return self.engine or self.setup_watchdog

    # ---- setup -----------------------------------------------------------------------------------------------------

    def begin(
        self, devices: Iterable[torch.device], *, has_several_communicators: bool = False
    ) -> None:
        """Note what the caller is handling, and set what torch and NCCL read when the process group is made.

        `has_several_communicators`: whether more than the default group's are in use at the same time.
        """
        self._handled_before = sys.exc_info()[1]
        variables: dict[str, str] = {}
        if any(device.type == "cuda" for device in devices):
            variables.update(_OF_NCCL)
            if has_several_communicators:
                variables.update(_OF_SEVERAL_COMMUNICATORS)
        # A value of the user's stays.
        self._has_set = tuple(name for name in variables if name not in os.environ)
        os.environ.update({name: variables[name] for name in self._has_set})

    def watch_setup(
        self, kind: type[SetupWatchdog], device: torch.device, timeout: timedelta | None
    ) -> None:
        """Name missing ranks from here on. Collective, where there are several."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.setup_watchdog = kind(device=device, timeout=timeout)

    def end_setup(self) -> None:
        """End the watchdog of the setup: the engine's names missing ranks from here on."""
        watchdog, self.setup_watchdog = self.setup_watchdog, None
        if watchdog is not None:
            watchdog.leave()

    # ---- an error --------------------------------------------------------------------------------------------------

    @property
    def ending_error(self) -> BaseException | None:
        """What ends this rank alone; a signal is obeyed by all ranks together, which may save then."""
        error = sys.exc_info()[1]
        return (
            None
            if error is self._handled_before or isinstance(error, lightning_types(_SIGTERM))
            else error
        )

    def is_failing(self) -> bool:
        """Return whether an error ends this rank: others do not come to collectives any more."""
        return self.ending_error is not None

    def refuse_to_save_alone(self, option: str, where: str) -> None:
        """Check that other ranks come to save with this one; `where` are the parts of what is saved.

        Raises:
            RuntimeError: an error ends this rank.
        """
        if (error := self.ending_error) is not None:
            self.is_alone()  # tells the others: Lightning ends at an error of a callback
            raise RuntimeError(
                f"{option} cannot save while {type(error).__name__} ends this rank: {where}, and the others do not "
                "come. Save regularly (`ModelCheckpoint(every_n_train_steps=...)`), without `save_on_exception`."
            )

    def is_alone(self) -> bool:
        """Return whether an error has ended the run on this rank; the others learn of it first."""
        # Callbacks hear of an error before the strategy, and may save (`save_on_exception`).
        trainer, error = getattr(self.module, "_trainer", None), self.ending_error
        if trainer is None or trainer.state.status != "interrupted" or error is None:
            return False
        if self.watchdog is not None and failed_wait(error) is None:
            self.watchdog.abort(reason_of(error))
        return True

    def report(self, exception: BaseException, *, rank: int, first_rank: int) -> None:
        """Report the error to the ranks that wait for this one; where another rank is the cause, say which.

        `first_rank`: of those that this process may have started, one of which the error may be of.
        """
        watchdog, wait = self.watchdog, failed_wait(exception)
        if watchdog is not None and is_of_a_collective(exception):
            # Of DDP or Lightning, such as the broadcast of buffers: it stays itself, with more words.
            exception.args = (watchdog.explain(exception),)
        elif watchdog is not None and wait not in (
            None,
            exception,
        ):  # torch's pipelining raises its own
            exception.add_note(watchdog.explain(wait))
        elif watchdog is not None:
            watchdog.abort(reason_of(exception))
            here = f"On rank {rank} (host {host_identity()[0]})"
            has_place = "comm: " in str(exception) or any(
                here in note for note in getattr(exception, "__notes__", ())
            )
            if not has_place:
                exception.add_note(f"{RULE}\n{here}: {summary_of(exception)}")
            # The error may be only a consequence, such as the device's own after its communicators were aborted.
            cause = "" if self.engine is None else self.engine.failure
            is_own = cause.startswith(f"comm: rank {rank} gave up:")
            if cause and not is_own and cause not in str(exception):
                exception.add_note(cause)
        elif (index := getattr(exception, "error_index", None)) is not None:
            started = f"On rank {first_rank + index} (host {host_identity()[0]})"
            exception.add_note(f"{RULE}\n{started}: {summary_of(exception)}")
        # Through autograd it comes with a stack of threads of ours below it, which says nothing to a user.
        said, has_stack, _ = str(exception).partition("\n\nAt:\n")
        if has_stack and "comm: " in said:
            exception.args = (said[said.index("comm: ") :],)
        if cure := shared_memory_cure(exception):
            exception.add_note(cure)

    # ---- end -------------------------------------------------------------------------------------------------------

    def end(self, module: pl.LightningModule | None) -> None:
        """Say where the run stopped, and take back what `begin` has set."""
        self.end_setup()
        ended_by, self.ended_by, self.sigterm = self.ended_by, None, None
        # Only now: a callback may have written a checkpoint after the error. Where ranks were to be spawned and that
        # failed, the module here never met its trainer.
        if ended_by is not None and module is not None and module._trainer is not None:
            say_where_it_stopped(module.trainer, ended_by)
        for name in self._has_set:
            os.environ.pop(name, None)
        self._has_set = ()


def use_own_names(exception: BaseException, *, strategy: str) -> None:
    """Replace the names of DDP in Lightning's advice by those of this `strategy`."""
    if exception.args and isinstance(exception.args[0], str):
        exception.args = (with_own_names(exception.args[0], strategy), *exception.args[1:])


def refuse_after_failure(engine: CommEngine | None) -> None:
    """Raise an engine's failure on CUDA, where the last step may have used sums that are no averages."""
    if engine is not None and engine.device.type == "cuda":
        engine.raise_if_failed()


def say_where_it_stopped(trainer: pl.Trainer, exception: BaseException) -> None:
    """Report on rank zero the epoch and step at which a fit ended early, and what it can go on from."""
    # Not of an error before the first step: there is nothing to go on from.
    is_stopped = isinstance(exception, (KeyboardInterrupt, *lightning_types(_SIGTERM)))
    is_under_way = trainer.state.fn == "fit" and (trainer.global_step > 0 or is_stopped)
    if not is_under_way or not trainer.is_global_zero:
        return
    paths = [
        getattr(one, "last_model_path", "") or getattr(one, "best_model_path", "")
        for one in trainer.checkpoint_callbacks
    ]
    local = [path for path in paths if os.path.isfile(path)]
    remote = [path for path in paths if "://" in path]
    newest = max(local, key=os.path.getmtime) if local else next(iter(remote), None)
    cure = (
        f"`fit(..., ckpt_path={newest!r})` goes on from the newest checkpoint"
        if newest is not None
        else "no checkpoint was written to go on from: ModelCheckpoint(every_n_train_steps=...) writes them, and the "
        "callback StopOnSignal() one when the run is stopped"
    )
    where = f"The run stopped in epoch {trainer.current_epoch} after step {trainer.global_step}; {cure}."
    if isinstance(exception, KeyboardInterrupt):  # Lightning shows no error
        rank_zero_info(where)
    elif not isinstance(exception, lightning_types(_SIGTERM)):
        exception.add_note(where)
    elif exception.code is None:  # else `StopOnSignal` has said it
        rank_zero_info(where)


def reason_of(exception: BaseException) -> str:
    """Return why a rank ends, for the others."""
    if isinstance(exception, lightning_types(_SIGTERM)):
        return "it received SIGTERM"
    if isinstance(exception, KeyboardInterrupt):
        return "it was interrupted by Ctrl-C"
    first, _, where = summary_of(exception).partition("\n  ")
    return f"{first} ({where})" if where else first
