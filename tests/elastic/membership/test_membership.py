"""Hosts of one rank, all in this process: meeting, joining, leaving, strangers. A closed socket is a death."""

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

from lightning_hybrid.elastic.membership import connections, host, membership
from lightning_hybrid.elastic.membership.connections import Connection
from lightning_hybrid.elastic.membership.host import Host
from lightning_hybrid.elastic.membership.membership import Membership
from lightning_hybrid.elastic.membership.view import IsolatedError, RefusedError, address_of
from tests.elastic.membership.test_processes import free_addresses


class Hosts:
    """Makes hosts that know one another's `meet`, and closes them."""

    def __init__(self) -> None:
        self.meet = free_addresses(3)
        self.made = []
        self.changes = []
        self.pool = ThreadPoolExecutor(8)

    def __call__(self, name: str, **more) -> Membership:
        options = {
            "local": 0,
            "ranks_per_host": 1,
            "min_hosts": 1,
            "max_hosts": 3,
            "token": "t",
            "wait_s": 10.0,
        }
        calls = {
            "on_change": lambda _, why: self.changes.append((name, why)),
            "make_store": lambda: f"of-{name}:1",
        }
        made = Membership(host=name, meet=self.meet, **{**options, **calls, **more})
        self.made.append(made)
        return made

    def enter(self, *hosts: Membership, committed: int = 0, timeout_s: float = 20):
        return self.all("enter", *hosts, committed=committed, timeout_s=timeout_s)

    def all(self, method: str, *hosts: Membership, committed: int = 0, timeout_s: float = 20):
        waiting = [
            self.pool.submit(getattr(host, method), committed, timeout_s=timeout_s)
            for host in hosts
        ]
        return [each.result(timeout_s + 5) for each in waiting]


@pytest.fixture
def hosts():
    made = Hosts()
    yield made
    for each in made.made:
        each.close()
    made.pool.shutdown()


def wait_until(condition, within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_hosts_meet_one_leaves_as_planned_one_dies_and_one_joins(hosts):
    a = hosts("a")
    b = hosts("b")
    c = hosts("c")
    first = hosts.enter(a, b, c)
    assert first[0] == first[1] == first[2]
    assert (first[0].number, set(first[0].hosts), first[0].behind) == (0, {"a", "b", "c"}, ())
    assert sorted(first[0].rank_of(each.me.id) for each in (a, b, c)) == [0, 1, 2]
    c.say_goodbye()
    c.close()
    time.sleep(0.3)
    assert not hosts.changes  # it has told so
    b.close()
    wait_until(lambda: hosts.changes)
    assert hosts.changes == [("a", "host b is lost: it closed a connection")]
    (alone,) = hosts.all("next_view", a, committed=7)
    assert (alone.hosts, alone.target, alone.store) == (("a",), 7, "of-a:1")
    d = hosts("d")
    # steps of some checkpoint, which count for nothing here
    joining = hosts.pool.submit(d.enter, 3, timeout_s=20)
    wait_until(lambda: len(hosts.changes) == 2)
    (both,) = hosts.all("next_view", a, committed=9)
    assert both == joining.result(20)
    assert (both.hosts, both.target, both.donors) == (("a", "d"), 9, (a.me.id,))
    assert (both.behind, both.reasons) == ((d.me.id,), ("host d joins",))


def test_a_goodbye_counts_when_the_connections_end_is_handled_first(hosts, monkeypatch):
    """The word comes on the leaver's connection to its peer, the end on the peer's connection to the leaver."""
    ends: list[str] = []
    unread: list[Any] = []
    has_closed = Host._has_closed

    def handle_the_end_and_then_the_word(peer: Host, key: str, place: int, is_dead: bool) -> None:
        has_closed(peer, key, place, is_dead)
        if not key:  # a connection to an address of `meet`
            return
        peer.tick(time.monotonic(), is_late=False)  # one that comes at once
        ends.append(key)
        for transport in unread:
            transport.resume_reading()

    monkeypatch.setattr(Host, "_has_closed", handle_the_end_and_then_the_word)
    a = hosts("a", max_hosts=2)
    b = hosts("b", max_hosts=2)
    hosts.enter(a, b)
    unread += [connection._transport for connection in connections_from(b, to=a)]
    is_paused = threading.Event()

    def leave_the_word_unread() -> None:
        for transport in unread:
            transport.pause_reading()
        is_paused.set()

    a._part.post(leave_the_word_unread)
    assert is_paused.wait(10)
    b.say_goodbye()
    b.close()
    wait_until(lambda: b._part.key in ends)
    wait_until(lambda: a._part.machine.lost.get(b._part.key) == "left")
    time.sleep(0.5)  # two ticks: an end that waits for a word is not taken for a death later
    assert not hosts.changes


@pytest.mark.parametrize("still_open", ["the connection of the dead host", "the connection to it"])
def test_a_death_that_one_connection_shows_is_a_loss_soon(hosts, still_open):
    """The kernel of a host that has restarted answers where something is sent, and is silent elsewhere."""
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


def open_connections(membership_of_one: Membership) -> list[Connection]:
    """Return the connections of a host. Its other sockets listen."""
    connections = [c for c in membership_of_one._part.sockets.values() if c is not None]
    return [c for c in connections if c.is_connected and c.sock.fileno() >= 0]


def break_connection(membership: Membership, connection: Connection, error_number: int) -> None:
    """End one connection by an error of its socket. The other end is not told, as on a link that is cut."""
    # the kernel says nothing to the other end while there is a copy
    kept_open = connection.sock.dup()
    kept_open.set_inheritable(False)
    KEPT_OPEN.append(kept_open)
    membership._part.post(
        connection._transport._force_close, OSError(error_number, os.strerror(error_number))
    )


KEPT_OPEN: list[socket.socket] = []  # copies of sockets, until a test ends


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


def test_a_late_member_is_waited_for_as_long_as_it_lives(hosts):
    a = hosts("a", max_hosts=2, silent_s=0.5)
    b = hosts("b", max_hosts=2, silent_s=0.5)
    hosts.enter(a, b)
    # before any notice: it has seen a sum break
    early = hosts.pool.submit(a.next_view, 4, timeout_s=20)
    wait_until(lambda: [host for host, _ in hosts.changes] == ["b"])
    time.sleep(1.5)
    assert not early.done()
    view = b.next_view(5, timeout_s=20)
    assert view == early.result(20)
    assert (set(view.hosts), view.target, view.behind) == ({"a", "b"}, 5, (a.me.id,))
    with pytest.raises(TimeoutError, match=r"no view in 0\.3 s; waited for host b"):
        hosts.pool.submit(a.next_view, 6, timeout_s=0.3).result()


def test_a_host_of_another_token_is_refused_in_words(hosts):
    a = hosts("a", wait_s=0.2)
    hosts.enter(a)
    with pytest.raises(
        RefusedError, match=r"`token` of host a \(=t\) must be that of this host \(=other\)"
    ):
        hosts("b", token="other").enter(0, timeout_s=20)


def test_fewer_than_min_hosts_wait_and_say_so(hosts):
    with pytest.raises(TimeoutError, match="enough hosts to begin one"):
        hosts("a", min_hosts=2).enter(0, timeout_s=1.5)


def test_strangers_are_cut_off_and_nobody_else(hosts):
    a = hosts("a", max_hosts=2)
    b = hosts("b", max_hosts=2)
    hosts.enter(a, b)
    ip, _, port = a.me.address.rpartition(":")
    for words in [
        b"GET / HTTP/1.1\r\n\r\n",
        b" " * 100_000,  # without an end
        b'{"kind": "hello"}\n',  # without token and key
        b"[" * 60_000 + b"\n",
    ]:
        with socket.create_connection((ip, int(port)), timeout=10) as stranger:
            stranger.sendall(words)
            assert stranger.recv(100) == b""
    time.sleep(0.3)
    assert not hosts.changes


def own_sockets():
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if (what := os.readlink(f"/proc/self/fd/{fd}")).startswith("socket"):
                found[fd] = what
    return found


def test_it_listens_on_one_address_alone(hosts):
    before = own_sockets()
    a = hosts("a", wait_s=0.2)
    hosts.enter(a)
    listening = []
    for fd, own_socket in own_sockets().items():
        if before.get(fd) == own_socket:
            continue
        with socket.socket(fileno=os.dup(fd)) as each:
            if each.family == socket.AF_INET and each.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                listening.append(each.getsockname())
    assert [f"{ip}:{port}" for ip, port in sorted(listening)] == sorted(
        [hosts.meet[0], address_of(a.me.id)]
    )


def test_a_rank_that_cannot_be_in_a_view_ends_it_for_all(hosts):
    ways = {"ranks_per_host": 2, "max_hosts": 2, "on_own_host_lost": lambda why: None}
    ranks = [hosts(name, local=local, **ways) for name in "ab" for local in (0, 1)]
    hosts.enter(*ranks)
    # it waits for the first rank of its host, and that in a group for it
    ranks[1].end_view("no groups")
    wait_until(lambda: len(hosts.changes) == 4)
    assert {why for _, why in hosts.changes} == {"no groups"}


@pytest.mark.parametrize(
    ("stopped", "words"),
    [
        (0, "the first rank of this host was silent for 1 s"),
        (1, "rank 1 of this host was silent for 1 s"),
    ],
)
def test_ranks_of_a_host_hear_each_other_often_enough_and_miss_one_that_hangs(
    hosts, stopped, words
):
    lost: dict[int, list[str]] = {0: [], 1: []}
    ways = {"ranks_per_host": 2, "max_hosts": 1, "silent_s": 0.5}
    ranks = [
        hosts("a", local=local, on_own_host_lost=lost[local].append, **ways) for local in (0, 1)
    ]
    hosts.enter(*ranks)
    time.sleep(2.5)  # each is lost after 1 s
    assert lost == {0: [], 1: []}
    goes_on = threading.Event()
    # its sockets stay open, as of a process that is stopped
    ranks[stopped]._part.post(goes_on.wait, 20)
    try:
        wait_until(lambda: lost[1 - stopped], within_s=5)
        assert lost[1 - stopped][0] == words
    finally:
        goes_on.set()


def test_a_pause_of_all_hosts_is_no_silence_of_the_others(hosts, monkeypatch):
    """The machines are suspended or moved: each finds its own clock a minute later, and has heard nobody meanwhile."""
    lost: list[str] = []
    ways = {"ranks_per_host": 2, "max_hosts": 2, "silent_s": 1.0, "on_own_host_lost": lost.append}
    hosts.enter(*[hosts(name, local=local, **ways) for name in "ab" for local in (0, 1)])
    paused_s = [0.0]
    for module in (connections, host, membership):
        monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + paused_s[0])
    for _ in range(3):
        time.sleep(0.7)  # each has looked at the clock since the former pause
        paused_s[0] += 60.0
    time.sleep(0.7)
    assert (hosts.changes, lost) == ([], [])


@pytest.mark.parametrize("error_number", [errno.EHOSTUNREACH, errno.ETIMEDOUT])
def test_an_error_of_the_network_is_no_proof_of_death(hosts, error_number):
    """The link is cut: each half gets an error for the other, and both live. One of them alone may go on."""
    a = hosts("a", max_hosts=2, silent_s=0.8)
    b = hosts("b", max_hosts=2, silent_s=0.8)
    hosts.enter(a, b)
    with pytest.MonkeyPatch.context() as cut:
        cut.setattr(Connection, "data_received", lambda connection, data: None)
        for membership_of_one in (a, b):
            for connection in open_connections(membership_of_one):
                break_connection(membership_of_one, connection, error_number)
        wait_until(lambda: len(hosts.changes) == 2)
        assert set(hosts.changes) == {
            ("a", "host b was silent for 0.8 s"),
            ("b", "host a was silent for 0.8 s"),
        }
        assert hosts.all("next_view", a)[0].hosts == ("a",)  # it holds the first address
        with pytest.raises(
            IsolatedError,
            match=r"host a cannot be heard and may go on; here are too few \(host b\)",
        ):
            b.next_view(0, timeout_s=20)


def test_an_error_of_the_network_that_passes_changes_nothing(hosts):
    a = hosts("a", max_hosts=2, silent_s=0.8)
    b = hosts("b", max_hosts=2, silent_s=0.8)
    hosts.enter(a, b)
    for membership_of_one in (a, b):
        for connection in open_connections(membership_of_one):
            break_connection(membership_of_one, connection, errno.EHOSTUNREACH)
    time.sleep(1.5)  # longer than the silence after which a host is lost: they have connected again
    assert not hosts.changes
    assert connections_from(b, to=a), "b has not connected again"


def test_a_process_of_another_user_cannot_pose_as_a_rank(hosts, monkeypatch):
    a = hosts("a", ranks_per_host=2, max_hosts=1, on_own_host_lost=lambda why: None)
    path = a._settings.path  # the name follows from the user: one who knows it may still connect
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
        assert time.monotonic() - since_s < 1.5  # less than the silence after which it is lost too
    finally:
        os.kill(worker, 9)
        os.waitpid(worker, 0)


def test_a_cut_link_leaves_the_arbiter_and_words(hosts, monkeypatch):
    """Nothing arrives any more, and nothing closes: each half takes the other for silent."""
    a = hosts("a", max_hosts=2, silent_s=0.5)
    b = hosts("b", max_hosts=2, silent_s=0.5)
    hosts.enter(a, b)
    monkeypatch.setattr(Connection, "data_received", lambda connection, data: None)
    wait_until(lambda: {host for host, _ in hosts.changes} == {"a", "b"})
    assert hosts.all("next_view", a)[0].hosts == ("a",)  # it holds the first address
    with pytest.raises(
        IsolatedError, match=r"host a cannot be heard and may go on; here are too few \(host b\)"
    ):
        b.next_view(0, timeout_s=20)


def test_no_thread_and_no_socket_is_left(hosts):
    before = own_sockets()
    a = hosts("a", wait_s=0.2)
    hosts.enter(a)
    made = set(own_sockets().items()) - set(before.items())
    assert len(made) >= 3
    a.close()
    assert not made & set(own_sockets().items())
    assert "membership" not in [thread.name for thread in threading.enumerate()]
