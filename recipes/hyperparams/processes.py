"""Processes of a trial, one per rank, which are forked from a server that has imported all modules."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from recipes.hyperparams.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]

PRELOADED = ["recipes.hyperparams.trial", "recipes.datasets.digits"]
"""Modules that the server imports once for all trials."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Intermediate value of the objective, which a running trial reports to the pruner.

    Attributes:
        percent: Percentage of the run that is complete.
        value: Objective at that point.
    """

    percent: int
    value: float


AskPruner = Callable[[Report], bool]
"""Function that passes a report on and returns whether the trial should stop."""


class RunTrial(Protocol):
    """Protocol of a picklable function that runs one trial in another process."""

    def __call__(self, overrides: tuple[str, ...], ask_pruner: AskPruner) -> Outcome:
        """Run one trial with the given overrides, and return its outcome."""


class TrialProcesses:
    """Child processes that run one trial, with one process per rank.

    Args:
        run_trial: Function that runs the trial, in every process.
        overrides: Overrides of the trial.
        num_ranks: Number of processes.
        log: File for their output. None leaves it on the terminal.

    Attributes:
        connections: Connections that may still receive a message.
    """

    def __init__(
        self,
        run_trial: RunTrial,
        overrides: tuple[str, ...],
        *,
        num_ranks: int = 1,
        log: Path | None = None,
    ) -> None:
        self.connections: list[Connection] = []
        self._ranks: dict[Connection, int] = {}
        self._processes: list[ForkServerProcess] = []
        # a forked process would inherit the state of this process's threads
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        _make_importable()
        for rank, environment in enumerate(_environments(num_ranks)):
            connection, child_connection = context.Pipe()
            process = context.Process(
                target=_run_rank, args=(run_trial, overrides, environment, log, child_connection)
            )
            process.start()
            # Only the child holds its end, so that `recv` raises EOFError when the child dies.
            child_connection.close()
            self.connections.append(connection)
            self._ranks[connection] = rank
            self._processes.append(process)

    def receive(self, connection: Connection) -> Report | Outcome | None:
        """Receive a report or the outcome of the trial from one rank.

        None means that a rank other than zero ended normally. If a process died, the outcome is a failure.
        """
        rank = self._ranks[connection]
        try:
            message: Report | Outcome = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join()
            reason = f"The process of rank {rank} ended with exit code {process.exitcode}."
            return Outcome(status="failed", reason=reason)
        if isinstance(message, Report) or rank == 0 or message.status == "failed":
            return message
        self.connections.remove(connection)
        return None

    def kill(self) -> None:
        """Kill all processes of the trial, because they may be waiting for a failed rank."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._ranks:
            connection.close()


def run_safely(run_trial: RunTrial, overrides: tuple[str, ...], ask_pruner: AskPruner) -> Outcome:
    """Run a trial and return its outcome, which is a failure if the trial raises an exception."""
    try:
        return run_trial(overrides, ask_pruner)
    except Exception as error:  # not SystemExit: Lightning turns SIGTERM and Ctrl-C into one
        message = " ".join(str(error).split()) or "no message"
        return Outcome(status="failed", reason=f"{type(error).__name__}: {message[:300]}")


def _make_importable() -> None:
    """Add this checkout to `PYTHONPATH`, so that the fork server can import its modules."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])


def _environments(num_ranks: int) -> list[dict[str, str]]:
    """Return the environment variables that connect the ranks of a trial, for each rank.

    A trial with one process needs no variables.
    """
    if num_ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [{"LOCAL_RANK": str(rank), **shared} for rank in range(num_ranks)]


def _run_rank(
    run_trial: RunTrial,
    overrides: tuple[str, ...],
    environment: Mapping[str, str],
    log: Path | None,
    connection: Connection,
) -> None:
    """Run one rank of a trial in this child process, and send its outcome to the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment)
    if log is not None:
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def ask_pruner(report: Report) -> bool:
        connection.send(report)
        should_stop: bool = connection.recv()
        return should_stop

    connection.send(run_safely(run_trial, overrides, ask_pruner))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
