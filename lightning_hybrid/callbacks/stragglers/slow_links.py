"""Detection of links between nodes that are slow in several consecutive windows of steps.

A slow link makes all ranks wait inside the collectives, although they were ready at the same time. Therefore no rank is
slow, and even the rank that waits least waits for a long time:

    floor = min over ranks of wait_r >= min_share * step,  and no rank is suspected

The slow link is identified by the rate at which each node's connections send while they have data to send. In a ring, a
node behind a slow link sends less often, but at its usual rate. These rates are available only for TCP on Linux, where
`tcp_info` reads them. Without rates, the floor is compared with the floor of earlier windows, and no link is named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, mode

from lightning_hybrid.callbacks.stragglers.streaks import Streaks
from lightning_hybrid.callbacks.stragglers.window import RankWindow
from lightning_hybrid.comm.stats.phases import Phase

SLOW_RATE = 0.75
"""Fraction of the usual rate below which a link is considered slow."""

MIN_LINKS = 3
"""Minimum number of links for a comparison between links. With fewer, each is compared only with earlier windows."""

NUM_USUAL_WINDOWS = 20
"""Number of latest windows without slowness from which a link's usual rate is computed, as their median."""

Link = tuple[int, int]
"""Sending and receiving nodes of a link."""

LinkEnds = tuple[int | None, int | None]
"""Sending and receiving nodes of a slow link. None means any node, or that the node is unknown."""


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """Slow link between nodes that makes all ranks wait.

    Attributes:
        sender: Node that sends over the slow link, or a node with several slow links. None if it is unknown.
        receiver: Node that receives over the slow link. None means any other node.
        bytes_per_s: Rate of the link in bytes per second, or 0 if it is unknown.
        usual_bytes_per_s: Rate of other links, or of this link in earlier windows.
        wait_share: Fraction of a step for which every rank waits.
    """

    sender: int | None
    receiver: int | None
    bytes_per_s: float
    usual_bytes_per_s: float
    wait_share: float

    @property
    def ends(self) -> LinkEnds:
        """Sending and receiving nodes of the link."""
        return self.sender, self.receiver

    @property
    def nodes(self) -> set[int]:
        """Set of the link's end nodes that are known, or {-1} if neither is known."""
        known = {node for node in self.ends if node is not None}
        if known:
            return known
        return {-1}


def floor_s(windows: Sequence[RankWindow]) -> float:
    """Return the waiting time of the rank that waits least, in seconds per step."""
    return min(window.phases_s[Phase.WAIT] for window in windows)


def rates_of(windows: Sequence[RankWindow], nodes: Sequence[int]) -> dict[Link, float]:
    """Return the rate of each measured link between nodes, in bytes per second.

    The rates of a node's ranks are added, because they share its links.

    Args:
        windows: Step times of all ranks.
        nodes: Node of each rank.
    """
    rates: dict[Link, float] = {}
    for node, window in zip(nodes, windows, strict=True):
        if window.link.node >= 0:
            link = (node, window.link.node)
            rates[link] = rates.get(link, 0.0) + window.link.bytes_per_s
    return rates


def typical_rate(rates: Sequence[float]) -> float:
    """Return the upper quartile of the link rates.

    The median would be too low if both links of a slow node are slow.

    >>> typical_rate([4.0, 4.0, 9.0]), typical_rate([4.0, 4.0, 9.0, 9.1])
    (9.0, 9.0)
    """
    in_order = sorted(rates)
    return in_order[round(0.75 * (len(in_order) - 1))]


def location_of(links: Sequence[Link]) -> LinkEnds:
    """Return the link or the node that all slow links have in common.

    If there is only one link, or only the two directions of one link, the result is the (sender, receiver) pair of the
    first entry. If all links share one node, the result is (node, None). Otherwise it is (None, None).

    >>> location_of([(1, 2)]), location_of([(0, 1), (1, 2)]), location_of([(0, 1), (2, 3)])
    ((1, 2), (1, None), (None, None))
    """
    in_common = set(links[0])
    for link in links[1:]:
        in_common &= set(link)
    if len(in_common) == 2:
        return links[0]
    if len(in_common) == 1:
        return in_common.pop(), None
    return None, None


class SlowLinks:
    """Detector of links that make all ranks wait in several consecutive windows of steps.

    Args:
        nodes: Node of each rank.
        min_share: Fraction of a step for which all ranks must wait.
        num_windows: Number of consecutive windows in which all ranks must wait at least this long.

    Attributes:
        named: Link that is currently reported as slow, or None.
    """

    def __init__(self, *, nodes: Sequence[int], min_share: float, num_windows: int) -> None:
        self.named: SlowLink | None = None
        self._nodes = tuple(nodes)
        self._min_share = min_share
        self._streaks: Streaks[str, SlowLink] = Streaks(num_windows)
        # Nodes of all links that were reported since the last time when no link was slow.
        self._reported: set[int] = set()
        # Rates of each link, from windows in which the link was not slow.
        self._usual_rates: dict[Link, deque[float]] = {}
        self._recent_floors_s: deque[float] = deque(maxlen=num_windows)
        # For each streak of windows, take the largest floor. This is the smallest of these values.
        self._usual_floor_s: float | None = None

    def add(self, windows: Sequence[RankWindow], *, has_suspect: bool) -> SlowLink | None:
        """Evaluate a window of steps, and return the link to report as slow, or None.

        A link is returned only once, unless it recovers and becomes slow again.

        Args:
            windows: Step times of all ranks.
            has_suspect: Whether a slow rank delays the other ranks in this window.
        """
        if len(set(self._nodes)) < 2:
            return None
        slow_link = None
        if not has_suspect:
            slow_link = self._judge(windows)
        findings = {}
        if slow_link is not None:
            findings["link"] = slow_link

        complete = self._streaks.add(findings)
        if not complete:
            return None
        self.named = _combined(complete["link"])
        # Both links of a node may be slow, although in some windows only one of them is detected.
        nodes = self.named.nodes
        is_reported = not self._reported.isdisjoint(nodes)
        self._reported.update(nodes)
        if is_reported:
            return None
        return self.named

    def take_recovered(self) -> SlowLink | None:
        """Return the reported link if it has recovered, or None otherwise.

        A link has recovered if it was not slow in the last `num_windows` windows. It is returned only once.
        """
        if not self._streaks.take_ended():
            return None
        self._reported.clear()
        recovered = self.named
        self.named = None
        return recovered

    def _judge(self, windows: Sequence[RankWindow]) -> SlowLink | None:
        rates = rates_of(windows, self._nodes)
        wait_s = floor_s(windows)
        step_s = median([window.step_s for window in windows])
        if not rates:
            return self._judge_floor(wait_s, step_s)

        slow: dict[Link, float] = {}  # usual rates of the slow links
        for link, rate in rates.items():
            usual = self._usual_rate_of(link, rates)
            if rate < SLOW_RATE * usual:
                slow[link] = usual
            else:
                self._usual_rates[link].append(rate)
        if not slow or wait_s < self._min_share * step_s:
            return None
        slowest = min(slow, key=lambda link: rates[link] / slow[link])
        sender, receiver = location_of(list(slow))
        return SlowLink(
            sender=sender,
            receiver=receiver,
            bytes_per_s=rates[slowest],
            usual_bytes_per_s=slow[slowest],
            wait_share=wait_s / step_s,
        )

    def _usual_rate_of(self, link: Link, rates: Mapping[Link, float]) -> float:
        """Return the rate of a link in earlier windows, or the typical rate of all links if that is higher."""
        usual = 0.0
        if link not in self._usual_rates:
            self._usual_rates[link] = deque(maxlen=NUM_USUAL_WINDOWS)
        if self._usual_rates[link]:
            usual = median(self._usual_rates[link])
        if len(rates) >= MIN_LINKS:
            usual = max(usual, typical_rate(list(rates.values())))
        return usual

    def _judge_floor(self, wait_s: float, step_s: float) -> SlowLink | None:
        """Detect a slow link by comparing the waiting time with earlier windows, if link rates are unknown."""
        usual_s = self._usual_floor_s
        self._recent_floors_s.append(wait_s)
        if len(self._recent_floors_s) == self._recent_floors_s.maxlen:
            kept_s = max(self._recent_floors_s)
            self._usual_floor_s = kept_s
            if usual_s is not None:
                self._usual_floor_s = min(usual_s, kept_s)
        if usual_s is None or wait_s - usual_s < self._min_share * step_s:
            return None
        return SlowLink(
            sender=None,
            receiver=None,
            bytes_per_s=0.0,
            usual_bytes_per_s=0.0,
            wait_share=wait_s / step_s,
        )


def _combined(streak: Sequence[SlowLink]) -> SlowLink:
    """Summarize the findings of a streak by the most frequent link and the median values."""
    sender, receiver = mode([slow_link.ends for slow_link in streak])
    return SlowLink(
        sender=sender,
        receiver=receiver,
        bytes_per_s=median([slow_link.bytes_per_s for slow_link in streak]),
        usual_bytes_per_s=median([slow_link.usual_bytes_per_s for slow_link in streak]),
        wait_share=median([slow_link.wait_share for slow_link in streak]),
    )
