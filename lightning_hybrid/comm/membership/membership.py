"""One rank's part in the membership of an elastic run: sockets, clocks and threads around `ViewChange`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from lightning_hybrid.comm.membership.view import Member, View


def end_process(why: str) -> None:
    """End this process at once: its host is lost as a whole."""
    print(f"elastic: {why}; this rank ends too", file=sys.stderr, flush=True)
    os._exit(75)


class Membership:
    """Who takes part, seen by one rank. Its thread runs from the constructor to `close`.

    Args:
        host: name of this host, of no other of the run.
        local, ranks_per_host: this rank on its host.
        meet: "ip:port" of where starting hosts ask for the run, in the same order on all; the holder of the first is the
            arbiter where a cut link leaves two halves.
        min_hosts, max_hosts: fewer do not go on; more wait.
        token: of what must be equal on all hosts.
        silent_s: after how long without a sign of life a host is lost.
        wait_s: how long the first meeting waits for more hosts than `min_hosts`.
        on_change: called in a thread of its own, once a view, with why the view ends: a loss, or a host that joins.
        make_store: called where a view is made, in the thread that waits for it; returns its "ip:port".
        on_own_host_lost: called where another rank of this host is gone; is not meant to return.
    """

    def __init__(
        self,
        *,
        host: str,
        local: int,
        ranks_per_host: int,
        meet: Sequence[str],
        min_hosts: int,
        max_hosts: int,
        token: str,
        on_change: Callable[[str], None],
        make_store: Callable[[], str],
        silent_s: float = 2.0,
        wait_s: float = 10.0,
        on_own_host_lost: Callable[[str], None] = end_process,
    ) -> None:
        raise NotImplementedError("the interface alone: the rest follows on this branch")

    @property
    def me(self) -> Member:
        """This rank; known after `enter`."""
        raise NotImplementedError

    @property
    def view(self) -> View | None:
        """The latest view of this rank."""
        raise NotImplementedError

    def enter(self, committed: int, *, timeout_s: float) -> View:
        """Wait for the first view, or join the run that is there. `committed`: steps, as of a checkpoint.

        Raises:
            TimeoutError: no view in time; says what was waited for.
            RefusedError: the token of the run is another.
            IsolatedError: left out while it joined.
        """
        raise NotImplementedError

    def next_view(self, committed: int, *, timeout_s: float) -> View:
        """Wait for the view after the present one, which ended. Every rank of every living host must call it.

        `committed`: steps that this rank has; -1: it has not taken the state yet that the former view promised it.

        Raises:
            TimeoutError: no view in time; says what was waited for.
            IsolatedError: the others go on without this host, or nobody may.
        """
        raise NotImplementedError

    def fds(self) -> set[int]:
        """Return the sockets of this object."""
        raise NotImplementedError

    def say_goodbye(self) -> None:
        """Tell the others that this host ends as planned; its closed sockets are no loss."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread and close all sockets."""
        raise NotImplementedError
