"""Membership thread of a host's first rank, which represents the host to other hosts."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Answer:
    """Latest reply of another host about which host to join.

    Attributes:
        host: Key of the host to join.
        is_running: Whether the host to join has a run.
        time_s: Time at which the answer arrived, in seconds.
    """

    host: str
    is_running: bool
    time_s: float


# Index for the answer of a host that has connected to this host, instead of an index into `meet`.
_CALLER = -1


class Host(SocketThread):
    """Membership thread of the first rank of a host.

    The thread exchanges messages with the first ranks of other hosts, and forwards results to the ranks of its own
    host.

    Args:
        settings: Settings of this rank.
        deliver: Callback for events, as for `SocketThread`.
    """

    def __init__(self, settings: Settings, deliver: Callable[[str, Any], None]) -> None:
        # Index into `meet` of the address at which this host listens.
        self._meet_index: int | None = None
        meet_listener: socket.socket | None = None
        for meet_index, address in enumerate(settings.meet):
            meet_listener = listen(split(address))
            if meet_listener is not None:
                self._meet_index = meet_index
                break

        if meet_listener is not None:
            ip = meet_listener.getsockname()[0]
        else:
            ip = own_ip_towards(settings.meet[0])
        host_listener = listen((ip, 0))
        rank_listener = listen(settings.path, socket.AF_UNIX)
        assert host_listener is not None
        if rank_listener is None:
            raise RuntimeError(
                f"elastic: another host named {settings.host} is already running its first rank. Give each host a "
                "unique name."
            )

        listeners = [host_listener, rank_listener]
        if meet_listener is not None:
            listeners.append(meet_listener)
        super().__init__(settings, deliver, *listeners)
        host_address = f"{ip}:{host_listener.getsockname()[1]}"
        self.key = host_key(settings.host, host_address, self._meet_index, secrets.token_hex(4))
        self.machine = ViewChange(
            self.key,
            ranks_per_host=settings.ranks_per_host,
            min_hosts=settings.min_hosts,
            max_hosts=settings.max_hosts,
        )
        # Outgoing connections, by key of the other host. The other host has its own connection to this host.
        self._peers: dict[str, Connection] = {}
        # Time of the latest message of each host, and of each rank of this host.
        self._seen_s: dict[str | int, float] = {}
        # Time at which a host closed one connection, while messages may still arrive on its other connection.
        self._ended_s: dict[str, float] = {}
        # Connections from the other ranks of this host, by local rank.
        self._ranks: dict[int, Connection] = {}
        # Connections to the addresses of `meet`, and their latest answers, by index into `meet` (or `_CALLER`).
        self._asked: dict[int, Connection] = {}
        self._answers: dict[int, _Answer] = {}
        # Indices into `meet` of addresses at which no host listens.
        self._refused: set[int] = set()
        # Time at which this host began to ask, or at which the last host joined its lobby.
        self._since_s = 0.0
        self._num_waiting = 0
        self._num_ticks = 0

    def come(self, committed: int, store: str = "", local: int = 0) -> None:
        """Record that a rank of this host waits for the next membership view.

        Args:
            committed: Number of steps that the rank has completed, or -1 if it lacks the state of the run.
            store: "ip:port" of a new TCP store, if the rank is the first rank.
            local: Local rank.
        """
        self._since_s = monotonic()
        self.machine.come(local, committed, store)
        self._act()

    def end_view(self, why: str) -> None:
        """End the current membership view on all hosts, unless it has ended already."""
        if not self.machine.has_ended:
            self.machine.end_view(why)
            self._act()

    def leave(self) -> None:
        """Leave the run without an error, and notify the other hosts and the ranks of this host."""
        self.machine.leave()
        for connection in self._ranks.values():
            connection.send(kind="bye")
        self._act()

    def waits_for(self) -> str:
        """Describe the ranks or hosts that the next membership view is waiting for."""
        machine = self.machine
        late_ranks = sorted(set(range(self._settings.ranks_per_host)) - set(machine.committed))
        if late_ranks:
            return f"ranks {late_ranks} of this host"
        if not machine.run:
            return self._waits_for_hosts()

        head = machine.head()
        if head == self.key:
            late_hosts = [host for host in machine.living() if host not in machine.readies]
        else:
            late_hosts = [head]
        for host in machine.proposal.get("next", []):
            if host != self.key and host not in machine.accepts:
                late_hosts.append(host)
        if late_hosts:
            return names_of(late_hosts)
        return f"more hosts: `min_hosts` is {self._settings.min_hosts}"

    def _waits_for_hosts(self) -> str:
        """Describe which addresses in `meet` respond, and how many hosts are present and required."""
        settings = self._settings
        now = monotonic()
        texts = []
        for meet_index, address in enumerate(settings.meet):
            answer = self._answers.get(meet_index)
            if meet_index == self._meet_index:
                texts.append(f"{address} is this host")
            elif answer is not None and now - answer.time_s < settings.silent_s:
                texts.append(f"{address} is {name_of(answer.host)}")
            elif meet_index in self._asked and self._asked[meet_index].is_connected:
                texts.append(
                    f"the process that listens at {address} is not a host of an elastic run"
                )
            else:
                texts.append(f"no process answers at {address}")
        if self._meet_index is None:
            ip = address_of(self.key).rpartition(":")[0]
            texts.append(
                f"this host ({ip}) has none of these addresses, or another program uses the port"
            )
        num_hosts = 1 + len(self.machine.lobby)
        return (
            f"a run to join, or enough hosts to begin one ({num_hosts} of `min_hosts` (={settings.min_hosts}) are "
            f"present; in `meet`, {', '.join(texts)})"
        )

    def _act(self) -> None:
        """Execute the queued actions of the state machine in order."""
        while self.machine.out:
            action, *arguments = self.machine.out.pop(0)
            if action == "send":
                host, message = arguments
                self._peer(host).send(**message)
            else:
                self._deliver_to_ranks(action, arguments[0])

    def _deliver_to_ranks(self, event: str, value: Any) -> None:
        """Deliver an event to all ranks of this host."""
        for connection in self._ranks.values():
            connection.send(kind=event, value=value)
        self._deliver(event, value)

    # ---- to other hosts ----------------------------------------------------------------------------------------------

    def _peer(self, host: str) -> Connection:
        """Return the outgoing connection to another host, opening it if necessary."""
        if host not in self._peers:
            self._peers[host] = self._connect(address_of(host), host, _CALLER)
        return self._peers[host]

    def _connect(self, address: str, peer: str, meet_index: int) -> Connection:
        """Open a connection to another host, and send a greeting.

        Args:
            address: "ip:port" of the host.
            peer: Key of the host, or empty if only its address in `meet` is known.
            meet_index: Index of the address in `meet`, or `_CALLER`.
        """
        connection = self.open(socket.socket(), address)
        connection.trust(
            peer or address,
            partial(self._read_answer, meet_index),
            partial(self._has_closed, peer, meet_index),
        )
        connection.send(kind="hello", token=self._settings.token, key=self.key)
        return connection

    def _read_answer(self, meet_index: int, message: dict[str, Any]) -> None:
        """Process another host's reply, which names the host to join or refuses admission."""
        if message["kind"] == "refused":
            self._deliver_to_ranks("refused", message["why"])
        elif message["kind"] != "at":
            raise MalformedError(
                f"received a message of kind {message['kind']}, but expected an answer"
            )
        elif not self.machine.run:
            self._answers[meet_index] = _Answer(message["host"], message["is_running"], monotonic())

    def _has_closed(self, host: str, meet_index: int, is_dead: bool) -> None:
        """Remove an outgoing connection that was closed, and check whether its host is lost."""
        if host:
            del self._peers[host]
            self._has_ended(host, is_dead)
            return
        del self._asked[meet_index]
        self._answers.pop(meet_index, None)
        if is_dead:
            self._refused.add(meet_index)

    def _has_ended(self, host: str, is_dead: bool) -> None:
        """Check whether another host is lost, after a connection to or from the host was closed.

        A host that leaves without an error first sends a goodbye on its own connection.
        """
        if not is_dead:
            return
        if self._has_connection_from(host):
            # That connection may have an unread goodbye, because sockets are closed in any order, and order is
            # guaranteed only for the bytes of a single socket.
            self._ended_s.setdefault(host, monotonic())
        else:
            self._lose_dead(host)

    def _has_connection_from(self, host: str) -> bool:
        """Return whether a connection from another host is still open."""
        outgoing = self._peers.get(host)
        return any(
            connection.peer == host and connection is not outgoing
            for connection in self._connections()
        )

    def _lose_dead(self, host: str) -> None:
        """Mark a host as lost because its process has ended."""
        self._ended_s.pop(host, None)
        self.machine.lose(host, "closed", f"host {name_of(host)} is lost: it closed a connection")
        self._act()

    def _lose_hosts_without_goodbye(self, now: float) -> None:
        """Mark hosts as lost if they closed a connection and sent no goodbye within a heartbeat interval.

        After this time, all messages that such a host had sent have been read.
        """
        for host, ended_s in list(self._ended_s.items()):
            if now - ended_s >= self._settings.tick_s:
                self._lose_dead(host)

    # ---- from other hosts, and from ranks of this one ----------------------------------------------------------------

    def greet(self, connection: Connection, message: dict[str, Any]) -> None:
        """Process the first message of a connection, from a rank of this host or from another host."""
        if message["kind"] != "hello":
            raise MalformedError("the first message is not a greeting")
        if connection.sock.family == socket.AF_UNIX:
            self._greet_rank(connection, int(message["local"]))
        elif message["token"] != self._settings.token:
            self._refuse(connection, message)
        else:
            key = str(message["key"])
            connection.trust(
                key, partial(self._hear_host, key, connection), partial(self._has_ended, key)
            )

    def _greet_rank(self, connection: Connection, local: int) -> None:
        """Accept a connection from another rank of this host if it is a process of the same user.

        Raises:
            MalformedError: The process belongs to another user, or the local rank is already connected.
        """
        credentials = connection.sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid() or local in self._ranks or local == 0:
            raise MalformedError(
                f"local rank {local} belongs to another user or is already connected"
            )
        self._ranks[local] = connection
        self._seen_s[local] = monotonic()
        connection.trust(
            f"rank {local}",
            partial(self._hear_rank, local),
            partial(self._has_rank_ended, local),
        )
        connection.send(kind="hello", key=self.key)

    def _refuse(self, connection: Connection, message: dict[str, Any]) -> None:
        """Refuse admission to a host whose run settings differ, and send it the differences."""
        token, refused_token = differing_parts(self._settings.token, str(message["token"]))
        log.warning(
            "elastic: refused host %s, because its settings are %s instead of %s. Start every host with the same "
            "code, options, data and libraries.",
            message["key"],
            refused_token,
            token,
        )
        why = (
            f"host {self._settings.host} has the settings {token}, but this host has {refused_token}. Start every "
            "host with the same code, options, data and libraries"
        )
        connection.send(kind="refused", why=why)

    def _hear_host(self, host: str, connection: Connection, message: dict[str, Any]) -> None:
        """Process a message from another host, such as a heartbeat or a request for admission."""
        self._seen_s[host] = monotonic()
        kind = message["kind"]
        if kind == "ask":
            if not self.machine.is_over:
                self._answer(connection)
        elif kind == "at":
            self._read_answer(_CALLER, message)
        elif kind == "join":
            self._admit(host, [int(step) for step in message["committed"]])
        elif kind != "alive":
            self.machine.receive(host, message)
            self._act()

    def _hear_rank(self, local: int, message: dict[str, Any]) -> None:
        """Process a message from another rank of this host, such as a request to end the view."""
        self._seen_s[local] = monotonic()
        if message["kind"] == "come":
            self.come(int(message["committed"]), local=local)
        elif message["kind"] == "end":
            self.end_view(str(message["why"]))
        elif message["kind"] == "bye":
            del self._ranks[local]

    def _has_rank_ended(self, local: int, is_dead: bool) -> None:
        """Report that another rank of this host has died, unless it has sent a goodbye."""
        if local in self._ranks and not self.machine.is_over:
            self._deliver("lost", f"rank {local} of this host has exited")

    def tick(self, now: float, is_late: bool) -> None:
        """Send due heartbeats, and mark hosts and ranks as lost if their heartbeats have stopped.

        Args:
            now: Current time in seconds.
            is_late: Whether this thread was paused for so long that messages of other hosts and ranks may be unread.
        """
        machine = self.machine
        if machine.is_over:
            return
        # Messages of other hosts and ranks may have arrived, but have not been read yet.
        if is_late:
            self._seen_s = dict.fromkeys(self._seen_s, now)
        self._lose_hosts_without_goodbye(now)
        self._num_ticks += 1
        is_full_round = self._num_ticks % TICKS_WITHIN_HOST == 0
        if is_full_round or not machine.run:
            self._meet(now)
        self._watch_hosts(now)
        self._watch_ranks(now, sends_sign=is_full_round)
        self._act()

    def _watch_hosts(self, now: float) -> None:
        """Send a heartbeat to every other host, and mark hosts as lost if they have been silent for too long."""
        machine = self.machine
        silent_s = self._settings.silent_s
        watched = set(machine.lobby)
        if machine.run:
            watched.update(machine.candidates())
        watched.difference_update(machine.lost)
        watched.discard(self.key)
        for host in sorted(watched):
            self._peer(host).send(kind="alive")
            if now - self._seen_s.setdefault(host, now) > silent_s:
                machine.lose(host, "silent", f"host {name_of(host)} was silent for {silent_s:g} s")

    def _watch_ranks(self, now: float, *, sends_sign: bool) -> None:
        """Send due heartbeats to this host's ranks, and report ranks that have been silent for too long."""
        limit_s = 2 * self._settings.silent_s
        for local, connection in self._ranks.items():
            if sends_sign:
                connection.send(kind="alive")
            if now - self._seen_s[local] > limit_s:
                self._deliver("lost", f"rank {local} of this host was silent for {limit_s:g} s")

    # ---- meeting -----------------------------------------------------------------------------------------------------

    def _meet(self, now: float) -> None:
        """Join or start a run, or invite waiting hosts if this host coordinates a run."""
        machine = self.machine
        is_starting = not machine.run and len(machine.committed) == self._settings.ranks_per_host
        if not is_starting and not machine.is_head():
            return
        for meet_index, address in enumerate(self._settings.meet):
            if meet_index == self._meet_index:
                continue
            if meet_index not in self._asked:
                self._asked[meet_index] = self._connect(address, "", meet_index)
            if is_starting:
                self._asked[meet_index].send(kind="ask")
            else:
                self._answer(self._asked[meet_index])
        if is_starting:
            self._join_or_form(now)

    def _answer(self, connection: Connection) -> None:
        """Tell another host which host to join, and whether a run already exists."""
        connection.send(kind="at", host=self.machine.head(), is_running=bool(self.machine.run))

    def _join_or_form(self, now: float) -> None:
        """Ask another host for admission, or start a run if this host has precedence."""
        host = self._host_to_join(now)
        if host is not None:
            machine = self.machine
            committed = [machine.committed[local] for local in range(self._settings.ranks_per_host)]
            self._peer(host).send(kind="join", committed=committed)
        elif self._meet_index is not None:
            self._form_if_complete(now, self._meet_index)

    def _host_to_join(self, now: float) -> str | None:
        """Return the host that this host should join, or None if no other host has precedence.

        A host with a run has precedence over all other hosts. Without a run, precedence goes to the host named in the
        answer from the earliest address of `meet` that is before this host's own address.
        """
        answers = {}
        for meet_index, answer in self._answers.items():
            if now - answer.time_s < self._settings.silent_s:
                answers[meet_index] = answer
        for answer in answers.values():
            if answer.is_running:
                return answer.host
        # Answers from `_CALLER` come from hosts with a run, so all remaining answers are from addresses of `meet`.
        for meet_index in sorted(answers):
            if self._meet_index is None or meet_index < self._meet_index:
                return answers[meet_index].host
        return None

    def _form_if_complete(self, now: float, meet_index: int) -> None:
        """Start a run if enough hosts are waiting and no host with precedence may be waiting.

        A host at an earlier address of `meet` has precedence.
        """
        settings = self._settings
        machine = self.machine
        if len(machine.lobby) != self._num_waiting:
            self._num_waiting = len(machine.lobby)
            self._since_s = now
        num_hosts = 1 + len(machine.lobby)
        waited_s = now - self._since_s
        is_first = waited_s > settings.silent_s or self._refused.issuperset(range(meet_index))
        is_full = num_hosts >= settings.max_hosts
        has_waited = num_hosts >= settings.min_hosts and waited_s > settings.wait_s
        if is_first and (is_full or has_waited):
            machine.form(secrets.token_hex(8))

    def _admit(self, host: str, committed: list[int]) -> None:
        """Add a host that asked for admission to the list of waiting hosts.

        Only the head of a run, or a host without a run, admits hosts. If this host is neither, or is not yet connected
        to the other host, the other host asks again later.

        Args:
            host: Host that asked.
            committed: Number of steps that each rank of that host has completed.
        """
        if len(committed) != self._settings.ranks_per_host:
            raise MalformedError("the host has a different number of ranks")
        if (not self.machine.run or self.machine.is_head()) and self._peer(host).is_connected:
            self.machine.join(host, committed)
            self._act()
