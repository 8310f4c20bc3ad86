"""How ranks start and meet: rank zero opens a store at the user's address, and each rank writes its name there."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.checks import first_line, plain_value, require_choice
from lightning_hybrid.comm.health.diagnosis import name_ranks
from lightning_hybrid.lightning_names import lightning_function, lightning_types, misconfiguration

# Time for rank zero's result to reach the others, after the limit. Our choice: the store answers in milliseconds.
GRACE_S = 5.0

# How long the ranks of a node may take to report which rank is dead. Our choice: they need about 5 s over Gloo, 15 s
# over NCCL, and more where what they do meanwhile is none of communication.
REPORT_S = 30.0

_OBSERVER = "fabric.strategies.launchers.subprocess_script._ChildProcessObserver"


class RendezvousError(RuntimeError):
    """A rendezvous that failed: who is missing, where the others waited, and for how long."""


def meet(*, address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Wait until all ranks have come, and return the store of a new process group. Collective.

    Rank zero listens on `address` alone where that is a number (or `localhost`), and on all interfaces where it is a
    name: a host may know its own name by another address than others do.

    Args:
        address: `MASTER_ADDR`.
        port: `MASTER_PORT`.
        rank: rank of this process.
        world_size: number of ranks to wait for.
        timeout: how long to wait for all of them; also the store's own time limit.

    Raises:
        RendezvousError: some did not come in time, two processes have the same rank, or the port is taken.
    """
    end_s = monotonic() + timeout.total_seconds()
    where = f"{address}:{port}"
    try:
        store = (_serve if rank == 0 else _join)(address, port, world_size, timeout)
    except dist.DistError as error:
        if rank == 0:
            raise RendezvousError(
                f"`MASTER_PORT` (={port}) must be a port that rank 0 may open: {first_line(error)}. Is another "
                "process rank 0 too, or another job at this port? Set another port on every rank, or end that process."
            ) from error
        raise RendezvousError(_no_answer(where, rank, timeout)) from error
    calls = dist.PrefixStore("names", store)
    me = f"process {os.getpid()} on host {socket.gethostname()}"
    # The first process to write the rank's name has the rank; a second one reads that name and ends.
    other = calls.compare_set(f"rank {rank}", "", me).decode()
    if other != me:
        raise RendezvousError(
            f"`RANK` (={rank}) must be another one on each process: {other} is rank {rank} at {where}, and so is {me}. "
            "Start each rank once, with torchrun or srun, which number them."
        )
    # Rank zero waits for all names and writes the result, so that every rank ends with the same words.
    missing = (
        _collect(calls, world_size, end_s)
        if rank == 0
        else _await_result(calls, end_s, where, rank, timeout)
    )
    if missing:
        raise RendezvousError(
            f"`WORLD_SIZE` (={world_size}) ranks must meet at {where}, and within {timeout.total_seconds():g} s "
            f"{missing} did not come. Is it started, with this MASTER_ADDR and MASTER_PORT, and may it connect here "
            "(firewall)? `timeout` is how long ranks wait for one another."
        )
    return dist.PrefixStore("default_pg", store)


def listening_address(address: str) -> str:
    """Return where rank zero listens: the address itself where it is a number, else everywhere (an empty string).

    >>> listening_address("10.0.0.7"), listening_address("localhost"), listening_address("node7")
    ('10.0.0.7', '127.0.0.1', '')
    """
    if address == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""


def timeout_from(setting: timedelta | float) -> timedelta:
    """Return how long ranks wait for one another; a number is in seconds.

    Raises:
        ValueError: it is no time above zero.

    >>> timeout_from(60), timeout_from(timedelta(minutes=1)) == timeout_from(60.0)
    (datetime.timedelta(seconds=60), True)
    """
    seconds = setting.total_seconds() if isinstance(setting, timedelta) else plain_value(setting)
    # A year at most: what torch makes of it is counted in milliseconds and nanoseconds.
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 < seconds <= 366 * 86400
    ):
        raise ValueError(
            f"`timeout` (={setting!r}) must be a number of seconds above zero, or a timedelta: so long do ranks wait "
            "for one another, to meet and in each collective. Write timeout=1800, or leave `timeout` out."
        )
    return timedelta(seconds=seconds)


# ---- rank zero -------------------------------------------------------------------------------------------------------


def _serve(address: str, port: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    listener = _listen(listening_address(address), port)
    # `multi_tenant`: a store that this process already has at this port, of an earlier fit, is used again.
    common: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
    descriptor = None if listener is None else listener.detach()  # the store closes it
    return dist.TCPStore(
        address, port, world_size, is_master=True, master_listen_fd=descriptor, **common
    )


def _listen(address: str, port: int) -> socket.socket | None:
    if not address:
        return None
    # torch's own listener would take every interface: any host could reach the store.
    listener = socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        # A port in use is left to torch: the listener there may be this process's own store, of an earlier fit.
        if error.errno != errno.EADDRINUSE:
            rank_zero_warn(
                f"MASTER_ADDR (={address}) is no address of this host's own ({error.strerror}): rank 0 listens at port "
                f"{port} on all interfaces."
            )
        return None
    return listener


def _collect(calls: dist.Store, world_size: int, end_s: float) -> str:
    missing = list(range(world_size))
    while True:
        missing = [rank for rank in missing if not calls.check([f"rank {rank}"])]
        if not missing or monotonic() >= end_s:
            break
        time.sleep(0.01)
    result = name_ranks(missing) if missing else ""
    calls.set("result", result or "all came")
    if result:  # the store ends with this process: the others have to read first
        last_s = monotonic() + GRACE_S
        while calls.add("read", 0) < world_size - 1 - len(missing) and monotonic() < last_s:
            time.sleep(0.01)
    return result


# ---- the others ------------------------------------------------------------------------------------------------------


def _join(address: str, port: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(
        address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False
    )


def _await_result(
    calls: dist.Store, end_s: float, where: str, rank: int, timeout: timedelta
) -> str:
    left_s = max(0.0, end_s - monotonic()) + GRACE_S
    try:
        calls.wait(["result"], timedelta(seconds=left_s))
        result = calls.get("result").decode()
        calls.add("read", 1)
    except RuntimeError as error:  # of the store
        raise RendezvousError(_no_answer(where, rank, timeout)) from error
    return "" if result == "all came" else result


def _no_answer(where: str, rank: int, timeout: timedelta) -> str:
    return (
        f"`MASTER_ADDR` and `MASTER_PORT` (={where}) must be where rank 0 waits for the others: rank {rank} on host "
        f"{socket.gethostname()} had no answer there within {timeout.total_seconds():g} s. Is rank 0 started, did it "
        "end with an error of its own, and may this host connect to it (firewall)? Where no launcher is meant, unset "
        "RANK, LOCAL_RANK, NODE_RANK and WORLD_SIZE."
    )


# ---- Lightning's seam ------------------------------------------------------------------------------------------------


def connect_ranks(
    environment: Any, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Make the process group by `meet`, except under torchrun, whose agents have their store. Collective.

    Raises:
        RendezvousError: as `meet`; or ranks met, and cannot connect to one another.
    """
    assert timeout is not None
    # Bound to its device NCCL connects at once, and groups are splits of the default one. Gloo has neither.
    is_bound = device.type != "cpu" and "nccl" in backend
    kwargs: dict[str, Any] = {"timeout": timeout, "device_id": device if is_bound else None}
    if not dist.is_initialized() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        kwargs["store"] = meet(
            address=environment.main_address,
            port=environment.main_port,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            timeout=timeout,
        )
    elif not dist.is_initialized() and os.environ.get("GROUP_WORLD_SIZE") == "1":
        kwargs["store"] = store_of_attempt(environment.main_address, environment.main_port, timeout)
    try:
        connect = lightning_function("fabric.utilities.distributed._init_dist_connection")
        connect(environment, backend, **kwargs)
    except dist.DistError as error:
        raise RendezvousError(
            f"`WORLD_SIZE` (={environment.world_size()}) ranks met at {environment.main_address}:"
            f"{environment.main_port} and must be able to connect to one another: {first_line(error)}. "
            "GLOO_SOCKET_IFNAME (on GPUs NCCL_SOCKET_IFNAME) names the interface; where it is unset, it is that of "
            "the host's name. Has every process descriptors enough (`ulimit -n`)?"
        ) from error
    let_ranks_report()


def store_of_attempt(address: str, port: int, timeout: timedelta) -> dist.Store:
    """Return the store of torchrun's agent, for this attempt of a launch on one node alone.

    The agent's store outlives its workers. Without a prefix those of the next attempt would find the addresses of the
    last one, which the rank that is first reads. Attempts are counted by each agent, so that this is for one agent.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"attempt {attempt}", store)


def start_method_from(setting: str) -> Any:
    """Return how the ranks of a node are started.

    Raises:
        ValueError: there is no such way.
    """
    why = "it is how the ranks of a node are started. Leave `start_method` out for 'popen'"
    require_choice("start_method", setting, ("popen", "spawn", "fork", "forkserver"), why)
    return setting


def refuse_launch(name: str, start_method: str, devices: Iterable[Any] | None) -> None:
    """Check, before ranks are started, that devices are CPUs or CUDA's, and that a command can be repeated for ranks.

    Raises:
        MisconfigurationException: other devices (MPS, XLA, HPU, ...), or an interactive session, with the name for it.
    """
    for kind in {getattr(device, "type", type(device).__name__) for device in devices or ()} - {
        "cpu",
        "cuda",
    }:
        raise misconfiguration(
            f"`accelerator` (=one of {kind!r} devices) must be cpu or cuda with strategy={name!r}: gradients are "
            "summed over Gloo or NCCL, which have no others. Set accelerator='cpu', or strategy='auto' for one device."
        )
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    if (
        start_method == "popen" and is_interactive
    ):  # as Lightning, whose error would name a variant of DDP
        raise misconfiguration(
            f"`strategy` (={name!r}) must be started from a script: it repeats the command for each rank, and an "
            f"interactive session or a notebook has none. Write strategy='{name}_notebook' (in a strategy object "
            "start_method='fork'), which forks the ranks, or run your code as a script."
        )


def let_ranks_report() -> None:
    """Give ranks `REPORT_S` to end by an error of their own, before Lightning kills them because one has died.

    Lightning looks every 5 s, and would kill this process before, or while, it reports which rank is dead, and why.
    """
    for thread in threading.enumerate():
        if isinstance(thread, lightning_types(_OBSERVER)) and "_run" not in vars(thread):
            thread._run = partial(_look_again, thread._child_processes, thread._run)


def _look_again(processes: list[Any], look: Any) -> bool:
    if any(process.poll() for process in processes):
        time.sleep(REPORT_S)
    is_over: bool = look()
    return is_over
