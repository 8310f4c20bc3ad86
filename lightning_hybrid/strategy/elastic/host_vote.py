"""A vote of the ranks of one host in each step."""

from __future__ import annotations

from multiprocessing.connection import Client, Listener

import torch.distributed as dist

from lightning_hybrid.comm import Topology


class HostVote:
    """Asks whether something is so on all ranks of this host: one byte to the first rank, and one back.

    Over Unix sockets, which no view ends: a sum of Gloo's wakes three threads, and takes 20 times the processor's time.
    *Every rank of the host must make it, and vote as often.* Membership sees where one of them is gone, and ends all.
    """

    def __init__(self, topology: Topology) -> None:
        num_others, self._is_first = len(topology.node) - 1, topology.local_rank == 0
        self._others = []
        if num_others:
            listener = Listener(family="AF_UNIX", backlog=num_others) if self._is_first else None
            address = [str(listener.address if listener else "")]
            dist.broadcast_object_list(address, src=0)
            if listener is None:
                self._others = [Client(*address)]
            else:
                with listener:
                    self._others = [listener.accept() for _ in range(num_others)]

    def __call__(self, is_so: bool) -> bool:
        """Return whether it is so on all. Collective among them."""
        if not self._is_first:
            self._tell(is_so)
        votes = [one.recv_bytes() == b"1" for one in self._others]
        is_so = is_so and all(votes)
        if self._is_first:
            self._tell(is_so)
        return is_so

    def _tell(self, is_so: bool) -> None:
        for one in self._others:
            one.send_bytes(b"1" if is_so else b"0")

    def close(self) -> None:
        """Close the sockets."""
        for one in self._others:
            one.close()
