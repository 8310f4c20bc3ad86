"""Membership of hosts with two processes each. Hosts are killed, stopped and started, and the others agree in time."""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.ports import free_addresses

WORKER = Path(__file__).with_name("worker.py")
SILENT_S = 2.0


class Cluster:
    """Hosts by name, and the events that their ranks have reported."""

    def __init__(self, ranks: int = 2, min_hosts: int = 1, wait_s: float = 1.0) -> None:
        self.ranks = ranks
        self.meet = free_addresses(2)
        self.options = [self.meet, str(min_hosts), "4", str(SILENT_S), str(wait_s)]
        self.events: list[dict] = []
        self.heard = threading.Condition()
        self.readers: list[threading.Thread] = []
        self.processes: dict[str, list[subprocess.Popen]] = {}

    def start(self, *hosts: str) -> None:
        for host in hosts:
            self.processes[host] = []
            for local in range(self.ranks):
                process = subprocess.Popen(
                    [sys.executable, str(WORKER), host, str(local), str(self.ranks), *self.options],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                reader = threading.Thread(target=self._read, args=(process,), daemon=True)
                reader.start()
                self.processes[host].append(process)
                self.readers.append(reader)

    def _read(self, process: subprocess.Popen) -> None:
        with process.stdout:
            for line in process.stdout:
                with self.heard:
                    self.events.append(json.loads(line))
                    self.heard.notify_all()

    def signal(self, number: int, *hosts: str, locals_: tuple[int, ...] = (0, 1)) -> float:
        for host in hosts:
            for local in locals_[: self.ranks]:
                self.processes[host][local].send_signal(number)
        return time.time()

    def kill(self, *hosts: str, locals_: tuple[int, ...] = (0, 1)) -> float:
        since_s = self.signal(signal.SIGKILL, *hosts, locals_=locals_)
        for host in hosts:
            for process in self.processes.pop(host):
                process.wait(10)
        return since_s

    def latest(self, host: str, local: int) -> dict:
        """Return the latest event of a rank other than the news of a change."""
        for event in reversed(self.events):
            is_of_rank = (event["host"], event["local"]) == (host, local)
            if is_of_rank and event["event"] != "change":
                return event
        return {"event": "nothing"}

    def agree_on(self, *hosts: str, within_s: float = 20.0) -> float:
        """Wait until all ranks of these hosts share a view of exactly these, and return when the last entered it."""

        def latest() -> list[dict]:
            return [self.latest(host, local) for host in hosts for local in range(self.ranks)]

        def is_agreed() -> bool:
            views = set()
            for event in latest():
                if event["event"] != "view" or set(event["hosts"]) != set(hosts):
                    return False
                views.add((event["number"], event["store"], event["target"]))
            return len(views) == 1

        with self.heard:
            assert self.heard.wait_for(is_agreed, within_s), (hosts, latest(), self.events[-20:])
            return max(event["t"] for event in latest())

    def hear(self, host: str, event: str, within_s: float = 20.0) -> None:
        """Wait until this event is the latest of every rank of a host."""

        def is_heard() -> bool:
            return {self.latest(host, local)["event"] for local in range(self.ranks)} == {event}

        with self.heard:
            assert self.heard.wait_for(is_heard, within_s), self.events[-20:]

    def end(self) -> None:
        for processes in self.processes.values():
            for process in processes:
                process.kill()
                process.wait(10)
        for reader in self.readers:
            reader.join(10)


@pytest.fixture
def cluster():
    three_hosts = Cluster()
    three_hosts.start("a", "b", "c")
    three_hosts.agree_on("a", "b", "c")
    yield three_hosts
    three_hosts.end()


def head_of(cluster: Cluster) -> str:
    return cluster.latest("a", 0)["hosts"][0]


@pytest.mark.long
@pytest.mark.clock
def test_hosts_agree_without_killed_hosts_and_with_new_ones(cluster):
    """Hosts agree after the coordinator, then a single rank of a host, and then two hosts at once are killed."""
    coordinator = head_of(cluster)
    remaining = [host for host in "abc" if host != coordinator]
    since_s = cluster.kill(coordinator)
    assert cluster.agree_on(*remaining) - since_s < 2
    cluster.start("d")
    cluster.agree_on(*remaining, "d")
    cluster.kill("d", locals_=(1,))
    cluster.agree_on(*remaining)
    cluster.start("e", "f")
    cluster.agree_on(*remaining, "e", "f")
    cluster.kill(remaining[0], "e")
    cluster.agree_on(remaining[1], "f")


@pytest.mark.long
@pytest.mark.clock
def test_hosts_agree_without_a_stopped_host_which_is_isolated_once_it_continues(cluster):
    stopped = cluster.latest("a", 0)["hosts"][-1]
    running = [host for host in "abc" if host != stopped]
    since_s = cluster.signal(signal.SIGSTOP, stopped)
    assert cluster.agree_on(*running) - since_s < 2 * SILENT_S
    cluster.signal(signal.SIGCONT, stopped)
    cluster.hear(stopped, "isolated")


@pytest.mark.long
@pytest.mark.clock
def test_a_first_host_that_starts_again_joins_the_run_and_begins_no_second_one(cluster):
    """A restarted host holds the first `meet` address again but waits there alone, so the run must contact it."""
    cluster.kill("a", "b")
    cluster.agree_on("c")
    cluster.start("a", "b")
    cluster.agree_on("a", "b", "c")
    assert head_of(cluster) == "c"


@pytest.mark.long
@pytest.mark.clock
def test_twenty_random_rounds_end_in_one_view(cluster):
    """Hosts still agree if others are killed and started during a change or while they join."""
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
        killed = list(lost)
        if draw.random() < 0.5:  # a host that is killed while it joins
            doomed = f"x{next(names)}"
            cluster.start(doomed)
            time.sleep(draw.uniform(0, 1.5))
            killed.append(doomed)
        since_s = cluster.kill(*killed)
        times_s.append(cluster.agree_on(*living) - since_s)
        cluster.start(*new)
        cluster.agree_on(*living, *new)
        living += new
    print(
        f"killed -> agreed: median {statistics.median(times_s):.3f} s, worst {max(times_s):.3f} s"
    )
