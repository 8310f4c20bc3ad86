"""Pool of real Gloo processes, started once, on which tests run ordinary module-level functions.

    def ring_sum(numel):                       # in tests/comm/test_x.py; runs on every rank
        flat = torch.full((numel,), float(dist.get_rank() + 1))
        dist.all_reduce(flat)
        return flat

    def test_x(two_ranks):
        assert [r.tolist() for r in two_ranks.run(ring_sum, 1)] == [[3.0], [3.0]]

* The function is pickled by its qualified name, so it must be importable. It may return anything that can be pickled.
* The default process group exists when the function starts. Call ``dist.get_rank()`` to get the rank.
* One set of processes serves worlds of 1 to 8 ranks. The default group is recreated when the world size changes.
* The warning filters of the test, including those from its marks, also apply on the ranks.
* If a rank raises, the test gets a ``RankError`` with the traceback of that rank. If a run exceeds its time limit, the
  test gets a ``RankTimeoutError`` with the stacks of all ranks that are still running. In both cases the processes are
  restarted for the next test.
* Ranks are forked from a process that has imported Lightning, so a new rank starts in hundredths of a second instead of
  5 s.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Shorter than the default time limit of a run, so that the traceback names the operation that timed out.
GROUP_TIMEOUT = timedelta(seconds=45)
START_LIMIT_S = 120.0
# Modules for all processes that tests fork. Modules that are not installed are skipped.
PRELOADED = [
    "wandb",
    "recipes.train",
    "tests.preloaded",
]
GRACE_S = 2.0  # extra time for the other ranks after a failure, because their tracebacks often show the cause


class RankError(AssertionError):
    """Failure of a function on a rank. The message contains the traceback of that rank."""


class RankTimeoutError(RankError):
    """Failure of a function to finish within the time limit on every rank."""


class Ranks:
    """World that consists of the first ``world_size`` processes of a pool."""

    def __init__(self, pool: RankPool, world_size: int) -> None:
        self.pool = pool
        self.world_size = world_size

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0, grace_s: float = GRACE_S
    ) -> list[Any]:
        """Run ``fn(*args)`` on each rank and return the results in rank order."""
        return self.pool.run(
            fn, *args, world_size=self.world_size, timeout_s=timeout_s, grace_s=grace_s
        )


class RankPool:
    """Pool of up to ``num_ranks`` single-threaded Gloo processes on this machine, started on demand.

    With ``is_moving=True``, modules in these processes move between devices as in ``tests/stand_in/moving_device.py``.
    """

    def __init__(self, num_ranks: int, *, is_moving: bool = False) -> None:
        self.num_ranks = num_ranks
        self.is_moving = is_moving
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None
        # Of the default process group; each new group uses a fresh prefix of the store.
        self._generation = 0
        self._live_world_size: int | None = None
        self._stacks = Path(tempfile.mkdtemp(prefix="rank_pool_"))
        atexit.register(self.close)

    def ranks(self, world_size: int) -> Ranks:
        if not 1 <= world_size <= self.num_ranks:
            raise ValueError(f"`world_size` (={world_size}) must be between 1 and {self.num_ranks}")
        return Ranks(self, world_size)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout_s: float = 60.0,
        grace_s: float = GRACE_S,
    ) -> list[Any]:
        """Run ``fn(*args)`` on the first ``world_size`` ranks (default: all) and return the results."""
        if world_size is None:
            world_size = self.num_ranks
        call = pickle.dumps((warnings.filters, fn, args))
        self._start(world_size)
        if self._live_world_size != world_size:
            self._generation += 1
            self._live_world_size = world_size
        for pipe in self._pipes[:world_size]:
            pipe.send_bytes(pickle.dumps((self._generation, world_size)))
            pipe.send_bytes(call)
        try:
            replies, left = self._collect(range(world_size), timeout_s, grace_s)
        except BaseException:  # for example Ctrl-C, while the ranks are still running
            self.stop()
            raise
        failed = {rank: reply for rank, reply in replies.items() if reply[0] == "error"}
        if failed or left:
            stacks = self._stacks_of(left)
            self.stop()
            report = [
                f"rank {rank} of {world_size}:\n{reply[1]}"
                for rank, reply in sorted(failed.items())
            ]
            report += [
                f"rank {rank} of {world_size} still ran:\n{stack}" for rank, stack in stacks.items()
            ]
            if failed:
                error = RankError
                limit = ""
            else:
                error = RankTimeoutError
                limit = f" was not done after {timeout_s:g} s"
            raise error(
                f"{fn.__qualname__}{limit} on ranks {sorted(failed) + left}\n" + "\n".join(report)
            )
        # The function destroyed the default group.
        if not all(reply[2] for reply in replies.values()):
            self._live_world_size = None
        return [pickle.loads(replies[rank][1]) for rank in range(world_size)]

    def _collect(
        self, ranks: range, timeout_s: float, grace_s: float
    ) -> tuple[dict[int, tuple], list[int]]:
        """Return the replies by rank, and the ranks that did not reply in time."""
        deadline = time.monotonic() + timeout_s
        waiting = {self._pipes[rank]: rank for rank in ranks}
        replies: dict[int, tuple] = {}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left_s):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=1)
                    replies[rank] = (
                        "error",
                        f"the process died, exit code {self._processes[rank].exitcode}",
                    )
                if replies[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + grace_s)
        return replies, sorted(waiting.values())

    def _stacks_of(self, ranks: list[int]) -> dict[int, str]:
        """Return the stack of each given rank, as written by faulthandler."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.3 if ranks else 0.0)
        return {rank: self._stack_file(rank).read_text() or "(no stack)" for rank in ranks}

    def _stack_file(self, rank: int) -> Path:
        return self._stacks / f"rank{rank}"

    def _start(self, world_size: int) -> None:
        """Start the missing processes for ranks 0 to ``world_size`` - 1 and keep the existing ones."""
        if any(process.exitcode is not None for process in self._processes):
            self.stop()
        if self._store is None:
            self._store = dist.TCPStore(
                "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
            )
        context = warm_context()
        new = range(len(self._processes), world_size)
        for rank in new:
            ours, theirs = context.Pipe()
            stack_file = self._stack_file(rank)
            stack_file.write_text("")
            # Not daemonic: a daemonic process may not have children, and data loaders start workers.
            process = context.Process(
                target=_serve,
                args=(rank, self._store.port, theirs, str(stack_file), self.is_moving),
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank in new:
            if not self._pipes[rank].poll(START_LIMIT_S):
                self.stop()
                raise RankTimeoutError(f"rank {rank} did not start within {START_LIMIT_S:g} s")
            self._pipes[rank].recv_bytes()

    def stop(self) -> None:
        if "COVERAGE_RUN" in os.environ:
            self._end_in_order()  # a killed process would not write its coverage data
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes = []
        self._pipes = []
        self._live_world_size = None

    def _end_in_order(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        self.stop()
        self._store = None
        shutil.rmtree(self._stacks, ignore_errors=True)
        atexit.unregister(self.close)


def warm_context() -> ForkServerContext:
    """Return a context that forks processes from a server that has imported all ``PRELOADED`` modules.

    The server is started on demand. Forked processes inherit the environment of the server, not the current one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES=""):
        ensure_running()
    return context


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank: int, port: int, pipe: Connection, stack_path: str, is_moving: bool) -> None:
    """Run one function after another until the parent closes the pipe."""
    if is_moving:
        from tests.stand_in import moving_device

        moving_device.install()
    # PR_SET_PDEATHSIG: the fork server ends with pytest.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == 1:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with open(stack_path, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
        pipe.send_bytes(b"ready")
        live_generation = -1
        while True:
            try:
                generation, world_size = pickle.loads(pipe.recv_bytes())
                call = pipe.recv_bytes()
            except EOFError:
                break
            try:
                if generation != live_generation:
                    _join_world(rank, world_size, store, generation)
                    live_generation = generation
                # An earlier test may have called `seed_everything`, and data setups would read this variable.
                os.environ.pop("PL_GLOBAL_SEED", None)
                with warnings.catch_warnings(), _levels_of_loggers_kept():
                    filters, fn, args = pickle.loads(call)
                    _set_warning_filters(filters)
                    result = pickle.dumps(fn(*args))
                intact = dist.is_initialized() and dist.get_world_size() == world_size
                reply = ("ok", result, intact)
            except BaseException:
                reply = ("error", traceback.format_exc())
            pipe.send_bytes(pickle.dumps(reply))
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


@contextlib.contextmanager
def _levels_of_loggers_kept() -> Iterator[None]:
    """Restore the levels of loggers afterwards.

    Programs silence Lightning's loggers, and this process runs further tests.
    """
    loggers = [
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger)
    ]
    levels = [(logger, logger.level) for logger in loggers]
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


def _set_warning_filters(filters: Sequence[tuple]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        # The pattern is compiled, None, or a plain string in the default filters of the interpreter.
        message, module = (
            getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)
        )
        warnings.filterwarnings(action, message, category, module, line)


def _join_world(rank: int, world_size: int, store: dist.Store, generation: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"world-{generation}", store),
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
    )
