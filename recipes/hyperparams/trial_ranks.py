"""Trial on several ranks of this machine, in processes that start from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from recipes.hyperparams.trial_log import TrialOutcome
from recipes.hyperparams.trial_pool import Limits, Runner, run_safely

ROOT = Path(__file__).resolve().parents[2]


def run_on_ranks(runner: Runner, overrides: tuple[str, ...], limits: Limits, *, num_ranks: int) -> TrialOutcome:
    """Run a trial on every rank at once; return rank zero's outcome, or that of the first rank that failed."""
    context = multiprocessing.get_context("forkserver")  # a fork would inherit the threads of trials before
    context.set_forkserver_preload(["recipes.hyperparams.trial"])
    # Python 3.11's server looks for what it imports first in the environment alone.
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, known)]))
    ranks = dict[Connection, BaseProcess]()
    try:
        for place in _places(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=_be_rank, args=(runner, overrides, limits, place, theirs))
            process.start()
            theirs.close()
            ranks[ours] = process
        return _outcome(list(ranks), overrides)
    finally:
        for connection, process in ranks.items():
            process.kill()
            process.join()
            connection.close()


def _places(num_ranks: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"NODE_RANK": "0", "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"LOCAL_RANK": str(rank), **shared} for rank in range(num_ranks)]


def _outcome(ranks: list[Connection], overrides: tuple[str, ...]) -> TrialOutcome:
    found = dict[int, TrialOutcome]()
    while len(found) < len(ranks):
        for ready in wait([one for rank, one in enumerate(ranks) if rank not in found]):
            rank = ranks.index(ready)  # type: ignore[arg-type]
            try:
                found[rank] = ranks[rank].recv()
            except EOFError:
                reason = f"the process of rank {rank} ended"
                found[rank] = TrialOutcome(overrides=overrides, status="failed", reason=reason)
            if found[rank].status == "failed":  # the others wait for it
                return found[rank]
    return found[0]


def _be_rank(
    runner: Runner, overrides: tuple[str, ...], limits: Limits, place: Mapping[str, str], connection: Connection
) -> None:
    """Run the trial as the rank of this place; end with the process that asked for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its business
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(place)
    connection.send(run_safely(runner, overrides, limits))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
