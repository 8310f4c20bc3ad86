"""The first rank of a host: it speaks for its host with those of the others, and passes on to its own ranks."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from time import monotonic
from typing import Any

from lightning_hybrid.comm.membership.connection import (
    Connection,
    MalformedError,
    listen,
    listen_at_path,
    own_ip_towards,
    split,
)
from lightning_hybrid.comm.membership.event_loop import EventLoop
from lightning_hybrid.comm.membership.view import Settings, address_of, host_key, name_of
from lightning_hybrid.comm.membership.view_change import ViewChange

log = logging.getLogger(__name__)

Deliver = Callable[[str, Any], None]


class Host:
    """What the first rank of a host does besides its own part.

    `deliver` gets, in the thread of the sockets: `("view", proposal)`, `("change", why)`, `("store", "")` where one is
    to be given, `("lost", why)` where a rank of this host is gone, `("isolated", why)` and `("refused", why)`.
    """

    def __init__(self, settings: Settings, deliver: Deliver) -> None:
        self._settings, self._deliver = settings, deliver
        self._place: int | None = None
        at_meet: socket.socket | None = None
        for place, address in enumerate(settings.meet):
            if at_meet is None and (at_meet := listen(split(address))):
                self._place = place
        ip = at_meet.getsockname()[0] if at_meet else own_ip_towards(settings.meet[0])
        at_own = listen((ip, 0))
        at_path = listen_at_path(settings.path)
        assert at_own is not None
        self.key = host_key(settings.host, f"{ip}:{at_own.getsockname()[1]}", self._place, secrets.token_hex(4))
        self.machine = ViewChange(
            self.key,
            ranks_per_host=settings.ranks_per_host,
            min_hosts=settings.min_hosts,
            max_hosts=settings.max_hosts,
        )
        self.waits_for = self.machine.waits_for
        self._peers: dict[str, Connection] = {}  # to send: by key; each other host has its own to here
        self._seen_s: dict[str, float] = {}  # when a word of it came
        self._ranks: dict[int, Connection] = {}  # of this host
        self._asked: dict[int, Connection] = {}  # by place in `meet`
        self._answers: dict[int, tuple[str, bool, float]] = {}  # whom to join there, whether it runs, when it said so
        self._refused: set[int] = set()  # places where no one listens
        self._since_s = 0.0  # since when this host asks, or its lobby has not grown
        self._num_waiting = 0
        self._has_asked_for_store = False
        self.loop = EventLoop(
            "membership",
            tick_s=settings.tick_s,
            late_s=settings.silent_s / 2,
            on_message=self._message,
            on_end=self._ended,
            on_tick=self._tick,
            on_crash=lambda error: deliver("isolated", f"its own thread failed: {error!r}"),
        )
        for each in (at_meet, at_own, at_path):
            if each:
                self.loop.listen(each)

    # ---- the caller of this rank -------------------------------------------------------------------------------------

    def come(self, committed: int) -> None:
        """Say that this rank waits for a view."""
        self.loop.post(lambda: self._come(0, committed))

    def give_store(self, address: str) -> None:
        """Give the store that was asked for."""

        def give() -> None:
            self._has_asked_for_store = False
            self.machine.give_store(address)
            self._act()

        self.loop.post(give)

    def say_goodbye(self) -> None:
        """Leave as planned."""

        def leave() -> None:
            self.machine.leave()
            for each in self._ranks.values():
                self.loop.send(each, kind="bye")
            self._act()

        self.loop.post(leave)

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _come(self, local: int, committed: int) -> None:
        self._since_s = monotonic()
        self.machine.come(local, committed)
        self._act()

    def _act(self) -> None:
        """Do what the machine says."""
        while self.machine.out:
            what, *rest = self.machine.out.pop(0)
            if what == "send":
                self.loop.send(self._peer(rest[0]), **rest[1])
                continue
            self._tell(what, rest[0])
        if self.machine.wants_store and not self._has_asked_for_store:
            self._has_asked_for_store = True
            self._deliver("store", "")

    def _tell(self, what: str, value: Any) -> None:
        for each in list(self._ranks.values()):
            self.loop.send(each, kind=what, value=value)
        self._deliver(what, value)

    def _peer(self, host: str) -> Connection:
        if host not in self._peers:
            self._peers[host] = self._connect(address_of(host), host)
        return self._peers[host]

    def _connect(self, address: str, peer: str) -> Connection:
        connection = self.loop.add(Connection.to(address))
        connection.is_trusted, connection.peer = True, peer
        self.loop.send(connection, kind="hello", token=self._settings.token, key=self.key)
        return connection

    def _message(self, connection: Connection, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if not connection.is_trusted:
            self._greet(connection, message)
        elif connection.sock.family == socket.AF_UNIX:
            self._message_of_rank(connection, message)
        elif connection is self._peers.get(connection.peer) or connection in self._asked.values():
            if kind == "refused":
                self._tell("refused", message["why"])
            elif kind == "at" and not self.machine.run:
                place = list(self._asked.values()).index(connection)
                self._answers[list(self._asked)[place]] = (message["host"], message["is_running"], monotonic())
            elif kind != "at":
                raise MalformedError(f"{kind} where only answers come")
        else:
            self._seen_s[connection.peer] = monotonic()
            if kind == "ask" and not self.machine.is_over:
                self._tell_where(connection)
            elif kind == "at" and not self.machine.run:
                self._answers[-1] = (message["host"], message["is_running"], monotonic())
            elif kind == "join":
                self._join(connection.peer, [int(step) for step in message["committed"]])
            elif kind not in ("ask", "at", "alive"):
                self.machine.receive(connection.peer, message)
                self._act()

    def _greet(self, connection: Connection, message: dict[str, Any]) -> None:
        if message["kind"] != "hello":
            raise MalformedError("no greeting")
        if connection.sock.family == socket.AF_UNIX:
            credentials = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            local = int(message["local"])
            if struct.unpack("3i", credentials)[1] != os.getuid() or local in self._ranks or local == 0:
                raise MalformedError(f"local rank {local} is another user's, or there already")
            self._ranks[local] = connection
            self._seen_s[str(local)] = monotonic()
            self.loop.send(connection, kind="hello", key=self.key)
        elif message["token"] != self._settings.token:
            mine, other = self._settings.token, str(message["token"])
            why = f"`token` of host {self._settings.host} (={mine}) must be that of this host (={other})"
            log.warning("elastic: refused host %s: its `token` is %s, and not %s", message["key"], other, mine)
            self.loop.send(connection, kind="refused", why=f"{why}: devices, `max_hosts` or modules differ")
            return
        else:
            connection.peer = str(message["key"])
        connection.is_trusted = True

    def _message_of_rank(self, connection: Connection, message: dict[str, Any]) -> None:
        local = next((local for local, each in self._ranks.items() if each is connection), 0)
        self._seen_s[str(local)] = monotonic()
        if local and message["kind"] == "come":
            self._come(local, int(message["committed"]))
        elif local and message["kind"] == "bye":
            del self._ranks[local]

    def _ended(self, connection: Connection, is_dead: bool) -> None:
        for local, each in self._ranks.items():
            if each is connection and not self.machine.is_over:
                self._deliver("lost", f"rank {local} of this host is gone")
        for place, each in list(self._asked.items()):
            if each is connection:
                del self._asked[place]
                self._answers.pop(place, None)
                self._refused |= {place} if is_dead else set()
                return
        if self._peers.get(connection.peer) is connection:
            del self._peers[connection.peer]
        if is_dead and "@" in connection.peer:
            self.machine.lose(
                connection.peer, "closed", f"host {name_of(connection.peer)} is lost: it closed a connection"
            )
            self._act()

    def _tick(self, is_late: bool) -> None:
        if self.machine.is_over:
            return
        now = monotonic()
        if is_late:  # none was heard meanwhile, for no fault of theirs
            self._seen_s = dict.fromkeys(self._seen_s, now)
        self._meet(now)
        machine, silent_s = self.machine, self._settings.silent_s
        watched = {*(machine.candidates() if machine.run else ()), *machine.lobby} - {*machine.lost, self.key}
        for host in sorted(watched):
            self.loop.send(self._peer(host), kind="alive")
            if now - self._seen_s.setdefault(host, now) > silent_s:
                machine.lose(host, "silent", f"host {name_of(host)} was silent for {silent_s:g} s")
        for local, each in list(self._ranks.items()):
            self.loop.send(each, kind="alive")
            if now - self._seen_s[str(local)] > silent_s:
                self._deliver("lost", f"rank {local} of this host was silent for {silent_s:g} s")
        self._act()

    # ---- meeting -----------------------------------------------------------------------------------------------------

    def _meet(self, now: float) -> None:
        """Ask for the run, or found one; one that runs calls those who wait elsewhere."""
        machine = self.machine
        starts = not machine.run and len(machine.committed) == self._settings.ranks_per_host
        if not starts and not machine.is_head():
            return
        for place, address in enumerate(self._settings.meet):
            if place != self._place:
                if place not in self._asked:
                    self._asked[place] = self._connect(address, "")
                if starts:
                    self.loop.send(self._asked[place], kind="ask")
                else:
                    self._tell_where(self._asked[place])
        if starts:
            self._join_or_form(now)

    def _tell_where(self, connection: Connection) -> None:
        self.loop.send(connection, kind="at", host=self.machine.head(), is_running=bool(self.machine.run))

    def _join_or_form(self, now: float) -> None:
        settings, machine = self._settings, self.machine
        answers = {place: one for place, one in self._answers.items() if now - one[2] < settings.silent_s}
        running = [host for host, is_running, _ in answers.values() if is_running]
        lower = [place for place in sorted(answers) if self._place is None or place < self._place]
        if running or lower:
            host = running[0] if running else answers[lower[0]][0]
            committed = [machine.committed[local] for local in range(settings.ranks_per_host)]
            self.loop.send(self._peer(host), kind="join", committed=committed)
        elif self._place is not None:
            if len(machine.lobby) != self._num_waiting:
                self._num_waiting, self._since_s = len(machine.lobby), now
            num_hosts, waited_s = 1 + len(machine.lobby), now - self._since_s
            is_sure = waited_s > settings.silent_s or all(place in self._refused for place in range(self._place))
            is_full = num_hosts >= settings.max_hosts
            if is_sure and (is_full or (num_hosts >= settings.min_hosts and waited_s > settings.wait_s)):
                machine.form(secrets.token_hex(8))

    def _join(self, host: str, committed: list[int]) -> None:
        """Take a host into the lobby, once it can be reached from here too; it asks again until then."""
        if len(committed) != self._settings.ranks_per_host:
            raise MalformedError("another number of ranks on a host")
        if (not self.machine.run or self.machine.is_head()) and self._peer(host).is_connected:
            self.machine.join(host, committed)
            self._act()
