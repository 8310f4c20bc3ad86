"""Rendezvous of all ranks at the start of a run, and checks of the launch options.

Rank zero opens a store at the address that the user has set, and each rank writes its name into the store.
"""

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

# Seconds after the time limit within which rank zero's result must reach the other ranks. The store answers in
# milliseconds, so this leaves a margin.
GRACE_S = 5.0

# Seconds that the ranks of a node may take to report which rank is dead. They need about 5 s over Gloo, 15 s over NCCL,
# and more if they are not communicating at the time.
REPORT_S = 30.0

# Rank zero's result if no rank is missing.
_ALL_CAME = "all came"

_OBSERVER = "fabric.strategies.launchers.subprocess_script._ChildProcessObserver"


class RendezvousError(RuntimeError):
    """Error raised when not all ranks connect at the rendezvous address.

    The message names the cause, such as missing ranks, two processes with the same rank, or a port in use.
    """


def meet(*, address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Wait until all ranks have connected, and return the store for a new process group.

    Collective: every rank must call it.

    Rank zero listens only on `address` if that is an IP address or `localhost`, and on all interfaces if it is a name,
    because a host may resolve its own name to another address than other hosts do.

    Args:
        address: The address of rank zero, `MASTER_ADDR`.
        port: The port of rank zero, `MASTER_PORT`.
        rank: The rank of this process.
        world_size: The number of ranks to wait for.
        timeout: The maximum time to wait for all ranks, and the time limit of the store's operations.

    Raises:
        RendezvousError: A rank is missing after the timeout, two processes have the same rank, or the port is taken.
    """
    end_s = monotonic() + timeout.total_seconds()
    where = f"{address}:{port}"
    store = _open_store(address, port, rank, world_size, timeout)
    names = dist.PrefixStore("names", store)
    _claim_rank(names, rank, where)

    # Rank zero waits for all names and writes the result, so that every rank raises the same message.
    if rank == 0:
        missing = _collect_ranks(names, world_size, end_s)
    else:
        missing = _await_result(names, end_s, where, rank, timeout)
    if missing:
        raise RendezvousError(
            f"`WORLD_SIZE` (={world_size}) ranks were expected at {where}, but {missing} did not connect within "
            f"{timeout.total_seconds():g} s. Check that every rank was started with this MASTER_ADDR and MASTER_PORT "
            "and that no firewall blocks the connection, or increase `timeout`."
        )
    return dist.PrefixStore("default_pg", store)


def _open_store(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta
) -> dist.TCPStore:
    """Create the TCP store on rank zero, or connect to it on any other rank."""
    try:
        if rank == 0:
            return _serve(address, port, world_size, timeout)
        return dist.TCPStore(
            address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False
        )
    except dist.DistError as error:
        if rank == 0:
            raise RendezvousError(
                f"`MASTER_PORT` (={port}) cannot be opened by rank 0: {first_line(error)}. Another process may also "
                "be rank 0, or another job may use this port. Set another port on every rank, or stop that process."
            ) from error
        raise RendezvousError(_no_answer(f"{address}:{port}", rank, timeout)) from error


def _claim_rank(names: dist.Store, rank: int, where: str) -> None:
    """Register this process in the store under its rank, or raise if another process has this rank.

    The first process that registers gets the rank.

    Raises:
        RendezvousError: Another process has the rank.
    """
    name = f"process {os.getpid()} on host {socket.gethostname()}"
    owner = names.compare_set(f"rank {rank}", "", name).decode()
    if owner != name:
        raise RendezvousError(
            f"`RANK` (={rank}) must be different in each process, but at {where} both {owner} and {name} are rank "
            f"{rank}. Start each rank once, for example with torchrun or srun, which number the ranks."
        )


def listening_address(address: str) -> str:
    """Return the IP address on which rank zero listens, or an empty string if it listens on every interface.

    A host name other than `localhost` means all interfaces.

    >>> [listening_address(address) for address in ("10.0.0.7", "localhost", "node7")]
    ['10.0.0.7', '127.0.0.1', '']
    """
    if address == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""


def timeout_from(setting: timedelta | float) -> timedelta:
    """Convert the option `timeout`, in seconds or as a `timedelta`, to a `timedelta`.

    Raises:
        ValueError: The timeout is not above zero, or exceeds a year.

    >>> timeout_from(60)
    datetime.timedelta(seconds=60)
    >>> timeout_from(timedelta(minutes=1)) == timeout_from(60.0)
    True
    """
    if isinstance(setting, timedelta):
        seconds: Any = setting.total_seconds()
    else:
        seconds = plain_value(setting)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    # The limit is a year, because torch converts the timeout to milliseconds and nanoseconds.
    if not is_number or not 0 < seconds <= 366 * 86400:
        raise ValueError(
            f"`timeout` (={setting!r}) must be a positive number of seconds or a positive timedelta, up to 366 "
            "days. It limits the time that ranks wait for each other at the start and in each collective. Set "
            "timeout=1800, or leave `timeout` out."
        )
    return timedelta(seconds=seconds)


# ---- rank zero -------------------------------------------------------------------------------


def _serve(address: str, port: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Create the TCP store of rank zero, which listens only on `address` if possible."""
    listener = _listen(listening_address(address), port)
    descriptor = None
    if listener is not None:
        descriptor = listener.detach()  # the store closes it
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # If this process already has a store at this port from an earlier run, that store is used again.
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def _listen(address: str, port: int) -> socket.socket | None:
    """Open a socket that listens on one address, or return None if torch has to open it."""
    if not address:
        return None
    # torch's own listener would use every interface, so any host could reach the store.
    family = socket.AF_INET
    if ":" in address:
        family = socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        # torch handles a port in use, because its listener may be this process's own store from an earlier run.
        if error.errno != errno.EADDRINUSE:
            rank_zero_warn(
                f"MASTER_ADDR (={address}) is not an address of this host ({error.strerror}), so rank 0 listens on "
                f"port {port} of all interfaces. Set MASTER_ADDR to an address of this host to listen on that address "
                "only."
            )
        return None
    return listener


def _collect_ranks(names: dist.Store, world_size: int, end_s: float) -> str:
    """Wait until all ranks have registered or the timeout expires, and return the missing ranks as text.

    Rank zero calls the function. The result is also written to the store for the other ranks. It is empty if no rank
    is missing.
    """
    missing = list(range(world_size))
    while True:
        missing = [rank for rank in missing if not names.check([f"rank {rank}"])]
        if not missing or monotonic() >= end_s:
            break
        time.sleep(0.01)
    if not missing:
        names.set("result", _ALL_CAME)
        return ""

    result = name_ranks(missing)
    names.set("result", result)
    # The store ends with this process, so the other ranks have to read the result first.
    num_readers = world_size - 1 - len(missing)
    last_s = monotonic() + GRACE_S
    while names.add("read", 0) < num_readers and monotonic() < last_s:
        time.sleep(0.01)
    return result


# ---- other ranks -----------------------------------------------------------------------------


def _await_result(
    names: dist.Store, end_s: float, where: str, rank: int, timeout: timedelta
) -> str:
    """Wait for the result of the rendezvous from rank zero, and return the missing ranks as text."""
    remaining_s = max(0.0, end_s - monotonic()) + GRACE_S
    try:
        names.wait(["result"], timedelta(seconds=remaining_s))
        result = names.get("result").decode()
        names.add("read", 1)
    except RuntimeError as error:  # raised by the store
        raise RendezvousError(_no_answer(where, rank, timeout)) from error
    if result == _ALL_CAME:
        return ""
    return result


def _no_answer(where: str, rank: int, timeout: timedelta) -> str:
    return (
        f"`MASTER_ADDR` and `MASTER_PORT` (={where}) must be the address of rank 0, but rank {rank} on host "
        f"{socket.gethostname()} received no answer there within {timeout.total_seconds():g} s. Check that rank 0 is "
        "running, that it did not exit with an error, and that no firewall blocks the connection. To run without a "
        "launcher, unset RANK, LOCAL_RANK, NODE_RANK and WORLD_SIZE."
    )


# ---- Lightning -------------------------------------------------------------------------------


def connect_ranks(
    environment: Any, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Create the process group after a rendezvous of all ranks.

    The ranks use the store of `meet`, or the store of torchrun's agents. Collective: every rank must call it.

    Args:
        environment: Lightning's cluster environment.
        backend: The backend of the process group.
        device: The device of this rank.
        timeout: The maximum time that ranks wait for one another.

    Raises:
        RendezvousError: As in `meet`, or the ranks registered but cannot connect to one another.
    """
    assert timeout is not None
    # If the group is bound to a device, NCCL connects at once, and further groups are split from the default group.
    # Gloo supports neither.
    device_id = None
    if device.type != "cpu" and "nccl" in backend:
        device_id = device
    group_options: dict[str, Any] = {"timeout": timeout, "device_id": device_id}
    if not dist.is_initialized():
        store = _new_store(environment, timeout)
        if store is not None:
            group_options["store"] = store
    try:
        init_process_group = lightning_function(
            "fabric.utilities.distributed._init_dist_connection"
        )
        init_process_group(environment, backend, **group_options)
    except dist.DistError as error:
        raise RendezvousError(
            f"`WORLD_SIZE` (={environment.world_size()}) ranks connected at "
            f"{environment.main_address}:{environment.main_port}, but they cannot connect to each other: "
            f"{first_line(error)}. Set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME on GPUs) to the network interface that "
            "the nodes share, such as eth0. The default is the interface of the host name. Check also that each "
            "process can open enough files (`ulimit -n`)."
        ) from error
    let_ranks_report()


def _new_store(environment: Any, timeout: timedelta) -> dist.Store | None:
    """Return the store for a new process group, or None to use the store of torchrun's agents."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return meet(
            address=environment.main_address,
            port=environment.main_port,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            timeout=timeout,
        )
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        return store_of_attempt(environment.main_address, environment.main_port, timeout)
    return None


def store_of_attempt(address: str, port: int, timeout: timedelta) -> dist.Store:
    """Return the store of torchrun's agent, with a key prefix for the current restart attempt.

    The agent's store outlives its workers. Without a prefix, the workers of the next attempt would read the addresses
    that the last attempt wrote. Each agent counts attempts by itself, so this works for launches on a single node only.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"attempt {attempt}", store)


def start_method_from(setting: str) -> Any:
    """Validate and return the option `start_method`.

    Raises:
        ValueError: The start method is unknown.
    """
    why = "it selects how the ranks of a node are started. Leave `start_method` out for 'popen'"
    require_choice("start_method", setting, ("popen", "spawn", "fork", "forkserver"), why)
    return setting


def refuse_launch(name: str, start_method: str, devices: Iterable[Any] | None) -> None:
    """Raise before the launch if the devices or the start method are not supported.

    Args:
        name: The name of the strategy.
        start_method: The method by which the ranks of a node are started.
        devices: The devices of this node.

    Raises:
        MisconfigurationException: A device is neither a CPU nor a CUDA GPU (such as MPS, XLA or HPU), or `"popen"` is
            used in an interactive session.
    """
    device_types = {getattr(device, "type", type(device).__name__) for device in devices or ()}
    for device_type in device_types - {"cpu", "cuda"}:
        raise misconfiguration(
            f"`accelerator` (={device_type!r} devices) must be 'cpu' or 'cuda' with strategy={name!r}, because Gloo "
            "and NCCL support no other devices. Set accelerator='cpu', or strategy='auto' for one device."
        )
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    # Lightning raises an error too, but its error would name a variant of DDP.
    if start_method == "popen" and is_interactive:
        raise misconfiguration(
            f"`strategy` (={name!r}) cannot be used in an interactive session or a notebook, because it starts each "
            f"rank by repeating the command of a script. Set strategy='{name}_notebook' (or start_method='fork' in a "
            "strategy object), which forks the ranks, or run your code as a script."
        )


def let_ranks_report() -> None:
    """Make Lightning's launcher wait before it kills ranks, so that they can report which rank died.

    The ranks get `REPORT_S` seconds. Lightning checks every 5 s, and would otherwise kill this process before or while
    it reports the dead rank and the reason.
    """
    for thread in threading.enumerate():
        if isinstance(thread, lightning_types(_OBSERVER)) and "_run" not in vars(thread):
            thread._run = partial(_run_after_reports, thread._child_processes, thread._run)


def _run_after_reports(processes: list[Any], run: Any) -> bool:
    if any(process.poll() for process in processes):
        time.sleep(REPORT_S)
    is_over: bool = run()
    return is_over
