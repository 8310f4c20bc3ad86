"""View change under all orders of messages and losses. `explore.py` defines the orders and the forbidden states."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hybrid.elastic.membership import view_change
from tests.elastic.membership.explore import Explorer, World, WrongError, key_of

STEPS = {"a": (3,), "b": (4,), "c": (3,)}
TWO_RANKS = {"a": (3, 4), "b": (3, 3)}


def all_go_on(explorer: Explorer, world: World) -> None:
    """Check that the death of a process does not isolate any other host."""
    assert "isolated" not in world.status, world.status


def the_arbiter_goes_on(explorer: Explorer, world: World) -> None:
    assert world.status[0] == "lives", world.status


def somebody_goes_on(explorer: Explorer, world: World) -> None:
    assert "lives" in world.status, world.status


def no_further_verdict(explorer: Explorer, world: World) -> None:
    """Check only the explorer's own rules: the continuing hosts share one view, or they get an error."""


SMALL = {
    "2 hosts, any may die": (all_go_on, {"hosts": "ab", "budget": {"kill": 1, "early": 2}}),
    "3 hosts, two may die": (all_go_on, {"hosts": "abc", "budget": {"kill": 2}}),
    "3 hosts, a sum breaks before word comes": (
        all_go_on,
        {"hosts": "abc", "budget": {"kill": 1, "early": 2}},
    ),
    "2 hosts of 2 ranks": (all_go_on, {"hosts": "ab", "steps": TWO_RANKS, "budget": {"kill": 1}}),
    "a host joins one": (all_go_on, {"hosts": "a", "joiners": "j"}),
    "a host joins two, any may die": (
        no_further_verdict,
        {"hosts": "ab", "joiners": "j", "budget": {"kill": 1}},
    ),
    "a host joins 2 of 2 ranks, any may die": (
        no_further_verdict,
        {"hosts": "ab", "joiners": "j", "steps": TWO_RANKS, "budget": {"kill": 1}},
    ),
    "2 hosts, a cut": (the_arbiter_goes_on, {"hosts": "ab", "budget": {"cut": 1}}),
    "3 hosts, a cut": (somebody_goes_on, {"hosts": "abc", "budget": {"cut": 1}}),
    "3 hosts, one is cut off": (
        somebody_goes_on,
        {"hosts": "abc", "budget": {"cut": 1}, "cut_whole": True},
    ),
    "a host joins two, one is cut off": (  # during the join no host may have enough votes
        no_further_verdict,
        {"hosts": "ba", "joiners": "j", "budget": {"cut": 1}, "cut_whole": True},
    ),
    "a host joins one, any may die": (
        no_further_verdict,
        {"hosts": "a", "joiners": "j", "budget": {"kill": 1}},
    ),
    "a host joins one with more steps than the run has, any may die": (
        no_further_verdict,
        {"hosts": "a", "joiners": "j", "steps": {"a": (3,), "j": (9,)}, "budget": {"kill": 1}},
    ),
    "a host joins two with more steps than the run has, any may die": (
        no_further_verdict,
        {"hosts": "ab", "joiners": "j", "steps": {**STEPS, "j": (9,)}, "budget": {"kill": 1}},
    ),
    "first meeting, any may die": (
        no_further_verdict,
        {"hosts": "abc", "budget": {"kill": 1}, "is_founding": True},
    ),
}
LARGE = {
    "3 hosts, a cut, and any may die": (
        no_further_verdict,
        {"hosts": "abc", "budget": {"kill": 1, "cut": 1}},
    ),
    "3 hosts, two cuts": (no_further_verdict, {"hosts": "abc", "budget": {"cut": 2}}),
    "3 hosts, one is taken for lost": (
        somebody_goes_on,
        {"hosts": "abc", "budget": {"suspect": 1}},
    ),
    "3 hosts, two are taken for lost": (
        no_further_verdict,
        {"hosts": "abc", "budget": {"suspect": 2}},
    ),
    "a host joins three, any may die: the first 200,000 states": (
        no_further_verdict,
        {
            "hosts": "abc",
            "joiners": "j",
            "budget": {"kill": 1},
            "are_waiting": True,
            "first": 200_000,
        },
    ),
    "a host joins two, two may die": (
        no_further_verdict,
        {"hosts": "ab", "joiners": "j", "budget": {"kill": 2}},
    ),
    "a host joins two, a cut": (
        the_arbiter_goes_on,
        {"hosts": "ab", "joiners": "j", "budget": {"cut": 1}},
    ),
    "a host joins two, one is taken for lost": (
        no_further_verdict,
        {"hosts": "ab", "joiners": "j", "budget": {"suspect": 1}},
    ),
}


def states_of(verdict, options, machine=view_change.ViewChange) -> int:
    return Explorer(**{"steps": STEPS, "machine": machine, **options}).run(verdict)


@pytest.mark.parametrize("name", SMALL)
def test_every_order_ends_in_one_view_of_all_that_go_on(name):
    assert states_of(*SMALL[name]) > 5


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_every_order_ends_in_one_view_of_all_that_go_on_large(name):
    states = states_of(*LARGE[name])
    print(name, states)
    assert states > 5


def mutant(old: str, new: str):
    """Return the machine with one line of its source replaced."""
    source = Path(view_change.__file__).read_text()
    assert source.count(old) == 1, old
    names: dict = {"__name__": "mutant"}
    exec(compile(source.replace(old, new), "mutant", "exec"), names)
    return names["ViewChange"]


MUTANTS = {
    "does not propose again after a second loss": (
        "if not self.proposal or any(self.proposal[key] != value for key, value in wanted.items()):",
        "if not self.proposal:",
        "a host joins two, any may die",
    ),
    "does not vote": (
        "if not have_the_votes(kept, hosts, self.lost):",
        "if False:",
        "2 hosts, a cut",
    ),
    "does not vote of attempts": (
        "[self.hosts, *self.attempts.values()]",
        "[self.hosts]",
        "a host joins two, one is cut off",
    ),
    "counts the steps of a host that joins": (
        "committed = [-1] * self._ranks_per_host",
        "committed = list(committed)",
        "a host joins two with more steps than the run has, any may die",
    ),
    "goes on without a host that has the state": (
        "has_state = any(step >= 0",
        "has_state = True or any(step >= 0",
        "a host joins one, any may die",
    ),
    "does not tell who is left out": (
        '[host for host in self.candidates() if host not in offer["next"]]',
        "[]",
        "3 hosts, a cut",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_fault_is_found(name):
    old, new, where = MUTANTS[name]
    with pytest.raises(WrongError):
        states_of(*{**SMALL, **LARGE}[where], machine=mutant(old, new))


def test_a_host_accepts_no_older_proposal_and_none_that_has_not_heard_of_what_it_accepted():
    """An accepted view may be installed elsewhere, so a host must not accept an older proposal.

    Explorations of three hosts do not reach this state. A fourth host would be needed.
    """
    a, b, c = map(key_of, "abc")
    machine = view_change.ViewChange(c, ranks_per_host=1, min_hosts=1, max_hosts=3)
    machine.run = "r"
    machine.top = 0
    machine.promised = 0
    machine._install({"to": 0, "next": [a, b, c], "attempts": []})
    machine.come(0, 3)

    def answer_to(head: str, **offer) -> list[str]:
        machine.out = []
        base = {
            "kind": "propose",
            "run": "r",
            "number": 0,
            "hosts": [a, b, c],
            "attempts": [],
            "lost": {},
        }
        machine.receive(head, {**base, "next": [a, b, c], **offer})
        return [message["kind"] for _, host, message in machine.out if host == head]

    assert answer_to(a, to=5) == ["accept"]
    assert answer_to(a, to=5) == answer_to(a, to=4) == ["ready"]
    machine.lose(a, "silent", "a is silent")
    assert answer_to(b, to=6, next=[b, c]) == ["ready"]
    assert answer_to(b, to=6, next=[b, c], attempts=[[5, a, [a, b, c]]]) == ["accept"]


def test_a_host_that_was_silent_and_then_closed_is_dead():
    """A host may continue if the silent other host turns out to be dead."""
    a, b = map(key_of, "ab")
    machine = in_a_view_of(a, b, me=b)
    machine.lose(a, "silent", "a is silent")
    machine.lose(a, "closed", "a closed a connection")
    machine.come(0, 3)
    assert machine.hosts == [b]
    assert "isolated" not in [action for action, *_ in machine.out]


@pytest.mark.parametrize("how", view_change.FOR_SURE)
def test_a_host_that_is_lost_for_sure_does_not_become_silent(how):
    """A host that is certainly dead is not counted as silent later.

    Otherwise its votes would be missing, and the others would stop although no one else can continue.
    """
    a, b = map(key_of, "ab")
    machine = in_a_view_of(a, b, me=b)
    machine.lose(a, how, "a is gone")
    machine.lose(a, "silent", "a is silent")
    machine.come(0, 3)
    assert machine.hosts == [b]


def test_a_host_that_was_left_out_is_not_invited_again():
    """A late request to join from a host that was left out is ignored.

    That host exits once it reads that it was left out, and restarts under another key.
    """
    a, b, c = map(key_of, "abc")
    machine = in_a_view_of(a, b, me=a)
    machine.lose(b, "silent", "b is silent")
    machine.come(0, 3)
    assert (machine.hosts, machine.has_ended) == ([a], False)
    machine.join(b, [5])
    assert (machine.lobby, machine.has_ended) == ({}, False)
    machine.join(c, [5])
    assert (list(machine.lobby), machine.has_ended) == ([c], True)


def in_a_view_of(*hosts: str, me: str) -> view_change.ViewChange:
    """Return the machine of a host in its first view."""
    machine = view_change.ViewChange(me, ranks_per_host=1, min_hosts=1, max_hosts=3)
    machine.run = "r"
    machine.top = 0
    machine.promised = 0
    machine._install({"to": 0, "next": list(hosts), "attempts": []})
    machine.out = []
    return machine
