"""The watchdog of a pipeline: it names the rank that others wait for, with its stage and micro-batch.

A wait of Gloo's ends with its group alone, and a stage would wait for a stopped one until the group's timeout. So on a
CPU a thread waits, and the rank's main thread looks for the error of all ranks meanwhile:

    a rank is dead               its neighbours' messages fail at once; they name it, and all others fail with them
    a rank is stopped            it leaves a question unanswered (comm/health/presence.py): named within 15 s or so
    a rank hangs in user code    its watchdog answers: named with its place after 0.9 of `timeout`
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
from lightning_hybrid.strategy.setup_watchdog import SetupWatchdog

# How long the main thread waits before it looks for an error again.
_LOOK_S = 0.2


class PipelineWatchdog(SetupWatchdog):
    """Watchdog of all ranks of all pipelines, from setup to the end of a run. Collective.

    Args:
        timeout: of every message.
        device: where tensors are; on a GPU waiting is the device's, and a failure aborts its communicators.
    """

    gives_up_on_cpu = True

    def __init__(self, *, device: torch.device, timeout: timedelta | None = None) -> None:
        self.engine: CommEngine | None = (
            None  # of the data ranks, which a failure of the pipeline ends as well
        )
        self._device = device
        self._place: str | None = None  # None: in no schedule
        self._is_waiting = False
        self._began_s: float | None = None
        self._error = ""
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        super().__init__(device=device, timeout=timeout)

    # ---- where this rank is ------------------------------------------------------------------------------------------

    def note(self, place: str, *, is_waiting: bool = False) -> None:
        """Note where this rank is in its schedule: computing, or waiting for another stage."""
        # Two attributes, read by the watchdog's thread: a mixture of two moments would only word an error less well.
        self._place = place
        self._is_waiting = is_waiting

    @contextmanager
    def in_schedule(self) -> Iterator[None]:
        """Mark a schedule; after an error inside, the place stays as it was."""
        self.note("in a schedule", is_waiting=True)
        yield
        self._place = None

    def status(self) -> RankStatus:
        """Return where this rank stands, for the diagnosis of a failure."""
        if self._place is None:
            return super().status()
        is_inside = (
            self._is_waiting or place_of(self._caller)[1]
        )  # in backward, it waits for averages over data ranks
        return RankStatus(num_submitted=0, order="", place=self._place, is_inside=is_inside)

    def _where(self) -> str:
        return self._place or super()._where()

    def stalled_s(self) -> float:
        """Return how long this rank has waited for another."""
        began_s = self._began_s
        return super().stalled_s() if began_s is None else monotonic() - began_s

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def wait_for(self, wait: Callable[[], Any]) -> Any:
        """Return what `wait` returns, which waits for other ranks; raise the error of all ranks if there is one first.

        Raises:
            RuntimeError: another rank has failed. `wait` is then left where it is.
        """
        if self._device.type != "cpu":  # the device waits, on the stream of this thread
            return wait()
        if self._error:
            raise RuntimeError(self._error)
        if self._place is not None and not self._is_waiting:
            # A schedule may wait long after it asked for a message, and for its own to be taken.
            self.note(f"waiting for messages, last {self._place}", is_waiting=True)
        found: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.append(wait())
            except BaseException as error:
                errors.append(error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="pipeline-wait", daemon=True)
            self._thread.start()
        done = threading.Event()
        self._began_s = monotonic()
        self._jobs.put((run, done))
        with self.waiting():
            while not done.wait(_LOOK_S):
                if self._error:
                    raise RuntimeError(self._error)
        self._began_s = None
        if errors:
            raise errors[0]
        return found[0]

    @property
    def is_stuck(self) -> bool:
        """Whether a wait was left, which still uses its process group."""
        return bool(self._error) and self._began_s is not None

    @property
    def has_aborted(self) -> bool:
        """Whether a failure has aborted the communicators of the device."""
        return bool(self._error) and self._device.type == "cuda"

    def _serve(self) -> None:
        for job in iter(self._jobs.get, None):
            run, done = job
            run()
            done.set()

    def trip(self, error: str, cause: BaseException | None = None) -> None:
        """End the waits of this rank with the error of all ranks."""
        self._error = self._error or error
        if self.engine is not None:
            self.engine.abort(error)
        super().trip(error, cause)

    def leave(self) -> None:
        """End; may be called again."""
        self._jobs.put(None)
        super().leave()


@contextmanager
def waits_of_schedules(watchdog: PipelineWatchdog) -> Iterator[None]:
    """Let torch's schedules wait for their messages by `watchdog.wait_for`."""
    from torch.distributed.pipelining import schedules  # here: it takes a second

    before = schedules._wait_batch_p2p

    def wait(work: list[Any]) -> None:
        if work:
            watchdog.wait_for(lambda: before(work))

    schedules._wait_batch_p2p = wait
    try:
        yield
    finally:
        schedules._wait_batch_p2p = before
