"""Options of elastic training, such as the number of hosts and their meeting addresses."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.checks import require_number, require_whole
from lightning_hybrid.strategy.option_classes import OptionValue


@dataclass(frozen=True, kw_only=True, repr=False)
class ElasticOptions(OptionValue):
    """Validated options of `HybridElasticStrategy` for the number of hosts and their addresses.

    Attributes:
        max_hosts: Number of hosts that share a step when all are present.
        meet: Addresses `"ip:port"` at which hosts find each other, in a list or separated by commas.
        min_hosts: Minimum number of hosts with which a run begins or continues.
        silent_s: Seconds without a heartbeat after which a host is considered lost.

    Raises:
        ValueError: A value is invalid.
    """

    max_hosts: int
    meet: str | Sequence[str]
    min_hosts: int = 1
    silent_s: float = 2.0

    def __post_init__(self) -> None:
        """Validate all options."""
        require_whole(
            "max_hosts",
            self.max_hosts,
            "this many hosts share a step. Set max_hosts=2, for example, or the environment variable "
            "HYBRID_ELASTIC_MAX_HOSTS",
        )
        why = (
            f"the run waits until this many of its {self.max_hosts} hosts are present. Leave "
            "`min_hosts` unset for the default of 1"
        )
        require_whole("min_hosts", self.min_hosts, why)
        if self.min_hosts > self.max_hosts:
            raise ValueError(f"`min_hosts` (={self.min_hosts}) must be at most `max_hosts`: {why}.")
        require_number(
            "silent_s",
            self.silent_s,
            "a host that is silent for this many seconds counts as lost. Leave `silent_s` unset for the default of 2",
            above=True,
        )
        refuse_meeting_points(self.meet)

    @property
    def meeting_points(self) -> tuple[str, ...]:
        """Addresses in `meet` as a tuple of strings."""
        several = self.meet.split(",") if isinstance(self.meet, str) else self.meet
        return tuple(address.strip() for address in several if address.strip())


def refuse_meeting_points(meet: Any) -> None:
    """Raise if an entry of the option `meet` is not an address with a port.

    Raises:
        ValueError: `meet` is empty or has the wrong type, or an entry is not an address. The error names the entry.
    """
    several = meet.split(",") if isinstance(meet, str) else meet
    if not isinstance(several, list | tuple) or not several:
        raise ValueError(f"`meet` (={meet!r:.120}) {_RULE} {_CURE}")
    for entry in several:
        if not isinstance(entry, str):
            raise ValueError(
                f"`meet` (={meet!r:.120}) {_RULE} {entry!r:.60} is not a string. {_CURE}"
            )
        reason = _why_no_address(entry.strip())
        if reason:
            raise ValueError(f"`meet` (={meet!r:.120}) {_RULE} {entry!r:.60} {reason}. {_CURE}")


_RULE = (
    "must be a list of addresses with ports, the same on all hosts, because each host listens on the first address "
    "that is its own."
)
_CURE = 'Set meet="10.0.0.1:29400,10.0.0.2:29400", for example, or the environment variable HYBRID_ELASTIC_MEET.'
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def _why_no_address(text: str) -> str:
    """Explain why a text is not an address with a port, or return an empty string if it is one."""
    if "://" in text:
        return f"begins with {text.partition('://')[0]}://, but must not have a scheme"
    if any(character.isspace() for character in text):
        return "contains spaces, but addresses are separated by commas"
    host, _, port = text.rpartition(":")
    if not host:
        return "has no port"
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        return "has no port from 1 to 65535 after its last colon"
    if ":" in host:
        return "is an IPv6 address, but hosts need IPv4 addresses"
    if not _NAME.fullmatch(host):
        return "is not a valid host name"
    return ""


def resolved(meeting_points: Sequence[str]) -> list[str]:
    """Resolve the host names in a list of addresses to IPv4 addresses.

    Raises:
        ValueError: A host name cannot be resolved.
    """
    addresses = []
    for entry in meeting_points:
        host, _, port = entry.rpartition(":")
        try:
            addresses.append(f"{socket.gethostbyname(host)}:{port}")
        except OSError as error:
            raise ValueError(
                f"`meet` (={','.join(meeting_points)}) must contain IP addresses, or names that this host can "
                f"resolve, but {host!r} has no IPv4 address here ({error}). Set the IP address of that host."
            ) from error
    return addresses


def warn_of_loopback(option: ElasticOptions, addresses: Sequence[str]) -> None:
    """Warn if `meet` contains a loopback address, which other machines cannot reach.

    Some systems resolve a host's own name to 127.0.1.1. The host would then listen only on this address.
    """
    loopback = [address for address in addresses if address.startswith("127.")]
    if option.max_hosts > 1 and loopback:
        rank_zero_warn(
            f"`meet` (={','.join(option.meeting_points)}) contains addresses that only this machine can reach "
            f"({', '.join(loopback)}), so a host on another machine would train alone. Set IP addresses that other "
            f"machines can reach, unless all {option.max_hosts} hosts run on this machine."
        )
