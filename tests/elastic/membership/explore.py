"""All orders of messages, losses and returns of a view change, breadth first. A state is visited once.

The real `ViewChange` of each host runs on channels that keep their order, as TCP's do. Optional events (losses, false
suspicion) have a budget; where no other event is left, `verdict` is asked. A host that dies may take along what it
sent last, each channel by itself; a cut link delivers nothing and both ends fall silent for one another.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from lightning_hybrid.elastic.membership.view_change import ViewChange

FIN = -1  # the end of what a dead process has sent


def key_of(letter: str) -> str:
    return f"{letter}@x:1#{0 if letter == 'a' else '-'}.{letter}"


class WrongError(AssertionError):
    """Error for a state that must never occur. Its message holds the events that lead there."""


class World(NamedTuple):
    """Everything at one moment. Machines and messages are numbers, by which the explorer knows their content."""

    nodes: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]  # committed by each rank of each host
    status: tuple[str, ...]  # "lives", "dead", "isolated"
    channels: tuple[tuple[int, ...], ...]  # of sender * n + receiver
    cut: frozenset  # pairs of hosts that do not hear each other
    installed: tuple  # (number, hosts) by anybody, ever
    budget: tuple[tuple[str, int], ...]


@dataclass
class Explorer:
    """`hosts` in the first view. `joiners` ask for the run. `budget`: how many of "kill", "cut", "suspect"."""

    hosts: str
    steps: dict[str, tuple[int, ...]]
    joiners: str = ""
    budget: dict[str, int] = field(default_factory=dict)
    machine: Callable[..., ViewChange] = ViewChange
    min_hosts: int = 1
    is_founding: bool = False
    are_waiting: bool = False  # the joiners have asked already
    first: int = 0  # states after which to stop; 0: none is left out
    cut_whole: bool = False  # a cut takes a host from all others, in place of one pair

    def __post_init__(self) -> None:
        self.keys = [key_of(letter) for letter in self.hosts + self.joiners]
        self.n = len(self.keys)
        self.ranks = len(next(iter(self.steps.values())))
        self._memo: dict = {}
        self._numbers: dict[bytes, int] = {}
        self._contents: list[bytes] = []
        self._machines: dict[tuple[int, int], ViewChange] = {}  # to look at, never to change

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
        machine.reasons = []  # words change nothing
        values = vars(machine).items()
        ordered = {
            name: dict(sorted(each.items())) if isinstance(each, dict) else each
            for name, each in values
        }
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
            out = machine.out
            machine.out = []
            done: list = []
            for what in out:
                if what[0] == "send":
                    message = {
                        name: [] if name == "reasons" else each for name, each in what[2].items()
                    }
                    message |= {"why": "w"} if message.get("why") else {}
                    done.append(
                        ("send", self.keys.index(what[1]), self._number(marshal.dumps(message, 2)))
                    )
                else:
                    done.append(what)
            self._memo[memo] = self._dump(machine), done
        return self._memo[memo]

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
        """The world after an event at one host, and all that it sends."""
        state, done = self._apply(index, world.nodes[index], name, *args)
        nodes = list(world.nodes)
        channels = list(world.channels)
        steps = list(world.steps)
        status = list(world.status)
        installed = world.installed
        nodes[index] = state
        for what in done:
            if what[0] == "send":
                _, to, message = what
                if status[to] == "lives" and frozenset((index, to)) not in world.cut:
                    channels[index * self.n + to] += (message,)
            elif what[0] == "view":
                view = what[1]
                self._check_view(view, world)
                record = (view["to"], tuple(view["next"]))
                for number, hosts in installed:
                    if number == record[0] and hosts != record[1]:
                        raise WrongError(f"two views {number}: {hosts}, {record[1]}")
                installed = tuple(sorted({*installed, record}))
                steps[index] = (view["target"],) * self.ranks
            elif what[0] == "isolated":
                status[index] = "isolated"
                for other in range(self.n):
                    channels[other * self.n + index] = ()
        return world._replace(
            nodes=tuple(nodes),
            channels=tuple(channels),
            steps=tuple(steps),
            status=tuple(status),
            installed=installed,
        )

    def _check_view(self, view: dict, world: World) -> None:
        # A host that joins has steps of its own, of another run, until it has had a view of this one.
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
        # Another may have installed it already and made its steps those of the target.
        if view["target"] < max(steps.values()) or view["target"] not in steps.values():
            raise WrongError(f"target {view['target']} of {steps}")
        if any(steps.get(donor) != view["target"] for donor in view["donors"]):
            raise WrongError(f"donors {view['donors']} of {steps}")
        late = {f"{self.keys[i]}/{local}" for i in without_state for local in range(self.ranks)}
        if not ({rank for rank, n in steps.items() if n < view["target"]} | late) <= set(
            view["behind"]
        ):
            raise WrongError(f"behind {view['behind']} of {steps}")

    def required(self, world: World) -> Iterator[tuple[str, World]]:
        """Events that must happen sometime."""
        machines = [
            self.look(world, i) if world.status[i] == "lives" else None for i in range(self.n)
        ]
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
            # asks for the run, and is sent to who coordinates
            if not machine.run and len(machine.committed) == self.ranks and not self.is_founding:
                for j, head in enumerate(machines):
                    if head and head.is_head():
                        known = [*head.lobby, *head.candidates(), *head.lost]
                    else:
                        known = self.keys
                    if self.keys[i] not in known and frozenset((i, j)) not in world.cut:
                        yield (
                            f"{i} joins at {j}",
                            self.do(world, j, "join", self.keys[i], world.steps[i]),
                        )

    def optional(self, world: World) -> Iterator[tuple[str, World]]:
        """Losses that may happen."""
        budget = dict(world.budget)

        def spend(what: str) -> tuple:
            return tuple(sorted({**budget, what: budget[what] - 1}.items()))

        living = [i for i in range(self.n) if world.status[i] == "lives"]
        if budget.get("kill"):
            for i in living:
                others = [j for j in range(self.n) if j != i]
                queues = [world.channels[i * self.n + j] for j in others]
                for kept in product(*(range(len(queue) + 1) for queue in queues)):
                    channels = list(world.channels)
                    for j, queue, count in zip(others, queues, kept, strict=True):
                        is_heard = world.status[j] == "lives" and frozenset((i, j)) not in world.cut
                        channels[i * self.n + j] = (*queue[:count], FIN) if is_heard else ()
                        channels[j * self.n + i] = ()
                    status = tuple(
                        "dead" if j == i else each for j, each in enumerate(world.status)
                    )
                    yield (
                        f"kill {i} {kept}",
                        world._replace(
                            channels=tuple(channels), status=status, budget=spend("kill")
                        ),
                    )
        if budget.get("cut"):
            if self.cut_whole:
                ends = [[frozenset((i, j)) for j in range(self.n) if j != i] for i in living]
            else:
                ends = [[frozenset((i, j))] for i in living for j in living if i < j]
            for pairs in ends:
                channels = list(world.channels)
                for pair in pairs:
                    i, j = pair
                    channels[i * self.n + j] = channels[j * self.n + i] = ()
                yield (
                    f"cut {[sorted(pair) for pair in pairs]}",
                    world._replace(
                        channels=tuple(channels),
                        cut=world.cut | frozenset(pairs),
                        budget=spend("cut"),
                    ),
                )
        if budget.get("suspect"):
            for i in living:
                machine = self.look(world, i)
                for j, key in enumerate(self.keys):
                    if (
                        i != j
                        and machine.run
                        and key in machine.candidates()
                        and key not in machine.lost
                    ):
                        after = world._replace(budget=spend("suspect"))
                        yield f"{i} suspects {j}", self.do(after, i, "lose", key, "silent", "w")

        if budget.get("early"):  # a sum breaks before any word has come
            gone = {
                self.keys[i]
                for i in range(self.n)
                if world.status[i] != "lives" or self.look(world, i).has_ended
            }
            for i in living:
                machine = self.look(world, i)
                if not machine.has_ended and gone & set(machine.hosts):
                    after = world._replace(budget=spend("early"))
                    yield f"{i}.0 comes early", self.do(after, i, "come", 0, world.steps[i][0])

    def with_joiners_waiting(self) -> World:
        """The start, once all joiners have asked: fewer orders than where they ask at any time."""
        world = self.start()
        for index in range(len(self.hosts), self.n):
            for local in range(self.ranks):
                world = self.do(world, index, "come", local, 0)
            world = self.do(world, 0, "join", self.keys[index], world.steps[index])
        return world

    def run(self, verdict: Callable[[Explorer, World], None], most: int = 10**7) -> int:
        """Visit every state. Returns how many there are."""
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
            for name, each in after:
                if each not in came_from:
                    came_from[each] = (world, name)
                    queue.append(each)
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
        """Nobody waits but for enough hosts, and all that go on are in one view of exactly them."""
        living = [i for i in range(self.n) if world.status[i] == "lives"]
        going = [i for i in living if self.look(world, i).run]  # others still ask for a run
        if len(going) < self.min_hosts:
            return
        for i in going:
            machine = self.look(world, i)
            hosts = [self.keys.index(host) for host in machine.hosts]
            if machine.has_ended or hosts != sorted(
                going, key=hosts.index if set(hosts) == set(going) else None
            ):
                raise WrongError(
                    f"host {i} waits, or is in a view of {hosts} where {going} live: {vars(machine)}"
                )
            if machine.number > 0 and {world.steps[j] for j in going} != {world.steps[i]}:
                raise WrongError(f"steps {world.steps}")
