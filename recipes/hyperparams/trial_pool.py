"""Pool of processes that import everything once and then take one trial after the other."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from recipes.hyperparams.trial_log import TrialOutcome

Limits = tuple[tuple[float, float], ...]
"""`(fraction of the run, worst objective there)`: a trial that is worse is stopped."""


class Runner(Protocol):
    """Callable that runs one trial; it travels to other processes, so it must be picklable."""

    def __call__(self, overrides: tuple[str, ...], limits: Limits) -> TrialOutcome:
        """Run the trial with these overrides."""


def run_safely(runner: Runner, overrides: tuple[str, ...], limits: Limits) -> TrialOutcome:
    """Return the runner's outcome; an error of the trial is an outcome too, and ends nothing else."""
    began_s = time.perf_counter()
    try:
        outcome = runner(overrides, limits)
    except Exception as error:  # not SystemExit: Lightning turns SIGTERM and Ctrl-C into one
        text = " ".join(str(error).split()) or "no message"
        outcome = TrialOutcome(overrides=overrides, status="failed", reason=f"{type(error).__name__}: {text[:300]}")
    return replace(outcome, wall_s=round(time.perf_counter() - began_s, 3))


def _serve(connection: Connection, runner: Runner) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business: it closes the connection
    while True:
        try:
            overrides, limits = connection.recv()
        except EOFError:  # the parent has ended
            return
        # An error travels as an outcome: the worker lives on, and what it has imported serves the next trial.
        connection.send(run_safely(runner, overrides, limits))


class _Worker:
    def __init__(self, runner: Runner) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads in an unknown state
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, runner))  # a daemon could have no ranks
        self.process.start()
        # Only the child holds its end: `recv` then raises EOFError when the child dies, instead of blocking.
        theirs.close()
        self.overrides: tuple[str, ...] | None = None

    def start(self, overrides: tuple[str, ...], limits: Limits) -> None:
        self.overrides = overrides
        self.connection.send((overrides, limits))

    def result(self) -> TrialOutcome:
        """Return what came; a process that died is a failed trial."""
        assert self.overrides is not None
        try:
            outcome: TrialOutcome = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            reason = f"its process ended with exit code {self.process.exitcode}"
            return TrialOutcome(overrides=self.overrides, status="failed", reason=reason)
        self.overrides = None
        return outcome

    def stop(self) -> None:
        self.connection.close()
        # A worker between trials ends by itself at EOF; one within a trial would train on, and is killed.
        self.process.join(timeout=0 if self.overrides else 5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class TrialPool:
    """Pool of at most `num_workers` trials at a time; as a context manager it ends its processes.

    Args:
        runner: Runs one trial.
        num_workers: Processes; 0 = in this process, one after the other.
        budget_s: No trial is started later than this after the pool was made; None = no limit.

    Raises:
        ValueError: A negative number.
    """

    def __init__(self, runner: Runner, *, num_workers: int, budget_s: float | None = None) -> None:
        if num_workers < 0:
            raise ValueError(f"`num_workers` (={num_workers}) must be 0 or more: 0 runs trials in this process.")
        self.runner = runner
        self.num_workers = num_workers
        self.deadline_s = None if budget_s is None else time.monotonic() + budget_s
        self._workers: list[_Worker] = []

    def __enter__(self) -> TrialPool:
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def is_out_of_time(self) -> bool:
        """Return whether no further trial may start."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def run(self, trials: Iterable[Sequence[str]], limits_now: Callable[[], Limits] = tuple) -> Iterator[TrialOutcome]:
        """Yield outcomes as they come.

        Args:
            trials: The overrides of each; taken from the front.
            limits_now: Asked when a trial starts, so that it is judged by those that ended before.
        """
        waiting = deque(tuple(overrides) for overrides in trials)
        if self.num_workers == 0:
            while waiting and not self.is_out_of_time():
                yield run_safely(self.runner, waiting.popleft(), limits_now())
            return
        while True:
            self._start_some(waiting, limits_now)
            busy = {worker.connection: worker for worker in self._workers if worker.overrides is not None}
            if not busy:
                return
            for ready in wait(list(busy)):
                worker = busy[ready]  # type: ignore[index]
                outcome = worker.result()
                if worker.overrides is not None:  # it died
                    worker.overrides = None
                    self._workers.remove(worker)
                    worker.connection.close()
                yield outcome

    def _start_some(self, waiting: deque[tuple[str, ...]], limits_now: Callable[[], Limits]) -> None:
        for place in range(self.num_workers):
            if not waiting or self.is_out_of_time():
                return
            # Processes start only when there is a trial for them: a search of two trials starts two.
            if place == len(self._workers):
                self._workers.append(_Worker(self.runner))
            if self._workers[place].overrides is None:
                self._workers[place].start(waiting.popleft(), limits_now())
