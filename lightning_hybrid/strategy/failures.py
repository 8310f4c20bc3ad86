"""Errors of training that concern other ranks: told to them, and explained where another rank is the cause.

    before the engine is there    a watch of its own answers the roll: dead, stopped, hanging and failed ranks are named
    from then on                  the engine's watch does (comm/watch.py)

On CUDA torch's own watchdog would end a process without a word as soon as NCCL reports a lost peer, or after the time
limit; here it only aborts communicators (``CLEAN_UP_ONLY``), and the error that follows is told and explained. Weights
may by then have taken a step with gradients that are no averages: nothing is saved after a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.health import tcp_info
from lightning_hybrid.comm.health.diagnosis import RankStatus
from lightning_hybrid.comm.health.watchdog import Watchdog, is_of_a_collective, private_store, short
from lightning_hybrid.comm.topology import host_identity
from lightning_hybrid.precision.dtype_errors import add_cure
from lightning_hybrid.strategy.arguments import in_our_words
from lightning_hybrid.strategy.interruption import SigtermOnAnyRank, in_words, say_where_it_stopped

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""What torch's watchdog does with an error of NCCL's; read whenever a process group is made."""

CLEAN_UP_ONLY = "2"

INSIDE = "in a collective of Lightning's or torch's"
OUTSIDE = "in no collective: in a hook of the module, the data or a callback"


class SetupWatchdog:
    """Names the rank that keeps others waiting before there is an engine, or where there will be none.

    Collective: every rank of WORLD must make one. Ends with ``leave``. A collective that waits meanwhile fails when the
    backend says so; only then can be told who is the cause.
    """

    def __init__(self) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._num_inside = 0
        told: list[tuple[str, list[str]]] = [("", [])] * self._world_size
        dist.all_gather_object(told, (host_identity()[0], tcp_info.own_addresses()))
        count = private_store("lightning_hybrid/setups").add(str(self._rank), 1)  # a process may fit more than once
        self._watch = Watchdog(
            store=private_store(f"lightning_hybrid/setup/{count}"),
            rank=self._rank,
            world_size=self._world_size,
            watched=self,
            hosts=[host for host, _ in told],
            addresses=[addresses for _, addresses in told],
        )
        self._watch.start()

    def status(self) -> RankStatus:
        """Return where this rank stands, for the diagnosis of a failure."""
        is_inside = self._num_inside > 0
        return RankStatus(num_submitted=0, order="", place=INSIDE if is_inside else OUTSIDE, is_inside=is_inside)

    def stalled_s(self) -> float:
        """Return 0: no bucket is in flight."""
        return 0.0

    def trip(self, error: str, cause: BaseException | None = None) -> None:
        """Do nothing: the backend's wait cannot be called off."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what no rank leaves before all have come. Who fails there has waited there."""
        self._num_inside += 1
        yield
        self._num_inside -= 1

    def explain(self, error: BaseException) -> str:
        """Who is the cause of a collective that failed here, then ``error``; the same words on every rank."""
        noticed = f"rank {self._rank} failed in a collective that averages no gradients: {short(error)}"
        return f"{self._watch.collect_status(noticed)} Seen here as {type(error).__name__}: {error}"

    def abort(self, reason: str) -> None:
        """Let the other ranks know why this one ends."""
        self._watch.raise_alarm(f"comm: rank {self._rank} gave up: {reason}")

    def leave(self) -> None:
        """May be called again."""
        self._watch.leave()


class FailureReportMixin(DDPStrategy):
    """Of a strategy: what it does with an error, whoever's it is."""

    _engine: CommEngine | None = None
    _setup_watch: SetupWatchdog | None = None
    _sigterm: SigtermOnAnyRank | None = None
    _ended_by: BaseException | None = None
    _has_set_error_handling = False

    def setup_environment(self) -> None:
        """As DDP; from here on a rank that is missed is named."""
        on_cuda = any(device.type == "cuda" for device in self.parallel_devices or ())
        if on_cuda and ERROR_HANDLING not in os.environ:
            os.environ[ERROR_HANDLING], self._has_set_error_handling = CLEAN_UP_ONLY, True
        super().setup_environment()
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._setup_watch = SetupWatchdog()

    def setup(self, trainer: Any) -> None:
        """As DDP, in which ranks wait for each other."""
        with self._waiting():
            super().setup(trainer)
        if self._engine is not None:
            self._end_setup_watch()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As DDP."""
        with self._waiting():
            super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """As DDP."""
        with self._waiting():
            return super().broadcast(*args, **kwargs)

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._setup_watch is None else self._setup_watch.waiting()

    def on_exception(self, exception: BaseException) -> None:
        """As DDP, telling ranks that wait for this one, and with our own name in the advice on unused parameters.

        Where the error is a collective's of DDP or Lightning, such as the broadcast of buffers, another rank is the
        cause, and the error says which: it is this error, with more words.
        """
        watch = self._engine or self._setup_watch
        if watch is not None and is_of_a_collective(exception):
            exception.args = (watch.explain(exception),)
        elif watch is not None:
            watch.abort(in_words(exception))
            here = f"On rank {self.global_rank} (host {host_identity()[0]})"
            has_place = "comm: " in str(exception) or any(here in note for note in getattr(exception, "__notes__", ()))
            if not has_place:
                exception.add_note(f"{here}.")
            told = "" if self._engine is None else self._engine.failure
            if told and told not in str(exception):  # the device's, say, after its communicators were aborted
                exception.add_note(told)
        super().on_exception(exception)
        if exception.args and isinstance(exception.args[0], str):
            exception.args = (in_our_words(exception.args[0], type(self).__name__), *exception.args[1:])
        if self.lightning_module is not None:
            add_cure(exception, self.precision_plugin.precision)
            self._ended_by = exception

    def on_train_start(self) -> None:
        """As DDP; SIGTERM to any rank is obeyed from here on."""
        super().on_train_start()
        assert self.lightning_module is not None
        self._sigterm = SigtermOnAnyRank(self.lightning_module.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """As DDP; a rank that was told to stop does."""
        super().on_train_batch_start(batch, batch_idx)
        if self._sigterm is not None:
            self._sigterm.before_batch()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As DDP; raises after a failure on CUDA, where the weights of the last step are not to be used."""
        if self._engine is not None and self._engine.device.type == "cuda":
            self._engine.raise_if_failed()
        super().save_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        """As DDP."""
        self._end_setup_watch()
        ended_by, self._ended_by, self._sigterm = self._ended_by, None, None
        if ended_by is not None:  # callbacks have had their say: one may have written a checkpoint
            assert self.lightning_module is not None
            say_where_it_stopped(self.lightning_module.trainer, ended_by)
        if self._has_set_error_handling:
            os.environ.pop(ERROR_HANDLING, None)
            self._has_set_error_handling = False
        super().teardown()

    def _end_setup_watch(self) -> None:
        watch, self._setup_watch = self._setup_watch, None
        if watch is not None:
            watch.leave()
