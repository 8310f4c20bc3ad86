"""Small cluster on one machine: network namespaces as hosts, and links with a bandwidth and a delay between them.

    with Cluster(num_hosts=2, ranks_per_host=2, mbit_per_s=100, delay_us=200) as cluster:
        outputs = cluster.run([sys.executable, "my_script.py"], timeout_s=120)   # a program on every rank
        results = cluster.call(my_function, 7, timeout_s=60)                     # a function on every rank
        cluster.traffic().sent_bytes                                             # of every host, since the start

Ranks of one host communicate over its loopback at the speed of memory. Ranks of different hosts use eth0. ``netemu.c``
forwards its frames at ``mbit_per_s`` per direction and NIC, after ``delay_us``. Every rank has the environment
variables that torchrun would set.

Nothing is left behind, not even after SIGKILL. The emulator ends when this process's end of its pipe closes. Every rank
dies with the process that started it. The namespaces have no names, so they disappear with the last process that uses
them. For the same reason, several clusters may exist at the same time. Every wait has a time limit.

Requires Linux, root, gcc, iproute2 and util-linux. ``why_not()`` reports what is missing.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.rank_pool import warm_context

SOURCE = Path(__file__).with_name("netemu.c")
TOOLS = ("gcc", "ip", "nsenter", "setpriv", "sysctl")
START_LIMIT_S = 20.0
ANSWER_LIMIT_S = 5.0
GRACE_S = 2.0  # extra time for the other ranks after a failure, because their output often shows the cause
MTU = 9000
GSO_BYTES = 16384  # the longest burst that occupies a NIC: 1.3 ms at 100 Mbit/s
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


class ClusterError(RuntimeError):
    """Failure to build the cluster, or a rank that fails or does not end in time. The message contains its output."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes sent between hosts. ``matrix[i][j]`` counts those from host i to host j over its NIC, including headers."""

    matrix: tuple[tuple[int, ...], ...]

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """Return the sent bytes of every host."""
        return tuple(sum(row) for row in self.matrix)


class Cluster:
    """Context manager for ``num_hosts`` hosts with ``ranks_per_host`` ranks each.

    Args:
        mbit_per_s: Bandwidth of every NIC in each direction, or one number per host (for a straggler).
        delay_us: One-way delay between any two hosts.
        interleave: Assign ranks to hosts in turn, as in SLURM's cyclic distribution, instead of host by host.

    Raises:
        ClusterError: On entry, if this machine cannot emulate a cluster.
    """

    def __init__(
        self,
        *,
        num_hosts: int,
        ranks_per_host: int,
        mbit_per_s: float | Sequence[float],
        delay_us: float = 0.0,
        interleave: bool = False,
    ) -> None:
        self.num_hosts = num_hosts
        self.ranks_per_host = ranks_per_host
        self.mbit_per_s = [mbit_per_s] if isinstance(mbit_per_s, int | float) else list(mbit_per_s)
        self.delay_us = delay_us
        self.interleave = interleave
        self._emulator: subprocess.Popen[bytes] | None = None
        self._hosts: list[str] = []
        self._num_runs = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """Return the host of a rank.

        >>> Cluster(num_hosts=2, ranks_per_host=2, mbit_per_s=100).host_of(1)
        0
        >>> Cluster(num_hosts=2, ranks_per_host=2, mbit_per_s=100, interleave=True).host_of(1)
        1
        """
        if self.interleave:
            return rank % self.num_hosts
        return rank // self.ranks_per_host

    # ---- start and end ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        try:
            self._start_emulator()
            for host in range(self.num_hosts):
                self._configure(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the emulator and thereby the hosts. May be called again."""
        emulator = self._emulator
        self._emulator = None
        self._hosts = []
        if emulator is not None:
            assert emulator.stdin is not None
            assert emulator.stdout is not None
            assert emulator.stderr is not None
            emulator.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                emulator.wait(ANSWER_LIMIT_S)
            emulator.kill()
            emulator.wait()
            emulator.stdout.close()
            emulator.stderr.close()

    def _start_emulator(self) -> None:
        rates = ",".join(f"{rate:g}" for rate in self.mbit_per_s)
        # A running program no longer needs its file.
        with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
            binary = Path(folder, "netemu")
            _build(binary)
            self._emulator = subprocess.Popen(
                [binary, str(self.num_hosts), rates, f"{self.delay_us:g}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # this process handles Ctrl-C
            )
        word, *descriptors = self._answer(START_LIMIT_S).split() or [""]
        if word != "ready":
            assert self._emulator.stderr is not None
            raise ClusterError(
                f"the network emulator did not start: {self._emulator.stderr.read().decode().strip()}"
            )
        self._hosts = [f"/proc/{self._emulator.pid}/fd/{descriptor}" for descriptor in descriptors]

    def _answer(self, limit_s: float) -> str:
        assert self._emulator is not None
        assert self._emulator.stdout is not None
        if not select.select([self._emulator.stdout], [], [], limit_s)[0]:
            raise ClusterError(f"the network emulator gave no answer within {limit_s:g} s")
        return self._emulator.stdout.readline().decode()

    def _configure(self, host: int) -> None:
        links = [
            "link set lo up",
            f"link set eth0 address {_ethernet_address(host)} mtu {MTU}",
            f"link set eth0 gso_max_size {GSO_BYTES}",
            "link set eth0 txqueuelen 1000 up",
            f"addr add {_address(host)}/24 dev eth0",
        ]
        links += [  # avoids address resolution during measurements
            f"neigh replace {_address(peer)} lladdr {_ethernet_address(peer)} dev eth0"
            for peer in range(self.num_hosts)
            if peer != host
        ]
        self._inside(host, ["ip", "-batch", "-"], "\n".join(links))
        # Every kernel allows reno in a namespace. Training traffic comes in bursts, and a fabric is not the internet,
        # so there must be no slow start after a pause.
        settings = ["net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0"]
        self._inside(host, ["sysctl", "-qw", *settings], "")

    def _inside(self, host: int, command: list[str], text: str) -> None:
        done = subprocess.run(
            [*self._enter(host), *command],
            input=text,
            text=True,
            capture_output=True,
            timeout=START_LIMIT_S,
        )
        if done.returncode:
            raise ClusterError(
                f"`{' '.join(command)}` failed in host {host}: {done.stderr.strip()}"
            )

    def _enter(self, host: int) -> list[str]:
        if not self._hosts:
            raise ClusterError("the cluster is not up: use it in a `with` block")
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={self._hosts[host]}", "--"]

    # ---- use -------------------------------------------------------------------------------------------------------

    def address(self, host: int) -> str:
        """Return the address of a host's eth0."""
        return _address(host)

    def namespace(self, host: int) -> str:
        """Return the file that ``nsenter --net`` needs to enter a host."""
        return self._hosts[host]

    def traffic(self) -> Traffic:
        """Return the bytes sent between hosts since the start, as counted by the emulator."""
        counts = [int(word) for word in self._ask("\n").split()]
        rows = range(0, len(counts), self.num_hosts)
        return Traffic(matrix=tuple(tuple(counts[row : row + self.num_hosts]) for row in rows))

    def spoil_link(self, host: int, *, loss: float = 0.0, mbit_per_s: float | None = None) -> None:
        """Drop a share of the frames to and from a host from now on (1 cuts it off), and change its bandwidth.

        Without arguments, restore the link as it was built.
        """
        if mbit_per_s is None:
            rate = self.mbit_per_s[min(host, len(self.mbit_per_s) - 1)]
        else:
            rate = mbit_per_s
        self._ask(f"link {host} {rate:g} {loss:g}\n")

    def _ask(self, line: str) -> str:
        assert self._emulator is not None
        assert self._emulator.stdin is not None
        self._emulator.stdin.write(line.encode())
        self._emulator.stdin.flush()
        return self._answer(ANSWER_LIMIT_S)

    def environment(self, rank: int) -> dict[str, str]:
        """Return torchrun's variables for this rank, and the interface for Gloo."""
        host = self.host_of(rank)
        if self.interleave:
            local_rank = rank // self.num_hosts
        else:
            local_rank = rank % self.ranks_per_host
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": str(self.num_hosts),
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(29500 + self._num_runs),
            "TORCHELASTIC_RUN_ID": f"netlab-{os.getpid()}-{self._num_runs}",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # suppresses warnings about hosts without names
        }

    def run(
        self, command: Sequence[str], *, timeout_s: float, show_rank_zero: bool = False
    ) -> list[str]:
        """Run a program on every rank, and return the output of each in rank order.

        With ``show_rank_zero``, rank 0 writes to this process's standard output instead.

        Raises:
            ClusterError: A rank ends with another status than 0, or does not end within ``timeout_s``.
        """
        self._num_runs += 1
        deadline_s = time.monotonic() + timeout_s
        with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
            files = [Path(folder, str(rank)) for rank in range(self.world_size)]
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for rank, file in enumerate(files):
                    with open(file, "wb") as output:
                        processes.append(
                            subprocess.Popen(
                                [*self._enter(self.host_of(rank)), *command],
                                stdin=subprocess.DEVNULL,
                                stdout=None if show_rank_zero and rank == 0 else output,
                                stderr=subprocess.STDOUT
                                if not (show_rank_zero and rank == 0)
                                else None,
                                env=os.environ | self.environment(rank),
                                start_new_session=True,
                            )
                        )
                while (
                    any(process.poll() is None for process in processes)
                    and time.monotonic() < deadline_s
                ):
                    if any(process.poll() for process in processes):
                        deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
                    time.sleep(0.05)
                codes = [process.poll() for process in processes]
            finally:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
            outputs = [file.read_text(errors="replace") for file in files]
        if any(codes) or None in codes:
            report = [
                f"rank {rank}: {'still ran' if code is None else f'status {code}'}\n{output[-3000:]}"
                for rank, (code, output) in enumerate(zip(codes, outputs, strict=True))
                if code != 0
            ]
            raise ClusterError(
                f"`{' '.join(command)}` failed (limit {timeout_s:g} s)\n" + "\n".join(report)
            )
        return outputs

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run an importable function on every rank in a separate Gloo world, and return its results in rank order.

        The ranks are forked from a process that has imported Lightning, which is much faster than ``run``.

        Raises:
            ClusterError: A rank fails or does not end within ``timeout_s``. The message has the traceback of every
            failed rank.
        """
        self._num_runs += 1
        context = warm_context()
        payload = pickle.dumps((function, args))
        pipes: list[Connection] = []
        processes = []
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe(duplex=False)
                host = self._hosts[self.host_of(rank)]
                process = context.Process(
                    target=_serve, args=(host, self.environment(rank), theirs, payload)
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            replies = _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
        if any(reply is None or reply[0] == "error" for reply in replies):
            report = [
                f"rank {rank}: {'still ran' if reply is None else reply[1]}"
                for rank, reply in enumerate(replies)
                if reply is None or reply[0] == "error"
            ]
            raise ClusterError(
                f"{function.__qualname__} failed (limit {timeout_s:g} s)\n" + "\n".join(report)
            )
        return [pickle.loads(reply[1]) for reply in replies if reply is not None]


def why_not() -> str | None:
    """Return the reason why this machine cannot emulate a cluster, or None."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces and TAP devices need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    if not Path("/dev/net/tun").exists():
        return "TAP devices need /dev/net/tun"
    try:
        with Cluster(num_hosts=2, ranks_per_host=1, mbit_per_s=1000):
            return None
    except (ClusterError, OSError, subprocess.SubprocessError) as error:
        return f"no cluster can be built here: {error}"


def _build(binary: Path) -> None:
    done = subprocess.run(
        ["gcc", "-O2", "-o", str(binary), str(SOURCE)],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
    )
    if done.returncode:
        raise ClusterError(f"gcc could not build {SOURCE.name}: {done.stderr}")


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _ethernet_address(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"


def _collect(pipes: list[Connection], timeout_s: float) -> list[tuple[str, Any] | None]:
    """Return the reply of each rank, or None if it did not arrive in time."""
    deadline_s = time.monotonic() + timeout_s
    replies: list[tuple[str, Any] | None] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=left_s):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                reply = pipe.recv()
            except EOFError:
                reply = ("error", "the process died")
            replies[rank] = reply
            if reply[0] == "error":
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    return replies


# ------------------------------------------------------------------------------------------- in the rank's own process


def _serve(host: str, environment: dict[str, str], pipe: Connection, payload: bytes) -> None:
    """Enter the host, join the world, call the function, and reply."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with open(host) as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns({host})")
        os.environ.update(environment)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=45))
        function, args = pickle.loads(payload)
        result = pickle.dumps(function(*args))
        dist.destroy_process_group()
        pipe.send(("ok", result))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
