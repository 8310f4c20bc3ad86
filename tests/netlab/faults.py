"""``tests/evidence/faults`` on emulated hosts, including faults of links.

    python -m tests.netlab.faults --hosts 2 --ranks 2 only='[rank dies]'

Arguments after the options are passed to the recipe.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType

from tests.evidence.faults.world import OneHost
from tests.netlab.cluster import CLONE_NEWNET, Cluster, why_not

CLONE_NEWUTS = 0x04000000


class EmulatedHosts(OneHost):
    """Hosts of a ``Cluster``, each with its own name, and with ranks assigned host by host."""

    has_links = True

    def __init__(
        self,
        num_hosts: int = 2,
        ranks_per_host: int = 2,
        mbit_per_s: float = 100.0,
        delay_us: float = 200.0,
    ) -> None:
        self.num_hosts = num_hosts
        self.ranks_per_host = ranks_per_host
        self._cluster = Cluster(
            num_hosts=num_hosts,
            ranks_per_host=ranks_per_host,
            mbit_per_s=mbit_per_s,
            delay_us=delay_us,
        )
        self._num_runs = 0

    def __enter__(self) -> EmulatedHosts:
        self._cluster.__enter__()
        return self

    def __exit__(
        self,
        kind: type | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._cluster.close()

    def host_name(self, host: int) -> str:
        return f"host{host}"

    def enter(self, rank: int) -> Callable[[], None]:
        host = self.host_of(rank)
        return partial(_enter, self._cluster.namespace(host), self.host_name(host))

    def network(self) -> dict[str, str]:
        self._num_runs += 1
        for host in range(self.num_hosts):
            self.spoil_link(host)
        port = str(29500 + self._num_runs)
        return {
            "MASTER_ADDR": self._cluster.address(0),
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def spoil_link(self, host: int, *, loss: float = 0.0, mbit_per_s: float | None = None) -> None:
        self._cluster.spoil_link(host, loss=loss, mbit_per_s=mbit_per_s)


def _enter(namespace: str, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"no way into {namespace}")
    if libc.sethostname(name.encode(), len(name)):
        raise OSError(ctypes.get_errno(), f"sethostname({name})")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.netlab.faults", description=__doc__.partition(",")[0]
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("overrides", nargs="*", help="of conf/evidence/faults.yaml")
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(f"error: {reason}")
    world = ["world._target_=tests.netlab.faults.EmulatedHosts", "~world.num_ranks"]
    world += [f"+world.num_hosts={asked.hosts}", f"+world.ranks_per_host={asked.ranks}"]
    sys.exit(
        subprocess.run(
            [sys.executable, "-m", "tests.evidence.faults", *world, *asked.overrides], check=False
        ).returncode
    )


if __name__ == "__main__":
    main()
