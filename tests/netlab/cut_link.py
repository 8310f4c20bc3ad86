"""Cuts of a link during an elastic run, between hosts that are network namespaces.

third       three hosts, of which one is cut off: the others continue, and it ends
second      two hosts: the one with the first address of `meet` continues, and the other ends
neither     two hosts, neither of which has the first address of `meet`: both end
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

from tests.netlab import recovery
from tests.netlab.cluster import CLONE_NEWNET, Cluster

KINDS = {"third": "abc", "second": "ab", "neither": "ab"}


def rank_main(
    host: str, local: int, port: int, options: dict[str, Any], folder: str, part: dict[str, Any]
) -> None:
    """Train on one rank of a host that is a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(part["namespaces"][host]) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into the namespace of {host}")
    recovery.rank_main(host, local, port, options, folder, part)


class LinkedHosts(recovery.Hosts):
    """Hosts of an elastic run that are network namespaces."""

    main = staticmethod(rank_main)


def cut(kind: str, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Cut off the last host. Return when the others made a step, and when and how hosts ended."""
    names = KINDS[kind]
    num_hosts = len(names)
    if kind == "neither":
        num_hosts += 1  # its address comes first
    with Cluster(num_hosts=num_hosts, ranks_per_host=options["ranks"], mbit_per_s=1000) as net:
        addresses = [f"{net.address(host)}:29400" for host in range(len(names))]
        if kind == "neither":
            addresses.insert(0, f"{net.address(len(names))}:29400")
        meet = ",".join(addresses)
        part = {"end": 10**6, "meet": meet}
        part["namespaces"] = {name: net.namespace(host) for host, name in enumerate(names)}
        run = LinkedHosts(options | {"hosts": len(names)}, folder, part)
        for name in names:
            run.start(name)
        run.wait(
            "all hosts",
            lambda: all(all(run.steps(name, hosts=len(names)).values()) for name in names),
        )
        time.sleep(random.Random(str(folder)).random())
        net.spoil_link(len(names) - 1, loss=1.0)
        began_s = time.monotonic()
        if kind == "neither":
            go_on = ""
        else:
            go_on = names[:-1]
        row: dict[str, Any] = {"kind": kind}

        def is_over() -> bool:
            run.look()
            ended = {r["host"]: r for r in run.rows if r["event"] == "error"}
            after = []
            for name in go_on:
                after += run.steps(name, since_s=began_s, hosts=len(go_on)).values()
            if not (all(after) and ended.keys() == set(names) - set(go_on)):
                return False
            if after:
                row["next_step_s"] = max(rows[0]["t"] for rows in after) - began_s
            row["ended_s"] = max(r["t"] for r in ended.values()) - began_s
            row["errors"] = {host: r["error"] for host, r in ended.items()}
            return True

        ends_s = time.monotonic() + 60
        while not is_over() and time.monotonic() < ends_s:
            time.sleep(0.01)
        step_rows = [r for r in run.rows if r["event"] == "step"]
        row["with_two_digests"] = recovery.num_with_two_digests(step_rows)
        for name in names:
            run.end(name)
        return row


def main() -> None:
    """Cut links, and print a row for each cut."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--each", type=int, default=3)
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(
        ["lightning.pytorch", "lightning_hybrid", "recipes.datasets.digits", "tests.preloaded"]
    )
    options = {
        "ranks": arguments.ranks,
        "with": [],
        "precision": "16-true",
        "width": 256,
        "silent_s": 2.0,
        "val_s": 0.02,
    }
    for number in range(arguments.each):
        for kind in KINDS:
            print(json.dumps(cut(kind, options, arguments.out / f"{kind}_{number}")), flush=True)


if __name__ == "__main__":
    main()
