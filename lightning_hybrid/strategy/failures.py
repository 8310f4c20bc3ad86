"""Errors and signals on one rank: reported to all ranks, and explained where another rank is the cause.

    before there is an engine     a watchdog of its own names dead, stopped, hanging and failed ranks
    from then on                  the engine's does (`comm/health/watchdog.py`)

On CUDA the weights may have taken a step with gradients that are no averages: nothing is saved after a failure.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.engine.engine import GIVE_UP_AT
from lightning_hybrid.comm.health import tcp_info
from lightning_hybrid.comm.health.abort import ABORT_LIMIT_S, abort_all
from lightning_hybrid.comm.health.device_waits import DeviceWaits
from lightning_hybrid.comm.health.diagnosis import RankStatus
from lightning_hybrid.comm.health.thread_place import place_of, place_of_error
from lightning_hybrid.comm.health.watchdog import Watchdog, failed_wait, is_of_a_collective, private_store, short
from lightning_hybrid.comm.topology import host_identity
from lightning_hybrid.lightning_names import lightning_error, lightning_types
from lightning_hybrid.strategy.arguments import with_own_names
from lightning_hybrid.strategy.error_summary import RULE, shared_memory_cure, summary_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Environment variable: what torch's watchdog does with an error of NCCL; torch reads it for each process group.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

# By default torch's watchdog ends a process without a word as soon as NCCL reports a lost peer, or after the time
# limit. Here it only aborts communicators, and the error that follows is reported and explained.
CLEAN_UP_ONLY = "2"

# Environment variable of NCCL: 1 has communicators that are in use at the same time take turns in the host's order,
# which is that of all ranks. Nothing changes for a single one.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"

# Environment variable of torch: 1 has the few blocks of a sum go before the thousands of backward's that wait.
HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"

_OF_NCCL = {ERROR_HANDLING: CLEAN_UP_ONLY, LAUNCH_ORDER: "1", HIGH_PRIORITY: "1"}

INSIDE, OUTSIDE = "in a collective of Lightning's or torch's", "in no collective"

_SIGNALS = "pytorch.trainer.connectors.signal_connector"
_SIGTERM = "pytorch.utilities.exceptions.SIGTERMException"


class SetupWatchdog:
    """Watchdog that names the rank others wait for, before there is an engine or where there is none. Collective.

    `give_up_after_s`: after which a wait is a failure; None: when the backend says so. `device`: where tensors are;
    on a GPU waiting is the device's, and a failure aborts its communicators.
    """

    # A collective that waits meanwhile fails when the backend says so; only then can the cause be named.

    def __init__(self, *, device: torch.device, give_up_after_s: float | None = None) -> None:
        self._device_waits = DeviceWaits(device) if device.type == "cuda" else None
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._num_inside, self._waited, self._caller = 0, "", threading.get_ident()
        places: list[tuple[str, list[str]]] = [("", [])] * self._world_size
        dist.all_gather_object(places, (host_identity()[0], tcp_info.own_addresses()))
        # A process may fit more than once: each setup has a store of its own.
        count = private_store("lightning_hybrid/setups").add(str(self._rank), 1)
        self._watchdog = Watchdog(
            store=private_store(f"lightning_hybrid/setup/{count}"),
            rank=self._rank,
            world_size=self._world_size,
            watched=self,
            hosts=[host for host, _ in places],
            addresses=[addresses for _, addresses in places],
            give_up_after_s=give_up_after_s,
        )
        self._watchdog.start()

    def __deepcopy__(self, memo: dict[int, Any]) -> SetupWatchdog:
        return self  # its thread is there once, also where user code copies the trainer

    def status(self) -> RankStatus:
        """Return where this rank stands, for the diagnosis of a failure."""
        place, is_inside = place_of(self._caller)
        is_inside = is_inside or self._num_inside > 0 or bool(self._waited)
        place = f"{INSIDE if is_inside else OUTSIDE}, {self._waited or place}"
        return RankStatus(num_submitted=0, order="", place=place, is_inside=is_inside)

    def stalled_s(self) -> float:
        """Return how long the device has been at one thing; 0 on a CPU, where no bucket is in flight."""
        return 0.0 if self._device_waits is None else self._device_waits.stalled_s()

    def trip(self, error: str, cause: BaseException | None = None) -> None:
        """End the waits of a GPU; Gloo's cannot be called off."""
        if self._device_waits is not None:
            abort_all(limit_s=ABORT_LIMIT_S)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark what no rank leaves before all have come: a rank that fails inside has waited for others."""
        self._num_inside += 1
        yield  # no `finally`: after an error inside, the rank still counts as one that waited
        self._num_inside -= 1

    def explain(self, error: BaseException) -> str:
        """Name the cause of a collective that failed here, then `error`; in the same words on every rank."""
        self._waited = place_of_error(error)
        noticed = f"rank {self._rank} failed {self._where()}: {short(error)}"
        return f"{self._watchdog.collect_status(noticed)} Seen here as {type(error).__name__}: {error}"

    def _where(self) -> str:
        return "in a collective that averages no gradients"

    def abort(self, reason: str) -> None:
        """Let the other ranks know why this one ends."""
        self._watchdog.raise_alarm(f"comm: rank {self._rank} gave up: {reason}")

    def leave(self) -> None:
        """End; may be called again."""
        self._watchdog.leave()


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
            notifiers = [kind._sigterm_notifier_fn for kind in lightning_types(f"{_SIGNALS}._SignalConnector")]
            installed.signal_handlers = [
                self._note if getattr(one, "__func__", None) in notifiers else one for one in installed.signal_handlers
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


class FailureReportMixin:
    """Strategy mixin: report an error on one rank to all ranks, and name the rank that caused it."""

    # It derives from nothing: `super()` is the strategy that stands after it in the class line, `DDPStrategy`.

    _engine: CommEngine | None = None
    _setup_watchdog: SetupWatchdog | None = None
    _sigterm: SigtermOnAnyRank | None = None
    _ended_by: BaseException | None = None
    _has_set: tuple[str, ...] = ()
    _handled_before: BaseException | None = None  # that the caller is handling, while it sets up
    parallel_devices: Any
    precision_plugin: Any
    lightning_module: Any
    global_rank: int
    node_rank: int
    num_processes: int
    root_device: torch.device
    _timeout: timedelta | None

    def setup_environment(self) -> None:
        """Set up as DDP; from here on a missing rank is named."""
        self._handled_before = sys.exc_info()[1]
        on_cuda = any(device.type == "cuda" for device in self.parallel_devices or ())
        # Before the process group is made, when torch reads it; a value of the user's stays.
        self._has_set = tuple(name for name in _OF_NCCL if on_cuda and name not in os.environ)
        os.environ.update({name: _OF_NCCL[name] for name in self._has_set})
        super().setup_environment()  # type: ignore[misc]
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._setup_watchdog = self._new_watchdog()

    def _new_watchdog(self) -> SetupWatchdog:
        # Over Gloo a collective that waits for long fails by itself.
        limit = self._timeout if self.root_device.type == "cuda" else None
        return SetupWatchdog(
            device=self.root_device, give_up_after_s=None if limit is None else GIVE_UP_AT * limit.total_seconds()
        )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait as DDP; not on a rank that an error ends, as others do not come."""
        if not self._is_alone():
            super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Broadcast as DDP; a rank that an error ends gets what it gives."""
        return obj if self._is_alone() else super().broadcast(obj, *args, **kwargs)  # type: ignore[misc]

    @property
    def _ending_error(self) -> BaseException | None:
        # What ends this rank alone. A signal is obeyed by all ranks together: `StopOnSignal` then saves on all of them.
        error = sys.exc_info()[1]
        return None if error is self._handled_before or isinstance(error, lightning_types(_SIGTERM)) else error

    def _refuse_to_save_alone(self, option: str, where: str) -> None:
        if (error := self._ending_error) is not None:
            self._is_alone()  # tells the others: Lightning ends at an error of a callback
            raise RuntimeError(
                f"{option} cannot save while {type(error).__name__} ends this rank: {where}, and the others do not "
                "come. Save regularly (`ModelCheckpoint(every_n_train_steps=...)`), without `save_on_exception`."
            )

    def _is_alone(self) -> bool:
        # Callbacks hear of an error before the strategy, and may save (`save_on_exception`): others learn of it first.
        trainer, error = getattr(getattr(self, "lightning_module", None), "_trainer", None), self._ending_error
        if trainer is None or trainer.state.status != "interrupted" or error is None:
            return False
        watchdog = self._engine or self._setup_watchdog
        if watchdog is not None and failed_wait(error) is None:
            watchdog.abort(reason_of(error))
        return True

    def _end_setup_watchdog(self) -> None:
        watchdog, self._setup_watchdog = self._setup_watchdog, None
        if watchdog is not None:
            watchdog.leave()

    def on_exception(self, exception: BaseException) -> None:
        """Report the error to the ranks that wait for this one; where another rank is the cause, say which."""
        watchdog, wait = self._engine or self._setup_watchdog, failed_wait(exception)
        if watchdog is not None and is_of_a_collective(exception):
            # Of DDP or Lightning, such as the broadcast of buffers: it stays itself, with more words.
            exception.args = (watchdog.explain(exception),)
        elif watchdog is not None and wait not in (None, exception):  # torch's pipelining raises its own
            exception.add_note(watchdog.explain(wait))
        elif watchdog is not None:
            watchdog.abort(reason_of(exception))
            here = f"On rank {self.global_rank} (host {host_identity()[0]})"
            has_place = "comm: " in str(exception) or any(here in note for note in getattr(exception, "__notes__", ()))
            if not has_place:
                exception.add_note(f"{RULE}\n{here}: {summary_of(exception)}")
            # The error may be only a consequence, such as the device's own after its communicators were aborted.
            cause = "" if self._engine is None else self._engine.failure
            is_own = cause.startswith(f"comm: rank {self.global_rank} gave up:")
            if cause and not is_own and cause not in str(exception):
                exception.add_note(cause)
        elif (index := getattr(exception, "error_index", None)) is not None:  # of a rank that this process has started
            rank = self.node_rank * self.num_processes + index
            exception.add_note(f"{RULE}\nOn rank {rank} (host {host_identity()[0]}): {summary_of(exception)}")
        # Through autograd it comes with a stack of threads of ours below it, which says nothing to a user.
        said, has_stack, _ = str(exception).partition("\n\nAt:\n")
        if has_stack and "comm: " in said:
            exception.args = (said[said.index("comm: ") :],)
        if cure := shared_memory_cure(exception):
            exception.add_note(cure)
        super().on_exception(exception)  # type: ignore[misc]
        # DDPStrategy has added its advice on unused parameters, in which it names itself.
        if exception.args and isinstance(exception.args[0], str):
            exception.args = (with_own_names(exception.args[0], type(self).__name__), *exception.args[1:])
        if self.lightning_module is not None:
            from lightning_hybrid.precision.dtype_errors import add_cure  # here: only an error needs it

            add_cure(exception, self.precision_plugin.precision)
            self._ended_by = exception

    def on_train_start(self) -> None:
        """Start as DDP; a SIGTERM to any rank is obeyed from here on."""
        super().on_train_start()  # type: ignore[misc]
        self._sigterm = SigtermOnAnyRank(self.lightning_module.trainer)

    def _obey_sigterm(self) -> None:
        if self._sigterm is not None:
            self._sigterm.before_batch()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as DDP; raise after a failure on CUDA, where the last step may have used sums that are no averages."""
        if self._engine is not None and self._engine.device.type == "cuda":
            self._engine.raise_if_failed()
        super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _end_failure_reports(self) -> None:
        self._end_setup_watchdog()
        ended_by, self._ended_by, self._sigterm = self._ended_by, None, None
        # Only now: a callback may have written a checkpoint after the error. Where ranks were to be spawned and that
        # failed, the module here never met its trainer.
        if ended_by is not None and self.lightning_module._trainer is not None:
            say_where_it_stopped(self.lightning_module.trainer, ended_by)
        for name in self._has_set:
            os.environ.pop(name, None)
        self._has_set = ()


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
