"""The first rank of a host: it speaks for its host with those of the others, and passes on to its own ranks."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from lightning_hybrid.elastic.membership.connections import (
    TICKS_WITHIN_HOST,
    Connection,
    MalformedError,
    SocketThread,
    listen,
    own_ip_towards,
    split,
)
from lightning_hybrid.elastic.membership.view import (
    Settings,
    address_of,
    differing_parts,
    host_key,
    name_of,
    names_of,
)
from lightning_hybrid.elastic.membership.view_change import ViewChange

log = logging.getLogger(__name__)


class Host(SocketThread):
    """What the first rank of a host does besides its own part."""

    def __init__(self, settings: Settings, deliver: Callable[[str, Any], None]) -> None:
        self._place: int | None = None
        at_meet: socket.socket | None = None
        for place, address in enumerate(settings.meet):
            if at_meet is None and (at_meet := listen(split(address))):
                self._place = place
        ip = at_meet.getsockname()[0] if at_meet else own_ip_towards(settings.meet[0])
        at_own = listen((ip, 0))
        at_path = listen(settings.path, socket.AF_UNIX)
        assert at_own is not None
        if at_path is None:
            raise RuntimeError(
                "elastic: another first rank of this host runs: give each host a name of its own"
            )
        super().__init__(settings, deliver, at_own, at_path, *([at_meet] if at_meet else []))
        self.key = host_key(
            settings.host, f"{ip}:{at_own.getsockname()[1]}", self._place, secrets.token_hex(4)
        )
        self.machine = ViewChange(
            self.key,
            ranks_per_host=settings.ranks_per_host,
            min_hosts=settings.min_hosts,
            max_hosts=settings.max_hosts,
        )
        self._peers: dict[
            str, Connection
        ] = {}  # to send: by key; each other host has its own to here
        self._seen_s: dict[
            str | int, float
        ] = {}  # when a word of a host, or of a rank of this one, came
        self._ended_s: dict[
            str, float
        ] = {}  # when a host closed one connection, while a word may come on another
        self._ranks: dict[int, Connection] = {}  # of this host
        self._asked: dict[int, Connection] = {}  # by place in `meet`
        # Whom to join at a place (-1: who called), whether it runs, when it said so.
        self._answers: dict[int, tuple[str, bool, float]] = {}
        self._refused: set[int] = set()  # places where no one listens
        self._since_s = 0.0  # since when this host asks, or its lobby has not grown
        self._num_waiting = self._num_ticks = 0

    def come(self, committed: int, store: str = "", local: int = 0) -> None:
        """Note that a rank of this host waits for a view."""
        self._since_s = monotonic()
        self.machine.come(local, committed, store)
        self._act()

    def end_view(self, why: str) -> None:
        """End the present view everywhere, where it has not."""
        if not self.machine.has_ended:
            self.machine.end_view(why)
            self._act()

    def leave(self) -> None:
        """Leave as planned."""
        self.machine.leave()
        for each in self._ranks.values():
            each.send(kind="bye")
        self._act()

    def waits_for(self) -> str:
        """Say in words what keeps the next view from being agreed."""
        machine = self.machine
        if late := sorted(set(range(self._settings.ranks_per_host)) - set(machine.committed)):
            return f"ranks {late} of this host"
        if not machine.run:
            return self._waits_for_hosts()
        head = machine.head()
        late_hosts = (
            [host for host in machine.living() if host not in machine.readies]
            if head == self.key
            else [head]
        )
        late_hosts += [
            host
            for host in machine.proposal.get("next", [])
            if host not in (*machine.accepts, self.key)
        ]
        return (
            names_of(late_hosts)
            if late_hosts
            else f"more hosts: `min_hosts` is {self._settings.min_hosts}"
        )

    def _waits_for_hosts(self) -> str:
        """Say which addresses this host asks for a run to join, who answers there, and how many hosts a run needs."""
        settings = self._settings
        now = monotonic()
        texts = []
        for place, address in enumerate(settings.meet):
            answer = self._answers.get(place)
            if place == self._place:
                texts.append(f"{address} is this host")
            elif answer is not None and now - answer[2] < settings.silent_s:
                texts.append(f"{address} is {name_of(answer[0])}")
            elif place in self._asked and self._asked[place].is_connected:
                texts.append(f"what listens at {address} is no host of a run")
            else:
                texts.append(f"nobody answers at {address}")
        if self._place is None:
            ip = address_of(self.key).rpartition(":")[0]
            texts.append(
                f"this host ({ip}) has none of these addresses, or another program has the port"
            )
        num_hosts = 1 + len(self.machine.lobby)
        return (
            f"a run to join, or enough hosts to begin one: {num_hosts} of `min_hosts` (={settings.min_hosts}) are "
            f"here. Of `meet` {', '.join(texts)}"
        )

    def _act(self) -> None:
        """Do what the machine says."""
        while self.machine.out:
            what, *rest = self.machine.out.pop(0)
            if what == "send":
                self._peer(rest[0]).send(**rest[1])
            else:
                self._tell(what, rest[0])

    def _tell(self, what: str, value: Any) -> None:
        for each in self._ranks.values():
            each.send(kind=what, value=value)
        self._deliver(what, value)

    # ---- to other hosts ----------------------------------------------------------------------------------------------

    def _peer(self, host: str) -> Connection:
        if host not in self._peers:
            self._peers[host] = self._connect(address_of(host), host, -1)
        return self._peers[host]

    def _connect(self, address: str, peer: str, place: int) -> Connection:
        connection = self.open(socket.socket(), address)
        connection.trust(
            peer or address, partial(self._answered, place), partial(self._has_closed, peer, place)
        )
        connection.send(kind="hello", token=self._settings.token, key=self.key)
        return connection

    def _answered(self, place: int, message: dict[str, Any]) -> None:
        if message["kind"] == "refused":
            self._tell("refused", message["why"])
        elif message["kind"] != "at":
            raise MalformedError(f"{message['kind']} where only answers come")
        elif not self.machine.run:
            self._answers[place] = (message["host"], message["is_running"], monotonic())

    def _has_closed(self, host: str, place: int, is_dead: bool) -> None:
        if not host:
            del self._asked[place]
            self._answers.pop(place, None)
            self._refused |= {place} if is_dead else set()
            return
        del self._peers[host]
        self._has_ended(host, is_dead)

    def _has_ended(self, host: str, is_dead: bool) -> None:
        """Note that a connection from or to a host has ended; a host that leaves says so on one from it."""
        if not is_dead:
            return
        if self._has_connection_from(host):
            # Its goodbye may be unread there: sockets end in any order, and each alone keeps the order of its bytes.
            self._ended_s.setdefault(host, monotonic())
        else:
            self._lose_dead(host)

    def _has_connection_from(self, host: str) -> bool:
        to_host = self._peers.get(host)
        return any(each.peer == host and each is not to_host for each in self._connections())

    def _lose_dead(self, host: str) -> None:
        self._ended_s.pop(host, None)
        self.machine.lose(host, "closed", f"host {name_of(host)} is lost: it closed a connection")
        self._act()

    def _lose_those_who_sent_no_word(self, now: float) -> None:
        """Lose the hosts that closed a connection a tick ago: what they had sent by then has been read."""
        for host, ended_s in list(self._ended_s.items()):
            if now - ended_s >= self._settings.tick_s:
                self._lose_dead(host)

    # ---- from other hosts, and from ranks of this one ----------------------------------------------------------------

    def greet(self, connection: Connection, message: dict[str, Any]) -> None:
        """Take a first message: of a rank of this host, or of another host."""
        if message["kind"] != "hello":
            raise MalformedError("no greeting")
        if connection.sock.family == socket.AF_UNIX:
            credentials = connection.sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
            )
            local = int(message["local"])
            if (
                struct.unpack("3i", credentials)[1] != os.getuid()
                or local in self._ranks
                or local == 0
            ):
                raise MalformedError(f"local rank {local} is another user's, or there already")
            self._ranks[local] = connection
            self._seen_s[local] = monotonic()
            connection.trust(
                f"rank {local}",
                partial(self._hear_rank, local),
                partial(self._has_rank_ended, local),
            )
            connection.send(kind="hello", key=self.key)
        elif message["token"] != self._settings.token:
            mine, other = differing_parts(self._settings.token, str(message["token"]))
            why = f"`token` of host {self._settings.host} (={mine}) must be that of this host (={other})"
            log.warning(
                "elastic: refused host %s: its `token` is %s, and not %s",
                message["key"],
                other,
                mine,
            )
            connection.send(
                kind="refused",
                why=f"{why}. Start every host with the same code, options, data and libraries",
            )
        else:
            key = str(message["key"])
            connection.trust(
                key, partial(self._hear_host, key, connection), partial(self._has_ended, key)
            )

    def _hear_host(self, host: str, connection: Connection, message: dict[str, Any]) -> None:
        self._seen_s[host] = monotonic()
        kind = message["kind"]
        if kind == "ask":
            if not self.machine.is_over:
                self._tell_where(connection)
        elif kind == "at":
            self._answered(-1, message)
        elif kind == "join":
            self._join(host, [int(step) for step in message["committed"]])
        elif kind != "alive":
            self.machine.receive(host, message)
            self._act()

    def _hear_rank(self, local: int, message: dict[str, Any]) -> None:
        self._seen_s[local] = monotonic()
        if message["kind"] == "come":
            self.come(int(message["committed"]), local=local)
        elif message["kind"] == "end":
            self.end_view(str(message["why"]))
        elif message["kind"] == "bye":
            del self._ranks[local]

    def _has_rank_ended(self, local: int, is_dead: bool) -> None:
        if local in self._ranks and not self.machine.is_over:
            self._deliver("lost", f"rank {local} of this host is gone")

    def tick(self, now: float, is_late: bool) -> None:
        """Give signs of life, and look who gave none."""
        machine = self.machine
        silent_s = self._settings.silent_s
        if machine.is_over:
            return
        if is_late:  # none was heard meanwhile, for no fault of theirs
            self._seen_s = dict.fromkeys(self._seen_s, now)
        self._lose_those_who_sent_no_word(now)
        self._num_ticks += 1
        is_full_round = self._num_ticks % TICKS_WITHIN_HOST == 0
        if is_full_round or not machine.run:
            self._meet(now)
        watched = {*(machine.candidates() if machine.run else ()), *machine.lobby} - {
            *machine.lost,
            self.key,
        }
        for host in sorted(watched):
            self._peer(host).send(kind="alive")
            if now - self._seen_s.setdefault(host, now) > silent_s:
                machine.lose(host, "silent", f"host {name_of(host)} was silent for {silent_s:g} s")
        for local, each in self._ranks.items():
            if is_full_round:
                each.send(kind="alive")
            if now - self._seen_s[local] > (limit_s := 2 * silent_s):
                self._deliver("lost", f"rank {local} of this host was silent for {limit_s:g} s")
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
                    self._asked[place] = self._connect(address, "", place)
                if starts:
                    self._asked[place].send(kind="ask")
                else:
                    self._tell_where(self._asked[place])
        if starts:
            self._join_or_form(now)

    def _tell_where(self, connection: Connection) -> None:
        connection.send(kind="at", host=self.machine.head(), is_running=bool(self.machine.run))

    def _join_or_form(self, now: float) -> None:
        settings = self._settings
        machine = self.machine
        answers = {
            place: one for place, one in self._answers.items() if now - one[2] < settings.silent_s
        }
        running = [host for host, is_running, _ in answers.values() if is_running]
        lower = [place for place in sorted(answers) if self._place is None or place < self._place]
        if running or lower:
            host = running[0] if running else answers[lower[0]][0]
            committed = [machine.committed[local] for local in range(settings.ranks_per_host)]
            self._peer(host).send(kind="join", committed=committed)
        elif self._place is not None:
            if len(machine.lobby) != self._num_waiting:
                self._num_waiting = len(machine.lobby)
                self._since_s = now
            num_hosts = 1 + len(machine.lobby)
            waited_s = now - self._since_s
            is_sure = waited_s > settings.silent_s or all(
                place in self._refused for place in range(self._place)
            )
            is_full = num_hosts >= settings.max_hosts
            if is_sure and (
                is_full or (num_hosts >= settings.min_hosts and waited_s > settings.wait_s)
            ):
                machine.form(secrets.token_hex(8))

    def _join(self, host: str, committed: list[int]) -> None:
        """Take a host into the lobby, once it can be reached from here too; it asks again until then."""
        if len(committed) != self._settings.ranks_per_host:
            raise MalformedError("another number of ranks on a host")
        if (not self.machine.run or self.machine.is_head()) and self._peer(host).is_connected:
            self.machine.join(host, committed)
            self._act()
