"""Hosts of two processes on loopback that are killed, stopped and started: all that live agree, in bounded time."""

from __future__ import annotations

import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker.py")
SILENT_S = 2.0


def free_addresses(num: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


class Cluster:
    """Hosts by name, and what their ranks have said."""

    def __init__(self, ranks: int = 2, min_hosts: int = 1, wait_s: float = 1.0) -> None:
        self.ranks = ranks
        self.meet = ",".join(free_addresses(2))
        self.more = [self.meet, str(min_hosts), "4", str(SILENT_S), str(wait_s)]
        self.said: list[dict] = []
        self.heard = threading.Condition()
        self.readers: list[threading.Thread] = []
        self.processes: dict[str, list[subprocess.Popen]] = {}

    def start(self, *hosts: str) -> None:
        for host in hosts:
            command = [sys.executable, str(WORKER), host]
            self.processes[host] = [
                subprocess.Popen(
                    [*command, str(local), str(self.ranks), *self.more],
                    stdout=-1,
                    stderr=-3,
                    text=True,
                )
                for local in range(self.ranks)
            ]
            for process in self.processes[host]:
                self.readers.append(
                    threading.Thread(target=self._read, args=(process,), daemon=True)
                )
                self.readers[-1].start()

    def _read(self, process: subprocess.Popen) -> None:
        with process.stdout:
            for line in process.stdout:
                with self.heard:
                    self.said.append(json.loads(line))
                    self.heard.notify_all()

    def signal(self, which: int, *hosts: str, locals_: tuple[int, ...] = (0, 1)) -> float:
        for host in hosts:
            for local in locals_[: self.ranks]:
                self.processes[host][local].send_signal(which)
        return time.time()

    def kill(self, *hosts: str, locals_: tuple[int, ...] = (0, 1)) -> float:
        since_s = self.signal(signal.SIGKILL, *hosts, locals_=locals_)
        for host in hosts:
            for each in self.processes.pop(host):
                each.wait(10)
        return since_s

    def latest(self, host: str, local: int) -> dict:
        mine = (
            each for each in reversed(self.said) if (each["host"], each["local"]) == (host, local)
        )
        return next((each for each in mine if each["event"] != "change"), {"event": "nothing"})

    def agree_on(self, *hosts: str, within_s: float = 20.0) -> float:
        """Wait until every rank of these is in the same view of exactly these. Returns when the last came to it."""

        def latest() -> list[dict]:
            return [self.latest(host, local) for host in hosts for local in range(self.ranks)]

        def is_agreed() -> bool:
            results = latest()
            return (
                all(
                    each["event"] == "view" and set(each["hosts"]) == set(hosts) for each in results
                )
                and len({(each["number"], each["store"], each["target"]) for each in results}) == 1
            )

        with self.heard:
            assert self.heard.wait_for(is_agreed, within_s), (hosts, latest(), self.said[-20:])
            return max(each["t"] for each in latest())

    def hear(self, host: str, event: str, within_s: float = 20.0) -> None:
        """Wait until both ranks of a host have come to it."""

        def is_heard() -> bool:
            return {self.latest(host, local)["event"] for local in range(self.ranks)} == {event}

        with self.heard:
            assert self.heard.wait_for(is_heard, within_s), self.said[-20:]

    def end(self) -> None:
        for each in [each for ranks in self.processes.values() for each in ranks]:
            each.kill()
            each.wait(10)
        for reader in self.readers:
            reader.join(10)


@pytest.fixture
def cluster():
    made = Cluster()
    made.start("a", "b", "c")
    made.agree_on("a", "b", "c")
    yield made
    made.end()


def head_of(cluster: Cluster) -> str:
    return cluster.latest("a", 0)["hosts"][0]


@pytest.mark.clock
def test_killed_hosts_are_out_and_another_comes_in(cluster):
    """The coordinator. One rank of a host alone. And two hosts at once."""
    first = head_of(cluster)
    others = [host for host in "abc" if host != first]
    since_s = cluster.kill(first)
    assert cluster.agree_on(*others) - since_s < 2
    cluster.start("d")
    cluster.agree_on(*others, "d")
    cluster.kill("d", locals_=(1,))
    cluster.agree_on(*others)
    cluster.start("e", "f")
    cluster.agree_on(*others, "e", "f")
    cluster.kill(others[0], "e")
    cluster.agree_on(others[1], "f")


@pytest.mark.clock
def test_a_stopped_host_is_out_and_hears_so_when_it_goes_on(cluster):
    last = cluster.latest("a", 0)["hosts"][-1]
    others = [host for host in "abc" if host != last]
    since_s = cluster.signal(signal.SIGSTOP, last)
    assert cluster.agree_on(*others) - since_s < 2 * SILENT_S
    cluster.signal(signal.SIGCONT, last)
    cluster.hear(last, "isolated")


@pytest.mark.clock
def test_a_first_host_that_starts_again_finds_the_run_and_founds_no_second(cluster):
    """It holds the first address of `meet` again, where nobody else waits: the run calls there."""
    cluster.kill("a", "b")
    cluster.agree_on("c")
    cluster.start("a", "b")
    cluster.agree_on("a", "b", "c")
    assert head_of(cluster) == "c"


@pytest.mark.long
@pytest.mark.clock
def test_twenty_random_rounds_end_in_one_view(cluster):
    """Some are killed, some start. Also in the middle of a change, and while they join."""
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    living = ["a", "b", "c"]
    times_s = []
    names = iter(range(100))
    print("seed", seed)
    for _ in range(20):
        lost = draw.sample(living, draw.choice([1, 1, min(2, len(living) - 1)]))
        living = [host for host in living if host not in lost]
        new = [f"n{next(names)}" for _ in range(4 - len(living))][: draw.choice([1, 2, 3])]
        cut_short = draw.random() < 0.5
        if cut_short:
            cluster.start(doomed := f"x{next(names)}")
            time.sleep(draw.uniform(0, 1.5))
        since_s = cluster.kill(*lost, *([doomed] if cut_short else []))
        times_s.append(cluster.agree_on(*living) - since_s)
        cluster.start(*new)
        cluster.agree_on(*living, *new)
        living += new
    print(
        f"killed -> agreed: median {statistics.median(times_s):.3f} s, worst {max(times_s):.3f} s"
    )
