"""Membership of single-rank hosts in one process: first meeting, joins, exits, strangers.

In these tests a closed socket stands for a death.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from lightning_hybrid.elastic.membership import connections, host
from lightning_hybrid.elastic.membership import membership as membership_module
from lightning_hybrid.elastic.membership.connections import Connection
from lightning_hybrid.elastic.membership.host import Host
from lightning_hybrid.elastic.membership.membership import Membership
from lightning_hybrid.elastic.membership.view import IsolatedError, RefusedError, address_of
from tests.ports import free_addresses


class Hosts:
    """Factory of hosts that share their `meet` addresses. It records their changes and closes them."""

    def __init__(self) -> None:
        self.meet = free_addresses(3).split(",")
        self.memberships = []
        self.changes = []
        self.pool = ThreadPoolExecutor(8)

    def __call__(self, name: str, **options) -> Membership:
        defaults = {
            "local": 0,
            "ranks_per_host": 1,
            "min_hosts": 1,
            "max_hosts": 3,
            "token": "t",
            "wait_s": 10.0,
            "on_change": lambda _, why: self.changes.append((name, why)),
            "make_store": lambda: f"of-{name}:1",
        }
        membership = Membership(host=name, meet=self.meet, **{**defaults, **options})
        self.memberships.append(membership)
        return membership

    def enter(self, *hosts: Membership, committed: int = 0, timeout_s: float = 20):
        return self.all("enter", *hosts, committed=committed, timeout_s=timeout_s)

    def all(self, method: str, *hosts: Membership, committed: int = 0, timeout_s: float = 20):
        futures = [
            self.pool.submit(getattr(host, method), committed, timeout_s=timeout_s)
            for host in hosts
        ]
        return [future.result(timeout_s + 5) for future in futures]


@pytest.fixture
def hosts():
    factory = Hosts()
    yield factory
    for membership in factory.memberships:
        membership.close()
    factory.pool.shutdown()


def wait_until(condition, within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_hosts_meet_one_leaves_as_planned_one_dies_and_one_joins(hosts):
    a = hosts("a")
    b = hosts("b")
    c = hosts("c")
    view_of_a, view_of_b, view_of_c = hosts.enter(a, b, c)
    assert view_of_a == view_of_b == view_of_c
    assert view_of_a.number == 0
    assert set(view_of_a.hosts) == {"a", "b", "c"}
    assert view_of_a.behind == ()
    assert sorted(view_of_a.rank_of(host.me.id) for host in (a, b, c)) == [0, 1, 2]

    c.say_goodbye()
    c.close()
    time.sleep(0.3)
    assert not hosts.changes, "a host that has said goodbye is not lost"
    b.close()
    wait_until(lambda: hosts.changes)
    assert hosts.changes == [("a", "host b is lost: it closed a connection")]
    (alone,) = hosts.all("next_view", a, committed=7)
    assert (alone.hosts, alone.target, alone.store) == (("a",), 7, "of-a:1")

    d = hosts("d")
    # The steps come from some checkpoint and do not matter here.
    joining = hosts.pool.submit(d.enter, 3, timeout_s=20)
    wait_until(lambda: len(hosts.changes) == 2)
    (both,) = hosts.all("next_view", a, committed=9)
    assert both == joining.result(20)
    assert (both.hosts, both.target, both.donors) == (("a", "d"), 9, (a.me.id,))
    assert (both.behind, both.reasons) == ((d.me.id,), ("host d will join",))


def test_a_goodbye_counts_when_the_connections_end_is_handled_first(hosts, monkeypatch):
    """A planned exit is recognized even if a host handles the end of one connection before the goodbye on another."""
    ends: list[str] = []
    unread: list[Any] = []
    has_closed = Host._has_closed

    def handle_the_end_and_then_the_goodbye(
        peer: Host, key: str, address_index: int, is_dead: bool
    ) -> None:
        has_closed(peer, key, address_index, is_dead)
        if not key:  # a connection to an address of `meet`
            return
        peer.tick(time.monotonic(), is_late=False)  # a tick that comes immediately
        ends.append(key)
        for transport in unread:
            transport.resume_reading()

    monkeypatch.setattr(Host, "_has_closed", handle_the_end_and_then_the_goodbye)
    a = hosts("a", max_hosts=2)
    b = hosts("b", max_hosts=2)
    hosts.enter(a, b)
    unread += [connection._transport for connection in connections_from(b, to=a)]
    is_paused = threading.Event()

    def leave_the_goodbye_unread() -> None:
        for transport in unread:
            transport.pause_reading()
        is_paused.set()

    a._part.post(leave_the_goodbye_unread)
    assert is_paused.wait(10)
    b.say_goodbye()
    b.close()
    wait_until(lambda: b._part.key in ends)
    wait_until(lambda: a._part.machine.lost.get(b._part.key) == "left")
    # two ticks: an end that waits for a goodbye must not be taken for a death later
    time.sleep(0.5)
    assert not hosts.changes


@pytest.mark.parametrize("still_open", ["the connection of the dead host", "the connection to it"])
def test_a_death_that_one_connection_shows_is_a_loss_soon(hosts, still_open):
    """A restarted host's kernel resets only connections on which something is sent, so one reset must suffice."""
    a = hosts("a", max_hosts=2, silent_s=4.0)
    b = hosts("b", max_hosts=2, silent_s=4.0)
    hosts.enter(a, b)
    ended = [a._part._peers[b._part.key]]
    if still_open == "the connection to it":
        ended = connections_from(b, to=a)
    since_s = time.monotonic()
    for connection in ended:
        break_connection(a, connection, errno.ECONNRESET)
    wait_until(lambda: ("a", "host b is lost: it closed a connection") in hosts.changes)
    assert time.monotonic() - since_s < 2.5, "a closed connection was taken for silence"


def connections_from(leaver: Membership, *, to: Membership) -> list[Connection]:
    """Return the connections at one host that another host has opened."""
    peer = to._part
    outward = [*peer._peers.values(), *peer._asked.values()]
    return [
        open_connection
        for open_connection in open_connections(to)
        if open_connection.peer == leaver._part.key and open_connection not in outward
    ]


def open_connections(membership: Membership) -> list[Connection]:
    """Return the open connections of a host, without its listening sockets."""
    connections = [c for c in membership._part.sockets.values() if c is not None]
    return [c for c in connections if c.is_connected and c.sock.fileno() >= 0]


def break_connection(membership: Membership, connection: Connection, error_number: int) -> None:
    """Fail one connection with a socket error. As on a cut link, the other end does not notice."""
    # While a copy of the socket exists, the kernel does not close the connection to the other end.
    kept_open = connection.sock.dup()
    kept_open.set_inheritable(False)
    KEPT_OPEN.append(kept_open)
    membership._part.post(
        connection._transport._force_close, OSError(error_number, os.strerror(error_number))
    )


KEPT_OPEN: list[socket.socket] = []  # copies of sockets, kept until the test ends


@pytest.fixture(autouse=True)
def copies_of_sockets_end():
    yield
    while KEPT_OPEN:
        KEPT_OPEN.pop().close()


def test_the_first_meeting_takes_the_latest_checkpoint_of_all(hosts):
    a = hosts("a", max_hosts=2)
    b = hosts("b", max_hosts=2)
    waiting = hosts.pool.submit(a.enter, 3, timeout_s=20)
    view = b.enter(5, timeout_s=20)
    assert view == waiting.result(20)
    assert (view.target, view.donors, view.behind) == (5, (b.me.id,), (a.me.id,))


def test_hosts_wait_for_a_late_member_as_long_as_it_lives(hosts):
    a = hosts("a", max_hosts=2, silent_s=0.5)
    b = hosts("b", max_hosts=2, silent_s=0.5)
    hosts.enter(a, b)
    # It saw a failed all-reduce before it received any notice.
    early = hosts.pool.submit(a.next_view, 4, timeout_s=20)
    wait_until(lambda: [host for host, _ in hosts.changes] == ["b"])
    time.sleep(1.5)
    assert not early.done()
    view = b.next_view(5, timeout_s=20)
    assert view == early.result(20)
    assert (set(view.hosts), view.target, view.behind) == ({"a", "b"}, 5, (a.me.id,))
    with pytest.raises(TimeoutError, match=r"within `timeout` \(=0\.3 s\)\. Waited for host b"):
        hosts.pool.submit(a.next_view, 6, timeout_s=0.3).result()


def test_a_host_with_another_token_is_refused_by_a_message_with_both_tokens(hosts):
    a = hosts("a", wait_s=0.2)
    hosts.enter(a)
    with pytest.raises(RefusedError, match="host a has the settings t, but this host has other"):
        hosts("b", token="other").enter(0, timeout_s=20)


def test_fewer_than_min_hosts_time_out_with_the_reason(hosts):
    with pytest.raises(TimeoutError, match="enough hosts to begin one"):
        hosts("a", min_hosts=2).enter(0, timeout_s=1.5)


def test_connections_of_strangers_are_closed_and_no_others(hosts):
    a = hosts("a", max_hosts=2)
    b = hosts("b", max_hosts=2)
    hosts.enter(a, b)
    ip, _, port = a.me.address.rpartition(":")
    for request in [
        b"GET / HTTP/1.1\r\n\r\n",
        b" " * 100_000,  # without a line end
        b'{"kind": "hello"}\n',  # without token and key
        b"[" * 60_000 + b"\n",
    ]:
        with socket.create_connection((ip, int(port)), timeout=10) as stranger:
            stranger.sendall(request)
            assert stranger.recv(100) == b""
    time.sleep(0.3)
    assert not hosts.changes


def sockets_of_this_process():
    """Return the names of open sockets, by file descriptor."""
    sockets = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket"):
                sockets[fd] = name
    return sockets


def test_a_host_listens_on_its_meet_address_and_one_more_alone(hosts):
    before = sockets_of_this_process()
    a = hosts("a", wait_s=0.2)
    hosts.enter(a)
    listening = []
    for fd, name in sockets_of_this_process().items():
        if before.get(fd) == name:
            continue
        with socket.socket(fileno=os.dup(fd)) as copy:
            is_ip = copy.family == socket.AF_INET
            if is_ip and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ip, port = copy.getsockname()
                listening.append(f"{ip}:{port}")
    assert sorted(listening) == sorted([hosts.meet[0], address_of(a.me.id)])


def test_a_rank_that_cannot_be_in_a_view_ends_it_for_all(hosts):
    options = {"ranks_per_host": 2, "max_hosts": 2, "on_own_host_lost": lambda why: None}
    ranks = [hosts(name, local=local, **options) for name in "ab" for local in (0, 1)]
    hosts.enter(*ranks)
    # The rank waits for the first rank of its host, which in turn waits for it in a group.
    ranks[1].end_view("no groups")
    wait_until(lambda: len(hosts.changes) == 4)
    assert {why for _, why in hosts.changes} == {"no groups"}


@pytest.mark.parametrize(
    ("stopped", "message"),
    [
        (0, "the first rank of this host was silent for 1 s"),
        (1, "rank 1 of this host was silent for 1 s"),
    ],
)
def test_ranks_of_a_host_hear_each_other_often_enough_and_miss_one_that_hangs(
    hosts, stopped, message
):
    lost: dict[int, list[str]] = {0: [], 1: []}
    options = {"ranks_per_host": 2, "max_hosts": 1, "silent_s": 0.5}
    ranks = [
        hosts("a", local=local, on_own_host_lost=lost[local].append, **options) for local in (0, 1)
    ]
    hosts.enter(*ranks)
    time.sleep(2.5)  # each rank would be lost after 1 s
    assert lost == {0: [], 1: []}
    continues = threading.Event()
    # Its sockets stay open, like those of a stopped process.
    ranks[stopped]._part.post(continues.wait, 20)
    try:
        wait_until(lambda: lost[1 - stopped], within_s=5)
        assert lost[1 - stopped][0] == message
    finally:
        continues.set()


def test_a_pause_of_all_hosts_is_no_silence_of_the_others(hosts, monkeypatch):
    """Hosts do not declare each other silent after a pause of all machines, when every clock jumps by a minute."""
    lost: list[str] = []
    options = {"ranks_per_host": 2, "max_hosts": 2, "silent_s": 1.0}
    options["on_own_host_lost"] = lost.append
    hosts.enter(*[hosts(name, local=local, **options) for name in "ab" for local in (0, 1)])
    paused_s = [0.0]
    for module in (connections, host, membership_module):
        monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + paused_s[0])
    for _ in range(3):
        time.sleep(0.7)  # each host has read the clock since the last pause
        paused_s[0] += 60.0
    time.sleep(0.7)
    assert (hosts.changes, lost) == ([], [])


@pytest.mark.parametrize("error_number", [errno.EHOSTUNREACH, errno.ETIMEDOUT])
def test_an_error_of_the_network_is_no_proof_of_death(hosts, error_number):
    """When a link is cut, both hosts get an error for the other and both are alive. Only one of them may continue."""
    a = hosts("a", max_hosts=2, silent_s=0.8)
    b = hosts("b", max_hosts=2, silent_s=0.8)
    hosts.enter(a, b)
    with pytest.MonkeyPatch.context() as cut:
        cut.setattr(Connection, "data_received", lambda connection, data: None)
        for membership in (a, b):
            for connection in open_connections(membership):
                break_connection(membership, connection, error_number)
        wait_until(lambda: len(hosts.changes) == 2)
        assert set(hosts.changes) == {
            ("a", "host b was silent for 0.8 s"),
            ("b", "host a was silent for 0.8 s"),
        }
        assert hosts.all("next_view", a)[0].hosts == ("a",)  # it holds the first address
        with pytest.raises(
            IsolatedError,
            match=r"host a cannot be reached but may continue, and the reachable hosts \(host b\) are too few",
        ):
            b.next_view(0, timeout_s=20)


def test_an_error_of_the_network_that_passes_changes_nothing(hosts):
    a = hosts("a", max_hosts=2, silent_s=0.8)
    b = hosts("b", max_hosts=2, silent_s=0.8)
    hosts.enter(a, b)
    for membership in (a, b):
        for connection in open_connections(membership):
            break_connection(membership, connection, errno.EHOSTUNREACH)
    # longer than the silence after which a host counts as lost: they have reconnected
    time.sleep(1.5)
    assert not hosts.changes
    assert connections_from(b, to=a), "b has not connected again"


def test_a_process_of_another_user_cannot_pose_as_a_rank(hosts, monkeypatch):
    a = hosts("a", ranks_per_host=2, max_hosts=1, on_own_host_lost=lambda why: None)
    # its name depends on the user; someone who knows the name may still connect
    path = a._settings.path
    greeting = json.dumps({"kind": "hello", "local": 1}).encode() + b"\n"

    def answer_to_a_rank() -> bytes:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(10)
            stranger.connect(path)
            stranger.sendall(greeting)
            return stranger.recv(1000)

    with monkeypatch.context() as as_another_user:
        own_uid = os.getuid()
        as_another_user.setattr(os, "getuid", lambda: own_uid + 1)
        assert answer_to_a_rank() == b""
    assert not a._part._ranks
    assert json.loads(answer_to_a_rank())["kind"] == "hello"


def test_a_forked_worker_does_not_hide_a_death(hosts):
    a = hosts("a", max_hosts=2)
    b = hosts("b", max_hosts=2)
    hosts.enter(a, b)
    worker = os.fork()
    if not worker:
        time.sleep(30)
        os._exit(0)
    try:
        since_s = time.monotonic()
        b.close()
        wait_until(lambda: hosts.changes)
        # shorter than the silence after which the host would count as lost anyway
        assert time.monotonic() - since_s < 1.5
    finally:
        os.kill(worker, 9)
        os.waitpid(worker, 0)


def test_after_a_cut_the_host_of_the_first_address_continues_and_the_other_is_isolated(
    hosts, monkeypatch
):
    """On a cut that closes no connection, each half considers the other silent, and only one continues."""
    a = hosts("a", max_hosts=2, silent_s=0.5)
    b = hosts("b", max_hosts=2, silent_s=0.5)
    hosts.enter(a, b)
    monkeypatch.setattr(Connection, "data_received", lambda connection, data: None)
    wait_until(lambda: {host for host, _ in hosts.changes} == {"a", "b"})
    assert hosts.all("next_view", a)[0].hosts == ("a",)  # it holds the first address
    with pytest.raises(
        IsolatedError,
        match=r"host a cannot be reached but may continue, and the reachable hosts \(host b\) are too few",
    ):
        b.next_view(0, timeout_s=20)


def test_a_closed_host_leaves_no_thread_and_no_socket(hosts):
    before = sockets_of_this_process()
    a = hosts("a", wait_s=0.2)
    hosts.enter(a)
    opened = set(sockets_of_this_process().items()) - set(before.items())
    assert len(opened) >= 3
    a.close()
    assert not opened & set(sockets_of_this_process().items())
    assert "membership" not in [thread.name for thread in threading.enumerate()]
