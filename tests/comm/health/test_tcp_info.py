"""Diagnosis of a silent host from the kernel's view of its connections."""

import socket
from dataclasses import replace

import pytest

from lightning_hybrid.comm.health import tcp_info
from lightning_hybrid.comm.health.diagnosis import RankStatus, diagnose
from lightning_hybrid.comm.health.tcp_info import MARGIN_S, TcpConnection, liveness_by_address

LINE = TcpConnection(
    peer="10.0.0.2", port=29500, local="10.0.0.1", is_open=True, heard_s=3.0, is_waiting=True
)
HERE = RankStatus(num_submitted=2, order="a", place="bucket 1 in stage `ring`", is_inside=True)
HOSTS = ["a", "a", "b", "b"]
ADDRESSES = [["10.0.0.1"]] * 2 + [["10.0.0.2"]] * 2


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "slow"),
        ({"heard_s": 10.0}, "cut"),
        ({"is_waiting": False}, "taken"),
        ({"is_waiting": False, "heard_s": 10.0}, "idle"),
        ({"heard_s": 10.0 - MARGIN_S}, "cut"),  # sent before the wait began
    ],
    ids=str,
)
def test_data_that_waits_and_what_was_heard_separate_slow_from_cut_from_stopped(changes, word):
    line = replace(LINE, **changes)
    assert liveness_by_address([line], waited_s=10.0) == {"10.0.0.2": (word, line.heard_s)}


def test_one_connection_that_hears_something_says_that_the_host_lives_and_a_closed_one_nothing():
    results = [replace(LINE, heard_s=20.0), LINE, replace(LINE, peer="10.0.0.3", heard_s=20.0)]
    results.append(replace(LINE, peer="10.0.0.4", is_open=False))
    assert liveness_by_address(results, waited_s=10.0) == {
        "10.0.0.2": ("slow", 3.0),
        "10.0.0.3": ("cut", 20.0),
    }


def diagnosis(statuses):
    return diagnose("Rank 0 saw it", statuses, HOSTS, ADDRESSES)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("slow", "host b is alive and was last heard 3.0 s ago, but its link is so slow"),
        ("taken", "host b is alive, was last heard 3.0 s ago and has acknowledged all data"),
        ("cut", "host b has sent nothing for 3 s, not even an acknowledgement"),
        ("idle", "host b has sent nothing for 3 s, and its connections are not closed"),
    ],
)
def test_a_host_that_may_live_is_not_called_dead(word, words):
    text = diagnosis([replace(HERE, liveness={"10.0.0.2": (word, 3.0)}), HERE, None, None])
    assert text.startswith(f"comm: ranks 2, 3 do not answer: {words}")
    assert text.endswith("Ranks 2, 3 are on host b.")
    assert "dead" not in text


LIVELY = replace(HERE, liveness={"10.0.0.2": ("slow", 3.0)})


@pytest.mark.parametrize(
    "statuses",
    [
        [HERE, HERE, None, None],
        [HERE, HERE, HERE, None],
        [HERE, None, HERE, HERE],
        [LIVELY, HERE, HERE, None],
    ],
)
def test_of_a_rank_whose_host_answers_or_says_nothing_no_rank_knows_more(statuses):
    assert "dead, stopped or unreachable" in diagnosis(statuses)
    assert [statuse and RankStatus.from_json(statuse.to_json()) for statuse in statuses] == statuses


def test_the_kernel_says_what_was_sent_and_not_read_and_who_hung_up():
    """A stopped process reads nothing, but its kernel still acknowledges data that fits into the buffer."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()

    def line_to_server():
        return next(line for line in tcp_info.tcp_connections() if line.port == port)

    client.setblocking(False)
    assert client.send(b"x" * 1000) == 1000
    assert line_to_server().is_open
    assert not line_to_server().is_waiting
    assert line_to_server().heard_s < 5
    assert client.gettimeout() == 0.0  # inspecting a descriptor does not change it
    accepted.close()  # with unread data, so the connection is reset
    assert not [line for line in tcp_info.tcp_connections() if line.port == port and line.is_open]
    client.close()
    server.close()


def test_own_addresses_are_those_that_others_may_know_and_with_a_default_timeout_nothing_is_looked_at(
    monkeypatch,
):
    """With a default timeout, Python would make the shared descriptor non-blocking."""
    socket.setdefaulttimeout(3.0)
    try:
        assert tcp_info.tcp_connections() == []
    finally:
        socket.setdefaulttimeout(None)
    lines = [LINE, replace(LINE, local="127.0.0.1"), replace(LINE, local="10.1.0.1"), LINE]
    monkeypatch.setattr(tcp_info, "tcp_connections", lambda: lines)
    assert tcp_info.own_addresses() == ["10.0.0.1", "10.1.0.1"]
