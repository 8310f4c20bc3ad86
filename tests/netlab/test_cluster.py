"""Emulated cluster: links have the requested speed, failures are reported, and nothing is left behind."""

import os
import socket
import sys
import time

import pytest

from tests.netlab.cluster import Cluster

PROGRAM = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.readlink('/proc/self/ns/net'))"
PAYLOAD_BYTES = 2_000_000


@pytest.fixture
def slow(cluster_or_skip):
    with Cluster(num_hosts=2, ranks_per_host=1, mbit_per_s=50, delay_us=10_000) as cluster:
        yield cluster


def transfer():
    """Return the seconds of a one-byte round trip, and of a transfer of PAYLOAD_BYTES from rank 0 to rank 1."""
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


@pytest.mark.clock
def test_links_have_the_rate_and_the_delay(slow):
    """Lower bounds follow from physics and are exact. Upper bounds are generous because of the machine's load."""
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
        outputs = [
            line.split() for line in cluster.run([sys.executable, "-c", PROGRAM], timeout_s=30)
        ]
    ranks, local_ranks, networks = zip(*outputs, strict=True)
    assert ranks == ("0", "1", "2", "3")
    assert local_ranks == (("0", "0", "1", "1") if interleave else ("0", "1", "0", "1"))
    if interleave:
        partner = 2
    else:
        partner = 1
    assert networks[0] == networks[partner]
    assert len(set(networks)) == 2
