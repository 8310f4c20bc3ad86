"""A run that is stopped by SIGTERM on any rank, by Ctrl-C or by an error: where it stopped, and how to go on.

Lightning 2.6 asks rank zero before each batch whether it received a signal, and its signal handler calls the same
collective, in the middle of what a rank does: a signal to a rank above zero leaves the ranks waiting in different
collectives for good. Here the handler only notes the signal. Rank zero's is obeyed as Lightning does; another rank's by
ending its run, of which the others learn within seconds.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose, _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException


class SigtermOnAnyRank:
    """Handler of SIGTERM for one fit, in place of Lightning's: it notes the signal, and the next batch raises.

    Args:
        trainer: whose handler is installed, if it is.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._was_asked = False
        installed = signal.getsignal(signal.SIGTERM)
        if isinstance(installed, _HandlersCompose):
            installed.signal_handlers = [
                self._note if getattr(one, "__func__", None) is _SignalConnector._sigterm_notifier_fn else one
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
            raise SIGTERMException
        self._was_asked = self._trainer.received_sigterm and self._trainer.global_rank > 0


def say_where_it_stopped(trainer: pl.Trainer, exception: BaseException) -> None:
    """Report on rank zero the epoch and step at which a fit ended early, and what it can go on from.

    An error before the first step is not reported: there is nothing to go on from.
    """
    is_stopped = isinstance(exception, KeyboardInterrupt | SIGTERMException)
    is_under_way = trainer.state.fn == TrainerFn.FITTING and (trainer.global_step > 0 or is_stopped)
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
    elif not isinstance(exception, SIGTERMException):
        exception.add_note(where)
    elif exception.code is None:  # else `StopOnSignal` has said it
        rank_zero_info(where)


def reason_of(exception: BaseException) -> str:
    """Return why a rank ends, for the others."""
    if isinstance(exception, SIGTERMException):
        return "it received SIGTERM"
    if isinstance(exception, KeyboardInterrupt):
        return "it was interrupted by Ctrl-C"
    return f"{type(exception).__name__}: {exception}"
