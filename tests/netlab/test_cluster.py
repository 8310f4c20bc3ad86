"""The cluster itself: links are as slow as asked, failures are told, nothing is left behind."""

import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.netlab.cluster import Cluster, ClusterError

PROGRAM = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.readlink('/proc/self/ns/net'))"
PAYLOAD_BYTES = 2_000_000


@pytest.fixture
def slow(cluster_or_skip):
    with Cluster(num_hosts=2, ranks_per_host=1, mbit_per_s=50, delay_us=10_000) as cluster:
        yield cluster


def transfer():
    """Rank 0 -> rank 1: seconds of a round trip of one byte, then of PAYLOAD_BYTES and an answer."""
    if os.environ["RANK"] == "1":
        with socket.create_server(("10.77.0.2", 4000)) as server:
            connection, _ = server.accept()
            with connection:
                connection.sendall(connection.recv(1))
                missing = PAYLOAD_BYTES
                while missing:
                    missing -= len(connection.recv(missing))
                connection.sendall(b"!")
        return None
    deadline_s = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection(("10.77.0.2", 4000), timeout=20)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    with connection:
        times_s = []
        for payload in (b"?", bytes(PAYLOAD_BYTES)):
            began_s = time.perf_counter()
            connection.sendall(payload)
            assert connection.recv(1)
            times_s.append(time.perf_counter() - began_s)
        return times_s


def fail_on_rank_one():
    os.environ["RANK"] == "1" and sys.exit("a word")
    time.sleep(60)


@pytest.mark.clock
def test_links_have_the_rate_and_the_delay(slow):
    """Below is a matter of physics and exact; above is the machine's load, so generous."""
    (round_trip_s, transfer_s), _ = slow.call(transfer)
    assert 0.020 <= round_trip_s <= 0.5
    serial_s = PAYLOAD_BYTES * 8 / 50e6
    assert serial_s <= transfer_s <= 4 * serial_s + 0.5
    (_, there), (back, _) = slow.traffic().matrix
    assert PAYLOAD_BYTES <= there <= 1.05 * PAYLOAD_BYTES
    assert back <= 0.05 * PAYLOAD_BYTES


@pytest.mark.parametrize("interleave", [False, True])
def test_ranks_of_a_host_share_a_network_and_know_their_place(cluster_or_skip, interleave):
    with Cluster(num_hosts=2, ranks_per_host=2, mbit_per_s=1000, interleave=interleave) as cluster:
        outputs = [line.split() for line in cluster.run([sys.executable, "-c", PROGRAM], timeout_s=30)]
    ranks, local_ranks, networks = zip(*outputs, strict=True)
    assert ranks == ("0", "1", "2", "3")
    assert local_ranks == (("0", "0", "1", "1") if interleave else ("0", "1", "0", "1"))
    partner = 2 if interleave else 1
    assert networks[0] == networks[partner]
    assert len(set(networks)) == 2


@pytest.mark.long
def test_what_fails_is_quoted_and_ends_the_others_and_what_never_ends_is_ended(slow):
    program = [sys.executable, "-c", f"import os, sys, time\n{inspect.getsource(fail_on_rank_one)}\nfail_on_rank_one()"]
    began_s = time.monotonic()
    with pytest.raises(ClusterError, match=r"rank 1: status 1\na word"):
        slow.run(program, timeout_s=50)
    with pytest.raises(ClusterError, match="SystemExit: a word"):
        slow.call(fail_on_rank_one, timeout_s=50)
    with pytest.raises(ClusterError, match="rank 0: still ran"):
        slow.run(["sleep", "60"], timeout_s=1)
    assert time.monotonic() - began_s < 50


def test_a_killed_owner_leaves_nothing_behind(cluster_or_skip):
    """Even SIGKILL: neither the emulator nor a rank outlives it."""
    program = (
        "from tests.netlab.cluster import Cluster\n"
        "with Cluster(num_hosts=2, ranks_per_host=1, mbit_per_s=100) as cluster:\n"
        "    print(cluster._emulator.pid, flush=True)\n"
        "    cluster.run(['sh', '-c', 'echo $$ >&2; exec sleep 60'], timeout_s=60, show_rank_zero=True)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stderr is not None
    emulator, rank = int(owner.stdout.readline()), int(owner.stderr.readline())
    assert is_alive(emulator)
    assert is_alive(rank)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    deadline_s = time.monotonic() + 10
    while (is_alive(emulator) or is_alive(rank)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_alive(emulator)
    assert not is_alive(rank)


def is_alive(pid):
    """Zombies that nobody has reaped do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
