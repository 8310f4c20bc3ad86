"""Watchdog that names the rank that blocks a pipeline, with its stage and micro-batch.

A wait in Gloo only ends together with its process group, so a stage would wait for a stopped rank
until the group's timeout. On a CPU a separate thread therefore waits, while the rank's main thread
checks whether any rank has reported an error:

    a rank is dead               its neighbors' messages fail at once; they name it, and all other ranks fail too
    a rank is stopped            it does not answer a query (comm/health/presence.py): named within about 15 s
    a rank hangs in user code    its watchdog answers: named with its activity after 0.9 of `timeout`
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import torch

from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.health.diagnosis import RankStatus
from lightning_hybrid.comm.health.thread_place import place_of
from lightning_hybrid.strategy.failures.setup_watchdog import SetupWatchdog

_POLL_S = 0.2
"""Seconds that the main thread waits between two checks for an error."""


class PipelineWatchdog(SetupWatchdog):
    """Watchdog that detects failed or hanging pipeline ranks, from setup to the end of a run.

    Collective: every rank must create it, in the same order.

    Args:
        timeout: Timeout of every message.
        device: Device of the tensors. On a GPU the device waits for messages, and a failure aborts
            its communicators.
    """

    gives_up_on_cpu = True

    def __init__(self, *, device: torch.device, timeout: timedelta | None = None) -> None:
        # Engine that averages over data-parallel ranks. A failure of the pipeline aborts it too.
        self.engine: CommEngine | None = None
        self._device = device
        self._activity: str | None = None  # None: outside of a schedule
        self._is_waiting = False
        self._wait_began_s: float | None = None
        self._error = ""
        self._waits = queue.SimpleQueue[_Wait | None]()
        self._thread: threading.Thread | None = None
        super().__init__(device=device, timeout=timeout)

    # ---- activity of this rank -----------------------------------------------------------------

    def note(self, activity: str, *, is_waiting: bool = False) -> None:
        """Record what this rank is doing in the pipeline schedule, for error messages.

        Args:
            activity: Description for the error message, with stage and micro-batch.
            is_waiting: Whether the rank waits for another stage instead of computing.
        """
        # The watchdog's thread reads both attributes. If it reads them between the two writes, only
        # the wording of an error suffers.
        self._activity = activity
        self._is_waiting = is_waiting

    @contextmanager
    def in_schedule(self) -> Iterator[None]:
        """Enter a context for code that is part of a pipeline schedule.

        If the code raises an error, the last activity stays recorded.
        """
        self.note("in a schedule", is_waiting=True)
        yield
        self._activity = None

    def status(self) -> RankStatus:
        """Return the activity of this rank, for the diagnosis of a failure."""
        if self._activity is None:
            return super().status()
        # In backward, a rank waits for averages over data-parallel ranks.
        is_inside = self._is_waiting or place_of(self._caller)[1]
        return RankStatus(num_submitted=0, order="", place=self._activity, is_inside=is_inside)

    def _where(self) -> str:
        return self._activity or super()._where()

    def stalled_s(self) -> float:
        """Return how long this rank has been waiting for another rank, in seconds."""
        wait_began_s = self._wait_began_s
        if wait_began_s is None:
            return super().stalled_s()
        return monotonic() - wait_began_s

    # ---- waiting -------------------------------------------------------------------------------

    def wait_for(self, wait: Callable[[], Any]) -> Any:
        """Call `wait`, which blocks until other ranks respond, and return its result.

        Raises:
            RuntimeError: Another rank failed. `wait` is then abandoned in its thread.
        """
        if self._device.type != "cpu":  # the device waits, on the stream of this thread
            return wait()
        if self._error:
            raise RuntimeError(self._error)
        if self._activity is not None and not self._is_waiting:
            # A schedule may wait long after it requested a message, until the receiver accepts this
            # rank's own message.
            self.note(f"waiting for messages, last {self._activity}", is_waiting=True)

        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_waits, name="pipeline-wait", daemon=True
            )
            self._thread.start()
        pending = _Wait(wait)
        self._wait_began_s = monotonic()
        self._waits.put(pending)
        with self.waiting():
            while not pending.is_done.wait(_POLL_S):
                if self._error:
                    raise RuntimeError(self._error)
        self._wait_began_s = None

        if pending.error is not None:
            raise pending.error
        return pending.result

    @property
    def is_stuck(self) -> bool:
        """True if a wait that was abandoned after a failure still blocks its thread."""
        return bool(self._error) and self._wait_began_s is not None

    @property
    def has_aborted(self) -> bool:
        """True if a failure has aborted the communicators of the device."""
        return bool(self._error) and self._device.type == "cuda"

    def _run_waits(self) -> None:
        while (wait := self._waits.get()) is not None:
            wait.run()

    def trip(self, error: str, cause: BaseException | None = None) -> None:
        """Interrupt this rank's waits and abort its all-reduces, with the given error."""
        self._error = self._error or error
        if self.engine is not None:
            self.engine.abort(error)
        super().trip(error, cause)

    def leave(self) -> None:
        """Stop the watchdog and its thread.

        The method may be called more than once.
        """
        self._waits.put(None)
        super().leave()


class _Wait:
    """Blocking call that runs in a separate thread, with its result or error."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = threading.Event()

    def run(self) -> None:
        try:
            self.result = self._wait()
        except BaseException as error:
            self.error = error
        self.is_done.set()


@contextmanager
def waits_of_schedules(watchdog: PipelineWatchdog) -> Iterator[None]:
    """Temporarily make torch's pipeline schedules wait by calling `watchdog.wait_for`."""
    from torch.distributed.pipelining import schedules  # imported here, as it takes a second

    wait_in_torch = schedules._wait_batch_p2p

    def wait(work: list[Any]) -> None:
        if work:
            watchdog.wait_for(lambda: wait_in_torch(work))

    schedules._wait_batch_p2p = wait
    try:
        yield
    finally:
        schedules._wait_batch_p2p = wait_in_torch
