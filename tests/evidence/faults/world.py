"""World for injected faults: ranks as processes of this machine, which start quickly and are always ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from recipes.cli.ranges import CountOrZero

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """Result of one run.

    `injected_s`: time of the fault, or None if the run did not reach it. `ranks`: result that each rank wrote at its
    end, or None. `still_ran`: ranks that had to be ended. Times are `time.time()`.
    """

    injected_s: float | None
    ranks: list[dict[str, Any] | None]
    still_ran: list[int] = field(default_factory=list)


class OneHost:
    """World with all ranks on this machine, connected by its loopback interface.

    Args:
        num_ranks: Number of ranks.

    A world of several hosts has the same methods, with `has_links` and `spoil_link`: `tests/netlab/faults.py`.
    """

    has_links = False

    def __init__(self, num_ranks: CountOrZero = 2) -> None:
        self.num_hosts = 1
        self.ranks_per_host = num_ranks

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.ranks_per_host

    def __enter__(self) -> OneHost:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return rank // self.ranks_per_host

    def host_name(self, host: int) -> str:
        """Return the host's name as it appears in errors."""
        return socket.gethostname()

    def enter(self, rank: int) -> Callable[[], None]:
        """Return the function that a rank's process calls first to move to its host. It can be pickled."""
        return _stay

    def network(self) -> dict[str, str]:
        """Return the environment of all ranks, with their rendezvous address."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(probe.getsockname()[1]),
                "GLOO_SOCKET_IFNAME": "lo",
            }

    def spoil_link(self, host: int, *, loss: float = 0.0, mbit_per_s: float | None = None) -> None:
        """Raise an error, because there are no links between hosts."""
        raise NotImplementedError(
            "one host has no links: run this case with `python -m tests.netlab.faults`"
        )

    def environment(self, rank: int) -> dict[str, str]:
        """Return torchrun's variables for this rank."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(rank % self.ranks_per_host),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "GROUP_RANK": str(self.host_of(rank)),
            "GROUP_WORLD_SIZE": str(self.num_hosts),
            "TORCHELASTIC_RUN_ID": "faults",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }

    def run(
        self,
        train: Callable[[dict[str, Any]], None],
        spec: dict[str, Any],
        *,
        limit_s: float,
        no_answer: tuple[int, ...] = (),
        when_injected: Callable[[], None] | None = None,
    ) -> RunOutcome:
        """Call `train(spec)` on every rank in new processes, and return the results written to `spec["folder"]`.

        The call ends when all ranks have ended, except for the ranks in `no_answer`, which the fault may block, or
        after `limit_s`. `when_injected` runs once in this process, as soon as a rank has reported the moment of the
        fault.
        """
        # The server has imported torch once, so a rank starts in tenths of a second.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lightning_hybrid", "tests.evidence.faults.rank"])
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            network = self.network()
            processes = list[BaseProcess]()
            try:
                for rank in range(self.num_ranks):
                    arguments = (
                        train,
                        spec | {"folder": folder},
                        self.environment(rank) | network,
                        self.enter(rank),
                    )
                    processes.append(context.Process(target=_serve, args=arguments))
                    processes[-1].start()
                _wait(processes, Path(folder), limit_s, no_answer, when_injected)
                alive = [process.is_alive() for process in processes]
            finally:
                for process in processes:
                    process.kill()
                    process.join()
            written = [_read(Path(folder, f"rank{rank}.json")) for rank in range(self.num_ranks)]
            injected = _read(Path(folder, "injected.json"))
        still_ran = [rank for rank, ran in enumerate(alive) if ran and rank not in no_answer]
        return RunOutcome(
            injected_s=None if injected is None else injected["time_s"],
            ranks=written,
            still_ran=still_ran,
        )


def _wait(
    processes: list[BaseProcess],
    folder: Path,
    limit_s: float,
    no_answer: tuple[int, ...],
    when_injected: Callable[[], None] | None,
) -> None:
    deadline_s = time.monotonic() + limit_s
    # Ranks in `no_answer` are stopped or hang, so waiting for them would take the whole limit.
    asked = [process for rank, process in enumerate(processes) if rank not in no_answer]
    while any(process.is_alive() for process in asked) and time.monotonic() < deadline_s:
        if when_injected is not None and Path(folder, "injected.json").exists():
            when_injected()
            when_injected = None
        time.sleep(0.02)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return answer


def _stay() -> None:
    pass


def _serve(
    train: Callable[[dict[str, Any]], None],
    spec: dict[str, Any],
    environment: dict[str, str],
    enter: Callable[[], None],
) -> None:
    """Run a rank's process. It exits at once, since threads that wait for a failed rank have nothing to report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "w") as nothing:
        for descriptor in (1, 2) if not spec.get("is_loud") else ():
            os.dup2(nothing.fileno(), descriptor)
    enter()
    os.environ.update(environment)
    train(spec)
    os._exit(0)
