"""What one host knows of a run: who is in it, who is lost, and which views may have been installed."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


class Knowledge:
    """The latest view that was surely installed, what was proposed since, and who is lost."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.run = ""  # none yet: this host waits in the lobby of another
        self.number = -1  # of the latest view known to be installed, by whomever, and its hosts
        self.hosts: list[str] = []
        self.attempts: dict[tuple[int, str], list[str]] = {}  # number, proposer: hosts; later ones, perhaps installed
        self.top = -1  # greatest number heard of
        self.lost: dict[str, str] = {}  # and how

    def candidates(self) -> list[str]:
        """Return who may be in the present view, in order of entry."""
        later = (host for key in sorted(self.attempts) for host in self.attempts[key])
        return list(dict.fromkeys([*self.hosts, *later, self.me]))

    def living(self) -> list[str]:
        """Return those of them that are not lost."""
        return [host for host in self.candidates() if host not in self.lost]

    def head(self) -> str:
        """Return the host that coordinates, as far as known here; this one where it knows of no run."""
        return self.living()[0]

    def is_head(self) -> bool:
        """Return whether this host coordinates a run."""
        return bool(self.run) and self.head() == self.me

    def note_view(self, number: int, hosts: list[str]) -> None:
        """Note that a view was installed: what was proposed before it is over."""
        self.number, self.hosts, self.top = number, hosts, max(self.top, number)
        self.attempts = {key: value for key, value in self.attempts.items() if key[0] > number}

    def note_attempts(self, attempts: list[list[Any]]) -> None:
        """Note what others have proposed or accepted. One's own is void until one has installed it."""
        for number, proposer, hosts in attempts:
            if number > self.number and proposer != self.me:
                self.attempts[number, proposer] = hosts
                self.top = max(self.top, number)

    def state(self) -> Message:
        """Return what others learn from this."""
        attempts = [[*key, self.attempts[key]] for key in sorted(self.attempts)]
        return {"run": self.run, "number": self.number, "hosts": self.hosts, "attempts": attempts}
