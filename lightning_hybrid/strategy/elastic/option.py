"""The value of `elastic`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.checks import require_number, require_whole
from lightning_hybrid.strategy.options import OptionValue


@dataclass(frozen=True, kw_only=True, repr=False)
class Elastic(OptionValue):
    """A run that goes on when a host is lost, and takes in a host that comes; each host is launched by itself.

        images of a step = batch size of a rank x `devices` x `max_hosts`         whatever hosts there are

    Args:
        max_hosts: hosts that share a step when all are there.
        meet: addresses `"ip:port"` at which hosts find each other, in a list or with commas; the first one's host
            decides where half of the hosts cannot hear the other half.
        min_hosts: with fewer the run does not begin, and one that goes on waits for more.
        silent_s: seconds without a sign of life after which a host is lost.

    Raises:
        ValueError: a value cannot work.
    """

    max_hosts: int
    meet: str | Sequence[str]
    min_hosts: int = 1
    silent_s: float = 2.0

    def __post_init__(self) -> None:
        """Check each."""
        require_whole("elastic.max_hosts", self.max_hosts, "it counts hosts. Write max_hosts=2")
        why = f"it counts hosts, of which there are at most {self.max_hosts}. Leave it out for 1"
        require_whole("elastic.min_hosts", self.min_hosts, why)
        if self.min_hosts > self.max_hosts:
            raise ValueError(f"`elastic.min_hosts` (={self.min_hosts}) must be at most `elastic.max_hosts`: {why}.")
        require_number("elastic.silent_s", self.silent_s, "it counts seconds. Leave it out for 2", above=True)
        if not self.meeting_points or any(not _is_address(one) for one in self.meeting_points):
            raise ValueError(
                f"`elastic.meet` (={self.meet!r}) must be addresses with ports, the same on all hosts: each host tries "
                'to listen at the first that is its own. Write meet="10.0.0.1:29400,10.0.0.2:29400".'
            )

    @property
    def meeting_points(self) -> tuple[str, ...]:
        """`meet`, one by one."""
        several = self.meet.split(",") if isinstance(self.meet, str) else self.meet
        return tuple(one.strip() for one in several if one.strip())


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 1 << 16
