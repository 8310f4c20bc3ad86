"""A vote of the ranks of one host in each step."""

from __future__ import annotations

import os
from multiprocessing.connection import Client, Connection, Listener

import torch.distributed as dist

from lightning_hybrid.comm import Topology


class HostVote:
    """Asks whether something is so on all ranks of this host: one byte to the first rank, and one back.

    Over Unix sockets, which no view ends: a sum of Gloo's wakes three threads, and takes 20 times the processor's time.
    *Every rank of the host must make it, and vote as often.* Membership sees where one of them is gone, and ends all.
    """

    def __init__(self, topology: Topology) -> None:
        num_others = len(topology.node) - 1
        self._is_first = topology.local_rank == 0
        self._others: list[Connection] = []
        if not num_others:
            return
        with Listener(family="AF_UNIX", backlog=num_others) as listener:  # the first rank's is used
            address: list[str] = [str(listener.address)]
            dist.broadcast_object_list(address, src=0)
            self._others = (
                [listener.accept() for _ in range(num_others)]
                if self._is_first
                else [Client(address[0])]
            )

    def __call__(self, is_so: bool) -> bool:
        """Return whether it is so on all. Collective among them."""
        if not self._is_first:
            self._say(is_so)
        votes = [os.read(connection.fileno(), 1) for connection in self._others]
        if b"" in votes:
            raise EOFError(
                "elastic: another rank of this host has exited. The log of that rank has the cause."
            )
        is_so = is_so and b"0" not in votes
        if self._is_first:
            self._say(is_so)
        return is_so

    def _say(self, is_so: bool) -> None:
        for connection in self._others:
            os.write(connection.fileno(), b"1" if is_so else b"0")
