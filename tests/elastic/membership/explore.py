"""Exhaustive exploration of a view change: every order of messages, losses and returns, breadth first.

Each state is visited once. The real `ViewChange` of each host runs on channels that keep the order of messages, as TCP
does. Optional events (losses and false suspicions) have a budget. When no other event is possible, the explorer calls
`verdict`. When a host dies, any number of its last messages may be lost on each channel. A cut link delivers nothing,
and both ends see the other as silent.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from lightning_hybrid.elastic.membership.view_change import ViewChange

FIN = -1  # end of the messages of a dead process


def key_of(letter: str) -> str:
    return f"{letter}@x:1#{0 if letter == 'a' else '-'}.{letter}"


class WrongError(AssertionError):
    """Error for a state that must never occur. The message lists the events that lead to it."""


class World(NamedTuple):
    """State of all hosts and links at one moment. Machines and messages are indices of contents in the explorer."""

    nodes: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]  # committed by each rank of each host
    status: tuple[str, ...]  # "lives", "dead" or "isolated"
    channels: tuple[tuple[int, ...], ...]  # indexed by sender * n + receiver
    cut: frozenset  # pairs of hosts that cannot reach each other
    installed: tuple  # (number, hosts) of every view that any host ever installed
    budget: tuple[tuple[str, int], ...]


def _spent(world: World, event: str) -> World:
    """Return the world with one optional event fewer in its budget."""
    budget = dict(world.budget)
    budget[event] -= 1
    return world._replace(budget=tuple(sorted(budget.items())))


@dataclass
class Explorer:
    """Explorer of all states of a run.

    `hosts` are in the first view, and `joiners` ask to join. `budget` limits the number of "kill", "cut" and "suspect"
    events.
    """

    hosts: str
    steps: dict[str, tuple[int, ...]]
    joiners: str = ""
    budget: dict[str, int] = field(default_factory=dict)
    machine: Callable[..., ViewChange] = ViewChange
    min_hosts: int = 1
    is_founding: bool = False
    are_waiting: bool = False  # the joiners have already asked
    first: int = 0  # number of states after which to stop; 0: no limit
    cut_whole: bool = False  # a cut separates a host from all others instead of cutting one link

    def __post_init__(self) -> None:
        self.keys = [key_of(letter) for letter in self.hosts + self.joiners]
        self.n = len(self.keys)
        self.ranks = len(next(iter(self.steps.values())))
        self._memo: dict = {}
        self._numbers: dict[bytes, int] = {}
        self._contents: list[bytes] = []
        self._machines: dict[tuple[int, int], ViewChange] = {}  # read-only copies

    # ---- one machine -------------------------------------------------------------------------------------------------

    def _number(self, content: bytes) -> int:
        if content not in self._numbers:
            self._numbers[content] = len(self._contents)
            self._contents.append(content)
        return self._numbers[content]

    def _new(self, index: int) -> ViewChange:
        return self.machine(
            self.keys[index], ranks_per_host=self.ranks, min_hosts=self.min_hosts, max_hosts=self.n
        )

    def _load(self, index: int, node: int) -> ViewChange:
        machine = self._new(index)
        vars(machine).update(marshal.loads(self._contents[node]))
        return machine

    def look(self, world: World, index: int) -> ViewChange:
        key = (index, world.nodes[index])
        if key not in self._machines:
            self._machines[key] = self._load(*key)
        return self._machines[key]

    def _dump(self, machine: ViewChange) -> int:
        machine.reasons = []  # texts do not affect the behavior
        values = vars(machine).items()
        ordered = {}
        for name, value in values:
            if isinstance(value, dict):
                value = dict(sorted(value.items()))
            ordered[name] = value
        return self._number(marshal.dumps(ordered, 2))

    def _apply(self, index: int, node: int, name: str, *args) -> tuple[int, list]:
        memo = (index, node, name, args)
        if memo not in self._memo:
            machine = self._load(index, node)
            if name == "receive":
                machine.receive(args[0], marshal.loads(self._contents[args[1]]))
            else:
                getattr(machine, name)(
                    *(list(arg) if isinstance(arg, tuple) else arg for arg in args)
                )
            actions = [
                self._sent(*action[1:]) if action[0] == "send" else action for action in machine.out
            ]
            machine.out = []
            self._memo[memo] = self._dump(machine), actions
        return self._memo[memo]

    def _sent(self, receiver: str, message: dict) -> tuple[str, int, int]:
        """Return a send action by indices, without the message's texts, which do not affect the behavior."""
        message = dict(message)
        if "reasons" in message:
            message["reasons"] = []
        if message.get("why"):
            message["why"] = "w"
        return "send", self.keys.index(receiver), self._number(marshal.dumps(message, 2))

    # ---- the world ---------------------------------------------------------------------------------------------------

    def start(self) -> World:
        nodes = []
        for index, letter in enumerate(self.hosts + self.joiners):
            machine = self._new(index)
            if letter in self.hosts and not self.is_founding:
                machine.run = "r"
                machine.top = 0
                machine.promised = 0
                machine._install({"to": 0, "next": self.keys[: len(self.hosts)], "attempts": []})
                machine.out = []
            elif self.is_founding and index == 0:
                for joiner, letter_of in zip(self.keys[1:], self.hosts[1:], strict=True):
                    machine.join(joiner, list(self.steps[letter_of]))
                machine.form("r")
            nodes.append(self._dump(machine))
        steps = tuple(
            self.steps.get(letter, (0,) * self.ranks) for letter in self.hosts + self.joiners
        )
        if self.is_founding:
            installed = ()
        else:
            installed = ((0, tuple(self.keys[: len(self.hosts)])),)
        budget = tuple(sorted(self.budget.items()))
        return World(
            tuple(nodes),
            steps,
            ("lives",) * self.n,
            ((),) * self.n**2,
            cut=frozenset(),
            installed=installed,
            budget=budget,
        )

    def do(self, world: World, index: int, name: str, *args) -> World:
        """Return the world after an event at one host and the actions that follow from it."""
        state, actions = self._apply(index, world.nodes[index], name, *args)
        nodes = list(world.nodes)
        channels = list(world.channels)
        steps = list(world.steps)
        status = list(world.status)
        installed = world.installed
        nodes[index] = state
        for action in actions:
            if action[0] == "send":
                _, to, message = action
                if status[to] == "lives" and frozenset((index, to)) not in world.cut:
                    channels[index * self.n + to] += (message,)
            elif action[0] == "view":
                view = action[1]
                self._check_view(view, world)
                record = (view["to"], tuple(view["next"]))
                for number, hosts in installed:
                    if number == record[0] and hosts != record[1]:
                        raise WrongError(f"two views {number}: {hosts}, {record[1]}")
                installed = tuple(sorted({*installed, record}))
                steps[index] = (view["target"],) * self.ranks
            elif action[0] == "isolated":
                status[index] = "isolated"
                for sender in range(self.n):
                    channels[sender * self.n + index] = ()
        return world._replace(
            nodes=tuple(nodes),
            channels=tuple(channels),
            steps=tuple(steps),
            status=tuple(status),
            installed=installed,
        )

    def _check_view(self, view: dict, world: World) -> None:
        # A joining host counts steps of another run until it has had a view of this one.
        with_state: list[int] = []
        without_state: list[int] = []
        for host in view["next"]:
            index = self.keys.index(host)
            if self.look(world, index).has_had_view or not view["hosts"]:
                with_state.append(index)
            else:
                without_state.append(index)
        if not with_state:
            raise WrongError(
                f"no host of {view['next']} has had a view: nobody has the state of the run"
            )
        steps = {
            f"{self.keys[i]}/{local}": n
            for i in with_state
            for local, n in enumerate(world.steps[i])
        }
        # Another host may have installed the view already and adopted the target as its step.
        if view["target"] < max(steps.values()) or view["target"] not in steps.values():
            raise WrongError(f"target {view['target']} of {steps}")
        if any(steps.get(donor) != view["target"] for donor in view["donors"]):
            raise WrongError(f"donors {view['donors']} of {steps}")
        late = {f"{self.keys[i]}/{local}" for i in without_state for local in range(self.ranks)}
        if not ({rank for rank, n in steps.items() if n < view["target"]} | late) <= set(
            view["behind"]
        ):
            raise WrongError(f"behind {view['behind']} of {steps}")

    def _deliveries(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield the delivery of each channel's first message, with the world after it."""
        for sender, to in product(range(self.n), repeat=2):
            queue = world.channels[sender * self.n + to]
            if queue and world.status[to] == "lives":
                channels = list(world.channels)
                channels[sender * self.n + to] = queue[1:]
                after = world._replace(channels=tuple(channels))
                if queue[0] == FIN:
                    yield (
                        f"{to} sees {sender} closed",
                        self.do(after, to, "lose", self.keys[sender], "closed", "w"),
                    )
                else:
                    yield (
                        f"{to} gets #{queue[0]} of {sender}",
                        self.do(after, to, "receive", self.keys[sender], queue[0]),
                    )

    def required(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield the events that must happen eventually, with the world after each."""
        yield from self._deliveries(world)
        machines = [
            self.look(world, i) if world.status[i] == "lives" else None for i in range(self.n)
        ]
        for i, machine in enumerate(machines):
            if machine is None:
                continue
            if machine.has_ended:
                for local in range(self.ranks):
                    if local not in machine.committed:
                        yield (
                            f"{i}.{local} comes",
                            self.do(world, i, "come", local, world.steps[i][local]),
                        )
            if machine.run:
                watched = machine.candidates()
            else:
                watched = []
            for j, key in enumerate(self.keys):
                has_ended = world.status[j] == "isolated" and not world.channels[j * self.n + i]
                is_silent = has_ended or frozenset((i, j)) in world.cut
                if (
                    i != j
                    and is_silent
                    and key in [*watched, *machine.lobby]
                    and key not in machine.lost
                ):
                    yield f"{j} is silent for {i}", self.do(world, i, "lose", key, "silent", "w")
            # The host asks to join and is referred to the coordinator.
            if not machine.run and len(machine.committed) == self.ranks and not self.is_founding:
                for j, head in enumerate(machines):
                    if not head or not head.is_head():
                        continue
                    members = [*head.lobby, *head.candidates(), *head.lost]
                    if self.keys[i] not in members and frozenset((i, j)) not in world.cut:
                        yield (
                            f"{i} joins at {j}",
                            self.do(world, j, "join", self.keys[i], world.steps[i]),
                        )

    def optional(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield the optional events that have budget left, with the world after each."""
        budget = dict(world.budget)
        living = [i for i in range(self.n) if world.status[i] == "lives"]
        if budget.get("kill"):
            yield from self._kills(_spent(world, "kill"), living)
        if budget.get("cut"):
            yield from self._cuts(_spent(world, "cut"), living)
        if budget.get("suspect"):
            yield from self._suspicions(_spent(world, "suspect"), living)
        if budget.get("early"):
            yield from self._early_ends(_spent(world, "early"), living)

    def _kills(self, world: World, living: list[int]) -> Iterator[tuple[str, World]]:
        """Yield the death of each host, with every possible loss of its last messages."""
        for i in living:
            receivers = [j for j in range(self.n) if j != i]
            queues = [world.channels[i * self.n + j] for j in receivers]
            status = list(world.status)
            status[i] = "dead"
            for delivered in product(*(range(len(queue) + 1) for queue in queues)):
                channels = list(world.channels)
                for j, queue, count in zip(receivers, queues, delivered, strict=True):
                    is_heard = world.status[j] == "lives" and frozenset((i, j)) not in world.cut
                    channels[i * self.n + j] = (*queue[:count], FIN) if is_heard else ()
                    channels[j * self.n + i] = ()
                after = world._replace(channels=tuple(channels), status=tuple(status))
                yield f"kill {i} {delivered}", after

    def _cuts(self, world: World, living: list[int]) -> Iterator[tuple[str, World]]:
        """Yield cuts of each link, or of all links of each host."""
        if self.cut_whole:
            cuts = [[frozenset((i, j)) for j in range(self.n) if j != i] for i in living]
        else:
            cuts = [[frozenset((i, j))] for i in living for j in living if i < j]
        for pairs in cuts:
            channels = list(world.channels)
            for pair in pairs:
                i, j = pair
                channels[i * self.n + j] = ()
                channels[j * self.n + i] = ()
            after = world._replace(channels=tuple(channels), cut=world.cut | frozenset(pairs))
            yield f"cut {[sorted(pair) for pair in pairs]}", after

    def _suspicions(self, world: World, living: list[int]) -> Iterator[tuple[str, World]]:
        """Yield false suspicions, in which a host considers a living host silent."""
        for i in living:
            machine = self.look(world, i)
            if not machine.run:
                continue
            for j, key in enumerate(self.keys):
                if i != j and key in machine.candidates() and key not in machine.lost:
                    yield f"{i} suspects {j}", self.do(world, i, "lose", key, "silent", "w")

    def _early_ends(self, world: World, living: list[int]) -> Iterator[tuple[str, World]]:
        """Yield all-reduces that fail on a host before it has learned of a loss."""
        gone = {
            self.keys[i]
            for i in range(self.n)
            if world.status[i] != "lives" or self.look(world, i).has_ended
        }
        for i in living:
            machine = self.look(world, i)
            if not machine.has_ended and gone & set(machine.hosts):
                yield f"{i}.0 comes early", self.do(world, i, "come", 0, world.steps[i][0])

    def with_joiners_waiting(self) -> World:
        """Return the start once all joiners have asked, which has fewer orders than joiners that ask at any time."""
        world = self.start()
        for index in range(len(self.hosts), self.n):
            for local in range(self.ranks):
                world = self.do(world, index, "come", local, 0)
            world = self.do(world, 0, "join", self.keys[index], world.steps[index])
        return world

    def run(self, verdict: Callable[[Explorer, World], None], most: int = 10**7) -> int:
        """Visit every state and return the number of states."""
        if self.are_waiting:
            first = self.with_joiners_waiting()
        else:
            first = self.start()
        came_from: dict[World, tuple[World | None, str]] = {first: (None, "start")}
        queue = deque([first])
        while queue:
            world = queue.popleft()
            try:
                after = list(self.required(world))
                if not after:
                    self.check_end(world)
                    verdict(self, world)
                after += self.optional(world)
            except AssertionError as error:
                raise WrongError(f"{error}\n" + "\n".join(self.path(came_from, world))) from error
            for name, next_world in after:
                if next_world not in came_from:
                    came_from[next_world] = (world, name)
                    queue.append(next_world)
            if self.first and len(came_from) > self.first:
                return len(came_from)
            if len(came_from) > most:
                raise WrongError(
                    f"more than {most} states:\n" + "\n".join(self.path(came_from, world))
                )
        return len(came_from)

    def path(self, came_from: dict, world: World | None) -> list[str]:
        names = []
        while world is not None:
            world, name = came_from[world]
            if "#" in name:
                message = marshal.loads(self._contents[int(name.split("#")[1].split()[0])])
                name = name.replace(
                    "#", f"{message['kind']} {message.get('to', message.get('number', ''))} #"
                )
            names.append(name)
        return names[::-1]

    # ---- verdicts ------------------------------------------------------------------------------------------------

    def check_end(self, world: World) -> None:
        """Check that hosts wait only if too few are alive, and that otherwise all hosts of the run share one view."""
        living = [i for i in range(self.n) if world.status[i] == "lives"]
        going = [i for i in living if self.look(world, i).run]  # the others still ask to join
        if len(going) < self.min_hosts:
            return
        for i in going:
            machine = self.look(world, i)
            hosts = [self.keys.index(host) for host in machine.hosts]
            if machine.has_ended or sorted(hosts) != going:
                raise WrongError(
                    f"host {i} waits, or is in a view of {hosts} where {going} live: {vars(machine)}"
                )
            if machine.number > 0 and {world.steps[j] for j in going} != {world.steps[i]}:
                raise WrongError(f"steps {world.steps}")
