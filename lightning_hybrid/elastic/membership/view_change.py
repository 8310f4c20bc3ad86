"""State machine for the transition from one membership view to the next.

Each host has its own state machine. The inputs are messages and losses of hosts, and the outputs are messages. It uses
no sockets, clocks or threads. README.md describes its states.

Dynamic voting makes the protocol safe when links fail. A proposal that may have been installed on some host is treated
as a view until it is known that it was not installed. The next proposal therefore needs the votes of its hosts as well
(Yeger Lotem, Keidar and Dolev 1997, "Dynamic voting for consistent primary components", PODC).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_hybrid.elastic.membership.view import (
    FOR_SURE,
    have_the_votes,
    name_of,
    names_of,
    who_hear_each_other,
    who_takes_from_whom,
)

Message = dict[str, Any]


class ViewChange:
    """State machine with which a host agrees with other hosts on the next membership view.

    Args:
        me: Key of this host.
        ranks_per_host: Number of ranks on each host.
        min_hosts: Minimum number of hosts in a view.
        max_hosts: Maximum number of hosts in a view.

    Attributes:
        out: Queue of actions, which the caller executes in order and removes: `("send", host, message)`,
            `("change", why)`, `("view", proposal)` and `("isolated", why)`.
    """

    def __init__(self, me: str, *, ranks_per_host: int, min_hosts: int, max_hosts: int) -> None:
        self._ranks_per_host = ranks_per_host
        self._min_hosts = min_hosts
        self._max_hosts = max_hosts
        self.me = me
        self.run = ""  # empty while this host waits in the lobby of another host
        self.number = -1  # number of the latest view known to be installed on any host
        self.hosts: list[str] = []  # hosts of that view
        # Hosts of later proposals that may be installed, by number and proposer.
        self.attempts: dict[tuple[int, str], list[str]] = {}
        self.top = -1  # greatest number that this host has heard of
        self.lost: dict[str, str] = {}  # kind of loss, by host
        self.out: list[tuple[Any, ...]] = []
        # Greatest number proposed or accepted here; equal or lower numbers are refused.
        self.promised = -1
        # Completed steps of the ranks of each host that waits for a view.
        self.lobby: dict[str, list[int]] = {}
        self.left_out: list[str] = []  # hosts excluded by this host; they can return with a new key
        self.is_over = False
        self.has_had_view = False
        self.has_ended = True  # whether the current view has ended, or there is none
        self._clear()

    def _clear(self) -> None:
        """Reset everything that belongs to a single view change."""
        self.committed: dict[int, int] = {}  # completed steps of each waiting rank, by local rank
        self.readies: dict[str, Message] = {}
        self.offers: dict[str, Message] = {}
        self.accepted: Message = {}
        self.proposal: Message = {}
        self.accepts: list[str] = []
        self.invited: list[str] = []  # hosts that any proposal of this host has included as joining
        self.reasons: list[str] = []
        self.store = ""

    def form(self, run: str) -> None:
        """Start a run with this host and all hosts that have asked it for admission.

        Args:
            run: Unique name of the run.
        """
        if not self.run:
            self.run = run
        self._advance()

    def join(self, host: str, committed: list[int]) -> None:
        """Add a reachable host to the list of hosts that wait for the next membership view."""
        known_hosts = {*self.candidates(), *self.left_out, *self.lobby}
        if host in known_hosts or self.lost.get(host) in FOR_SURE:
            return
        self.lost.pop(host, None)
        self.lobby[host] = committed
        self._admit()
        self._advance()

    def come(self, local: int, committed: int, store: str = "") -> None:
        """Record that a rank of this host waits for the next membership view.

        Args:
            local: Local rank.
            committed: Number of steps that the rank has completed, or -1 if it lacks the state of the run.
            store: "ip:port" of a new TCP store, if the rank is the first rank.
        """
        self.committed[local] = committed
        if store:
            self.store = store
        if not self.has_ended:
            self.end_view(f"an all-reduce failed on host {name_of(self.me)}")
        self._advance()

    def lose(self, host: str, how: str, why: str) -> None:
        """Record the loss of a host, and end the membership view if the host is in it.

        Args:
            host: Key of the host.
            how: Kind of loss: `"closed"`, `"left"` (without an error, or isolated) or `"silent"`.
            why: Reason for the end of the view.
        """
        if host == self.me or self.lost.get(host) in (how, *FOR_SURE):
            return
        self.lost[host] = how
        self.lobby.pop(host, None)
        if host in self.hosts and why:
            self.end_view(why)
        self._advance()

    def leave(self, why: str = "") -> None:
        """Leave the run, and notify the other hosts.

        This is called when the host has finished without an error, or must not continue.
        """
        self._send(self.candidates(), kind="bye", why=why)
        self.is_over = True

    def end_view(self, why: str) -> None:
        """End the current membership view on this host and on all other hosts."""
        if self.is_over or (self.has_ended and not self.hosts):
            return
        self.reasons.append(why)
        if not self.has_ended:
            self.has_ended = True
            self.out.append(("change", why))
            self._send(self.hosts, kind="stop", number=self.number, why=why)

    def receive(self, sender: str, message: Message) -> None:
        """Process a message of the membership protocol from another host."""
        kind = message["kind"]
        if self.is_over or self.lost.get(sender) in FOR_SURE:
            return
        if kind == "bye":
            self.lose(sender, "left", message["why"])
        elif kind == "propose" and not self.run:
            self.offers[sender] = message
        elif self._is_of_other_run(message):
            if kind in ("propose", "ready"):  # this host has found another run in the meantime
                self._send([sender], kind="bye", why="")
        else:
            self._receive_in_run(sender, message)
        self._advance()

    def _is_of_other_run(self, message: Message) -> bool:
        """Return whether a message belongs to another run than this host's."""
        if message["run"] == self.run:
            return False
        # A host without a run can enter the sender's run by a `ready` message (see `_concerns`).
        return bool(self.run) or message["kind"] != "ready"

    def _receive_in_run(self, sender: str, message: Message) -> None:
        """Process a message of another host of the same run."""
        kind = message["kind"]
        if kind == "excluded" and message["number"] > self.number:
            others = names_of(message["hosts"])
            self._isolate(f"the run continues on {others} without this host: {message['why']}")
        elif kind == "stop" and message["number"] == self.number:
            self.end_view(message["why"])
        elif kind in ("ready", "propose"):
            self._receive_state(sender, message)
        elif kind == "accept" and self.proposal and message["number"] == self.proposal["to"]:
            self.accepts = sorted({*self.accepts, sender})
        elif kind == "install" and message["number"] > self.number:
            self._receive_install(message)

    def _receive_state(self, sender: str, message: Message) -> None:
        """Process a `ready` or `propose` message, which contains the sender's knowledge of the run."""
        if not self._concerns(sender, message):
            return
        self._merge(message)
        if message["number"] != self.number or self.is_over:
            return
        if message["kind"] == "propose":
            self.offers[sender] = message
            return
        self.readies[sender] = message
        if not self.has_ended:
            self.end_view(f"host {name_of(sender)} has ended the view")

    def _receive_install(self, message: Message) -> None:
        """Install the accepted proposal, or record that other hosts have installed a later one."""
        number = message["number"]
        is_accepted = bool(self.accepted) and self.accepted["to"] == number
        if is_accepted and self.promised == number:
            self._install(self.accepted)
        else:  # this host has accepted a later proposal in the meantime
            self._learn(number, message["hosts"])

    # ---- knowledge ---------------------------------------------------------------------------------------------------

    def candidates(self) -> list[str]:
        """Return the hosts that may be in the current membership view, in the order in which they joined."""
        hosts = list(self.hosts)
        for key in sorted(self.attempts):
            hosts.extend(self.attempts[key])
        hosts.append(self.me)
        return list(dict.fromkeys(hosts))

    def living(self) -> list[str]:
        """Return the hosts that may be in the current membership view and are not known to be lost."""
        return [host for host in self.candidates() if host not in self.lost]

    def head(self) -> str:
        """Return the host that coordinates the run, as far as this host knows.

        If this host does not know of a run, it returns itself.
        """
        return self.living()[0]

    def is_head(self) -> bool:
        """Return whether this host coordinates a run."""
        return bool(self.run) and self.head() == self.me

    def _concerns(self, sender: str, message: Message) -> bool:
        """Return whether the sender of a message belongs to the run, according to both hosts."""
        is_known = sender in self.candidates()
        for number, _, hosts in message["attempts"]:
            if number > self.number and self.me in hosts and sender in hosts:
                is_known = True
        if is_known:
            if not self.run:
                self.run = message["run"]
            return True
        if message["number"] < self.number and self.has_had_view:
            self._exclude([sender], self.number, self.hosts)
        return False

    def _merge(self, message: Message) -> None:
        """Add the sender's knowledge of views, proposals and lost hosts to that of this host."""
        self._learn(message["number"], message["hosts"])
        for number, proposer, hosts in message["attempts"]:
            # Proposals of this host are not valid until it has installed them.
            if number > self.number and proposer != self.me:
                self.attempts[number, proposer] = hosts
                self.top = max(self.top, number)
        for host, how in message["lost"].items():
            if how in FOR_SURE:
                self.lose(host, how, f"host {name_of(host)} is lost")

    def _learn(self, number: int, hosts: list[str]) -> None:
        """Record that at least one host has entered a membership view, and discard earlier proposals."""
        if number <= self.number:
            return
        knows_a_view = bool(self.hosts or self.attempts)
        if knows_a_view and self.me not in hosts:
            self._isolate(f"the run continues on {names_of(hosts)} without this host")
            return

        self.number = number
        self.hosts = hosts
        self.top = max(self.top, number)
        self.readies = {}  # they belong to an earlier change
        later_attempts = {}
        for (attempt_number, proposer), attempted_hosts in self.attempts.items():
            if attempt_number > number:
                later_attempts[attempt_number, proposer] = attempted_hosts
        self.attempts = later_attempts

    def _ready(self) -> Message:
        """Return the message with which this host tells the others that all of its ranks wait for a view."""
        committed = [self.committed[local] for local in range(self._ranks_per_host)]
        if self.hosts and not self.has_had_view:
            # This host joins, so its state is not the state of the run.
            committed = [-1] * self._ranks_per_host
        candidates = self.candidates()
        lost = {}
        for host in sorted(self.lost):
            if host in candidates:
                lost[host] = self.lost[host]
        return {"kind": "ready", **self._state(), "lost": lost, "committed": committed}

    def _state(self) -> Message:
        """Return the knowledge of the run that `ready` and `propose` messages contain."""
        attempts = [[*key, self.attempts[key]] for key in sorted(self.attempts)]
        return {
            "run": self.run,
            "number": self.number,
            "hosts": self.hosts,
            "attempts": attempts,
        }

    # ---- agreement ---------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take the next step of the view change that is possible now, if any."""
        if self.is_over or len(self.committed) < self._ranks_per_host:
            return
        if not self.run and not self._enter_offered_run():
            return
        before = self.readies.get(self.me)
        ready = self._ready()
        self.readies[self.me] = ready
        if before is None or before["lost"] != ready["lost"]:
            reachable = [host for host in self.candidates() if self.lost.get(host) not in FOR_SURE]
            self._send(reachable, **ready)
        if not self.is_head():
            self._accept(self.head())
        elif all(host in self.readies for host in self.living()):
            self._propose()

    def _enter_offered_run(self) -> bool:
        """Enter the run of the first host that has offered a view, and return False if there is none."""
        for sender, offer in self.offers.items():
            if sender in self.lost:
                continue
            self.run = offer["run"]
            # The offered view counts as an attempt of its sender.
            attempt = [offer["to"], sender, offer["next"]]
            attempts = [*offer["attempts"], attempt]
            self._merge({**offer, "attempts": attempts})
            return True
        return False

    def _accept(self, head: str) -> None:
        """Accept the proposal of the head, or answer it with `ready` if this host cannot accept it."""
        offer = self.offers.pop(head, None)
        if offer is None:
            return
        if not self._is_acceptable(offer, head):
            self._send([head], **self._ready())  # this tells the head what to propose
            return

        # Hosts that are left out are informed now and not at the installation, so that they know before they can see
        # other hosts exit.
        left_out = [host for host in self.candidates() if host not in offer["next"]]
        self._exclude(left_out, offer["to"], offer["next"])
        self.attempts = {}
        for attempt_number, proposer, hosts in offer["attempts"]:
            self.attempts[attempt_number, proposer] = hosts
        number = offer["to"]
        self.attempts[number, head] = offer["next"]
        self.promised = number
        self.top = max(self.top, number)
        self.accepted = offer
        self._send([head], kind="accept", number=number)
        self._advance()

    def _is_acceptable(self, offer: Message, head: str) -> bool:
        """Return whether this host may accept a proposal of the head."""
        latest_number = max(self.promised, self.number)
        if offer["to"] <= latest_number or offer["number"] < self.number:
            return False
        # Attempts that the proposer made itself and left out are void. It must know all attempts of other hosts.
        attempts_known_to_head = {key for key in self.attempts if key[1] == head}
        for number, proposer, _ in offer["attempts"]:
            attempts_known_to_head.add((number, proposer))
        if not attempts_known_to_head.issuperset(self.attempts):
            return False
        return not any(host in self.lost for host in offer["next"])

    def _propose(self) -> None:
        """Propose the next view, and install it once all of its hosts have accepted."""
        lost = {}
        for host, ready in self.readies.items():
            lost[host] = ready["lost"]
        kept = who_hear_each_other([], self.living(), lost)
        if not self._may_continue(kept):
            return
        joining = self._hosts_to_admit(kept, lost)
        if len(kept) + len(joining) < self._min_hosts:
            self.proposal = {}  # the next proposal may include other hosts
            return
        wanted = {**self._state(), "next": kept + joining}
        if not self.proposal or any(self.proposal[key] != value for key, value in wanted.items()):
            self._send_proposal(wanted, kept, joining)
        accepted_by = {*self.accepts, self.me}
        if accepted_by.issuperset(wanted["next"]):
            self._install_on_all(wanted["next"])

    def _may_continue(self, kept: list[str]) -> bool:
        """Return whether the remaining hosts may form the next view, and isolate this host if not."""
        for hosts in [self.hosts, *self.attempts.values()]:
            if not have_the_votes(kept, hosts, self.lost):
                missing = [host for host in hosts if host not in kept]
                self._isolate(
                    f"{names_of(missing)} cannot be reached but may continue, and the reachable hosts "
                    f"({names_of(kept)}) are too few to continue"
                )
                return False

        committed: list[int] = []
        for host in kept:
            committed.extend(self.readies[host]["committed"])
        has_state = any(step >= 0 for step in committed)
        if not has_state:
            self._isolate("no remaining host has the state of the run")
        return has_state

    def _hosts_to_admit(self, kept: list[str], lost: dict[str, Any]) -> list[str]:
        """Return the hosts in the lobby that join with the next view."""
        # A host joins with the next proposal, but not in the middle of a proposal.
        candidates = self.proposal.get("next", self._admissible(kept))
        waiting = [host for host in candidates if host in self.lobby]
        num_kept = len(kept)
        num_free = self._max_hosts - num_kept
        hosts = who_hear_each_other(kept, waiting[:num_free], lost)
        return hosts[num_kept:]

    def _send_proposal(self, wanted: Message, kept: list[str], joining: list[str]) -> None:
        """Propose the next view to its hosts, with a new number."""
        self.top += 1
        self.promised = self.top
        steps = {}
        for host in kept:
            steps[host] = self.readies[host]["committed"]
        for host in joining:
            # At the first meeting, every host has the state. Later, a host that joins does not have it.
            if self.hosts:
                steps[host] = [-1] * self._ranks_per_host
            else:
                steps[host] = self.lobby[host]
        reasons = list(self.reasons)
        if joining and self.hosts:
            reasons.append(f"{names_of(joining)} will join")
        self.proposal = {
            **wanted,
            "kind": "propose",
            "to": self.top,
            "store": self.store,
            "reasons": list(dict.fromkeys(reasons)),
            "lost": {},
            **who_takes_from_whom(steps),
        }
        self.accepts = []
        self.invited += [host for host in joining if host not in self.invited]
        self._send(wanted["next"], **self.proposal)

    def _install_on_all(self, hosts: list[str]) -> None:
        """Install the accepted proposal on its hosts, after informing the hosts that are left out."""
        known = dict.fromkeys(self.candidates() + self.invited)
        left_out = [host for host in known if host not in hosts]
        self.left_out += left_out
        self._exclude(left_out, self.promised, hosts)
        self._send(hosts, kind="install", number=self.promised, hosts=hosts)
        self._install(self.proposal)

    def _install(self, proposal: Message) -> None:
        """Enter a proposed view, and end it at once if a host has been lost in the meantime."""
        self._clear()
        self._learn(proposal["to"], proposal["next"])
        self.lost = {host: how for host, how in self.lost.items() if host in self.hosts}
        for host in self.hosts + self.left_out:
            self.lobby.pop(host, None)
        self.has_ended = False
        self.has_had_view = True
        self.out.append(("view", proposal))
        # If there are attempts, other hosts have already seen a loss.
        if self.lost or self.attempts:
            losses = [f"{name_of(host)} was lost" for host in self.lost]
            if not losses:
                losses = ["a host was lost"]
            reason = " and ".join(losses)
            self.end_view(f"{reason} in the meantime")
        self._admit()

    def _admissible(self, hosts: Iterable[str]) -> list[str]:
        """Return the hosts in the lobby whose names differ from those of the given hosts."""
        names = {name_of(host) for host in hosts}
        return [host for host in self.lobby if name_of(host) not in names]

    def _admit(self) -> None:
        """End the membership view if a host waits to join and there is room for another host."""
        if not self.hosts or not self.is_head():
            return
        living = self.living()
        if len(living) >= self._max_hosts:
            return
        waiting = self._admissible(living)
        if waiting:
            self.end_view(f"{names_of(waiting)} will join")

    def _exclude(self, hosts: list[str], number: int, others: list[str]) -> None:
        """Inform hosts that the next view, which consists of `others`, leaves them out."""
        self._send(
            hosts,
            kind="excluded",
            number=number,
            hosts=others,
            why="the other hosts did not receive the messages of this host in time",
        )

    def _isolate(self, why: str) -> None:
        """Leave the run, because this host must not continue."""
        self.leave(f"host {name_of(self.me)} is isolated")
        self.out.append(("isolated", why))

    def _send(self, to: list[str], /, **message: Any) -> None:
        """Queue a message to each of the given hosts, except this one."""
        message.setdefault("run", self.run)
        for host in to:
            if host != self.me:
                self.out.append(("send", host, message))
