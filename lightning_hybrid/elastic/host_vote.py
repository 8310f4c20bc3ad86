"""Vote of the ranks of one host on whether a step has succeeded."""

from __future__ import annotations

import os
from multiprocessing.connection import Client, Connection, Listener

import torch.distributed as dist

from lightning_hybrid.comm import Topology


class HostVote:
    """Logical AND of a boolean over all ranks of one host, exchanged over Unix sockets.

    Each rank sends one byte to the first rank of the host and receives one byte back. The sockets stay open when the
    membership view changes. A Gloo all-reduce would wake three threads and take 20 times the processor time. If a rank
    fails, the membership protocol detects it and ends all ranks of the host.

    Collective: every rank of the host must create the object, and call it equally often.
    """

    def __init__(self, topology: Topology) -> None:
        num_others = len(topology.node) - 1
        self._is_first = topology.local_rank == 0
        self._others: list[Connection] = []
        if not num_others:
            return
        # Every rank creates a listener, but only the first rank's listener is used.
        with Listener(family="AF_UNIX", backlog=num_others) as listener:
            address: list[str] = [str(listener.address)]
            dist.broadcast_object_list(address, src=0)
            self._others = (
                [listener.accept() for _ in range(num_others)]
                if self._is_first
                else [Client(address[0])]
            )

    def __call__(self, is_so: bool) -> bool:
        """Return True if all ranks of this host have passed True.

        Collective: every rank of this host must call it, in the same order.

        Raises:
            EOFError: Another rank of this host has exited.
        """
        if not self._is_first:
            self._say(is_so)
        votes = [os.read(connection.fileno(), 1) for connection in self._others]
        if b"" in votes:
            raise EOFError(
                "elastic: another rank of this host has exited. See the log of that rank for the "
                "cause."
            )
        is_so = is_so and b"0" not in votes
        if self._is_first:
            self._say(is_so)
        return is_so

    def _say(self, is_so: bool) -> None:
        for connection in self._others:
            os.write(connection.fileno(), b"1" if is_so else b"0")
