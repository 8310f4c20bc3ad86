"""Runner that executes the trials of a hyper-parameter search in parallel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, Trial

from recipes.hyperparams.axes import overrides_of
from recipes.hyperparams.outcome import Outcome
from recipes.hyperparams.processes import Report, RunTrial, TrialProcesses
from recipes.hyperparams.search import Search

POLL_S = 1.0
"""Seconds between two checks for trials of other searches in the same directory (our choice)."""


@dataclass(frozen=True)
class RunningTrial:
    """Trial that is currently running, with its processes."""

    trial: Trial
    processes: TrialProcesses

    def handle_messages(self, ready: Sequence[Any]) -> Outcome | None:
        """Handle messages from the processes of the trial, and return its outcome if it has arrived.

        `ready` contains the connections with messages. A report is answered with the decision of the pruner.
        """
        for connection in list(self.processes.connections):
            if connection not in ready:
                continue
            message = self.processes.receive(connection)
            if isinstance(message, Outcome):
                return message
            if isinstance(message, Report):
                self.trial.report(message.value, step=message.percent)
                # a process that died in the meantime is noticed when the connection is read
                with suppress(OSError):
                    connection.send(self.trial.should_prune())
        return None


class TrialRunner:
    """Runner that executes the trials of a search, several in parallel.

    Args:
        search: Search that the trials belong to.
        run_trial: Function that runs one trial.
        num_workers: Number of trials that run in parallel.
        num_ranks: Number of processes per trial.
        budget_s: Time in seconds after which no trial starts. None sets no limit.
        log_dir: Directory for the output of all trials except the first. None leaves it on the terminal.
        on_end: Function called with each trial once its outcome is in the study.
    """

    def __init__(
        self,
        search: Search,
        run_trial: RunTrial,
        *,
        num_workers: int = 1,
        num_ranks: int = 1,
        budget_s: float | None = None,
        log_dir: Path | None = None,
        on_end: Callable[[FrozenTrial], None] | None = None,
    ) -> None:
        self.search = search
        self.run_trial = run_trial
        self.num_workers = num_workers
        self.num_ranks = num_ranks
        self.budget_s = math.inf if budget_s is None else budget_s
        self.log_dir = log_dir
        self.on_end = on_end
        self._deadline_s = math.inf
        self._running: list[RunningTrial] = []

    def run(self) -> None:
        """Run trials until the search is complete or its time budget is used up."""
        self._deadline_s = time.monotonic() + self.budget_s
        try:
            while True:
                self._start_trials()
                if not self._running and not self._must_wait():
                    return
                self._handle_messages()
        finally:
            # Trials are left here only after an error or Ctrl-C. They run again when the search resumes.
            for running in self._running:
                running.processes.kill()

    def _start_trials(self) -> None:
        while len(self._running) < self.num_workers and not self._is_out_of_time():
            trial = self.search.start_trial()
            if trial is None:
                return
            log = None
            if self.log_dir is not None and trial.number > 0:
                self.log_dir.mkdir(parents=True, exist_ok=True)
                log = self.log_dir / f"{trial.number}.log"
            overrides = overrides_of(trial.params)
            processes = TrialProcesses(self.run_trial, overrides, num_ranks=self.num_ranks, log=log)
            self._running.append(RunningTrial(trial, processes))

    def _is_out_of_time(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def _must_wait(self) -> bool:
        """Return whether to wait for trials of this search that other processes are still running."""
        return not self._is_out_of_time() and self.search.others_run()

    def _handle_messages(self) -> None:
        """Wait briefly for messages from running trials, handle them, and record trials that have ended."""
        connections = []
        for running in self._running:
            connections.extend(running.processes.connections)
        ready = wait(connections, timeout=POLL_S)
        for running in list(self._running):
            outcome = running.handle_messages(ready)
            if outcome is not None:
                running.processes.kill()
                self._running.remove(running)
                self._end(running.trial, outcome)

    def _end(self, trial: Trial, outcome: Outcome) -> None:
        ended = self.search.end_trial(trial, outcome)
        if self.on_end is not None:
            self.on_end(ended)
