"""Alpha-beta cost models of textbook all-reduce algorithms, as functions of bytes and ranks.

    time = latency + transfer                     "alpha-beta" (Hockney 1994; Thakur, Rabenseifner, Gropp 2005)

    alpha   seconds until a message arrives, however short          Link.latency_s
    beta    seconds per byte on a link, in each direction           1 / Link.bytes_per_s

With P ranks and S bytes (log2 rounded up):

    ================  ===================  ==========================
    algorithm         latency              transfer
    ================  ===================  ==========================
    ring              2 (P - 1) alpha      2 (P - 1) / P S beta
    halving_doubling  2 log2 P alpha       2 (P - 1) / P S beta
    double_tree       2 log2 P alpha       2 S beta (2 ranks: S beta)
    levels            sums over levels, each on the shard of S from the inner ones (two-level, torus, BlueConnect)
    ================  ===================  ==========================

These are lower limits for real software. `cost_gloo.py` and `cost_nccl.py` add protocols and their waits, and
`cluster_costs.py` combines links and algorithms of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_hybrid.checks import require_number, require_positive, require_whole

Level = Literal["inside", "across"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link between two ranks, with its latency and bandwidth.

    `latency_s` is one way. `bytes_per_s` is the payload in each direction at the same time.

    Raises:
        ValueError: The latency is negative, or the bandwidth is not positive.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        require_positive(
            "bytes_per_s",
            self.bytes_per_s,
            "message sizes are divided by this bandwidth. Set 1.25e10 bytes per second for 100 Gbit/s",
        )
        why = "the one-way latency of a link cannot be negative. Set 5.0e-6 seconds for a typical fabric"
        require_number("latency_s", self.latency_s, why)

    def or_slower(self, other: Link | None) -> Link:
        """Return a link with the higher of two links' latencies and the lower of their bandwidths."""
        if other is None:
            return self
        latency_s = max(self.latency_s, other.latency_s)
        return Link(latency_s=latency_s, bytes_per_s=min(self.bytes_per_s, other.bytes_per_s))

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message in seconds."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Cost of one stage of an all-reduce for one chunk.

    The stage first waits `delay_s` without using the resource `level`, then uses it for `work_s`
    seconds at full rate. `share` is the fraction of the resource's rate that the stage can use by
    itself.
    """

    name: str
    level: Level
    delay_s: float
    work_s: float
    share: float = 1.0

    @property
    def alone_s(self) -> float:
        """Time of the stage in seconds if no other stage uses the same resource."""
        return self.delay_s + self.work_s / self.share


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Group of nodes that differ from the rest of a cluster, such as older nodes or nodes with degraded links.

    Args:
        inside: Link inside these nodes. None: as in the other nodes.
        across: Link of one network card of these nodes. None: as in the other nodes.
        slowdown: Compute time of the ranks of these nodes relative to the other ranks.
    """

    inside: Link | None = None
    across: Link | None = None
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        require_positive(
            "slowdown",
            self.slowdown,
            "compute times are multiplied by this factor. Set 2 for nodes that are half as fast",
        )


def curve_at(curve: Mapping[float, float], num_bytes: float) -> float:
    """Interpolate a curve at `num_bytes`, linearly on logarithmic axes.

    The curve is constant beyond its ends, and 1 if it has no points.

    >>> curve_at({1: 1.0, 4: 4.0}, 2), curve_at({1: 1.0, 4: 4.0}, 9), curve_at({}, 2)
    (2.0, 4.0, 1.0)
    """
    if not curve:
        return 1.0
    sizes = sorted(curve)
    return float(
        2
        ** np.interp(
            math.log2(max(1.0, num_bytes)), np.log2(sizes), np.log2([curve[n] for n in sizes])
        )
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time of one collective in seconds, split into latency and transfer.

    The costs of consecutive collectives can be added.
    """

    latency_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Sum of latency and transfer time in seconds."""
        return self.latency_s + self.transfer_s

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            latency_s=self.latency_s + other.latency_s,
            transfer_s=self.transfer_s + other.transfer_s,
        )


def ring(num_bytes: float, num_ranks: int, link: Link) -> Cost:
    """Return the cost of a ring all-reduce (Patarasuk and Yuan 2009).

    It is a reduce-scatter around the ring, followed by an all-gather.

    >>> ring(8e6, 4, Link(latency_s=1e-6, bytes_per_s=1e9))     # 6 hops; 1.5 times the bytes
    Cost(latency_s=6e-06, transfer_s=0.012)
    """
    _check(num_bytes, num_ranks)
    hops = num_ranks - 1
    share = (num_ranks - 1) / num_ranks * num_bytes
    half = Cost(latency_s=hops * link.latency_s, transfer_s=share / link.bytes_per_s)
    return half + half


def halving_doubling(num_bytes: float, num_ranks: int, link: Link) -> Cost:
    """Return the cost of an all-reduce by recursive halving and doubling (Rabenseifner 2004).

    If the number of ranks is not a power of two, the ranks beyond the next lower power add two
    rounds with all bytes.
    """
    _check(num_bytes, num_ranks)
    # The largest power of two of the ranks takes part. The other ranks send all bytes before, and receive the sum
    # after.
    core = 1 << (num_ranks.bit_length() - 1)
    share = (core - 1) / core * num_bytes
    extra = num_bytes if core < num_ranks else 0.0
    return Cost(
        latency_s=2 * (core.bit_length() - 1 + (core < num_ranks)) * link.latency_s,
        transfer_s=2 * (share + extra) / link.bytes_per_s,
    )


def double_tree(num_bytes: float, num_ranks: int, link: Link) -> Cost:
    """Return the cost of a pipelined all-reduce on two binary trees, each for half the bytes.

    A rank sends at most S bytes up and S bytes down. Two ranks have one edge, so each sends S bytes
    in all. Source: Sanders, Speck, Traeff 2009.
    """
    _check(num_bytes, num_ranks)
    depth = (num_ranks - 1).bit_length()
    # A rank is an inner node of one tree and a leaf of the other, so it sends S bytes up and S bytes down in all.
    num_times = 0 if num_ranks == 1 else 1 if num_ranks == 2 else 2
    return Cost(
        latency_s=2 * depth * link.latency_s, transfer_s=num_times * num_bytes / link.bytes_per_s
    )


def levels(num_bytes: float, sizes: Sequence[tuple[int, Link]]) -> Cost:
    """Return the cost of an all-reduce over nested groups of ranks.

    It is a reduce-scatter at each level from the innermost on, followed by all-gathers in reverse
    order.

        time = sum over levels j of   2 (p_j - 1) alpha_j + 2 (p_j - 1) / p_j S / (p_1 ... p_{j-1}) beta_j

    Two levels (node, world) are our `two_level` and the 2D torus of Mikami et al. 2018 (arXiv:1811.05233). More levels
    are BlueConnect (Cho et al. 2019). One level is the ring.

    Args:
        num_bytes: Bytes that each rank contributes.
        sizes: Number of ranks and link of each level, the innermost first.

    >>> link = Link(latency_s=0.0, bytes_per_s=1e9)
    >>> levels(8e6, [(4, link), (2, link)]).transfer_s == ring(8e6, 8, link).transfer_s     # the same bytes
    True
    """
    cost = Cost()
    left = num_bytes
    for num_ranks, link in sizes:
        cost += ring(left, num_ranks, link)
        left /= num_ranks
    return cost


def least_s(num_bytes: float, *, num_nodes: int, across: Link, nics_per_node: int = 1) -> float:
    """Return a lower bound for the time of an all-reduce between nodes, in seconds.

    The bound holds if the nodes' own processors reduce, for N nodes with r NICs each:

        time >= max(2 (N - 1) / N S / (r B),  alpha)

    Switches that reduce need half of the bytes. The bound of a single node is 0.

    >>> least_s(8e6, num_nodes=2, across=Link(latency_s=0.0, bytes_per_s=1e9))
    0.008
    """
    _check(num_bytes, num_nodes)
    if num_nodes == 1:
        return 0.0
    # These bytes must leave a node (Patarasuk and Yuan 2009). No rank has data of other ranks before the first message
    # arrives.
    egress = 2 * (num_nodes - 1) / num_nodes * num_bytes
    return max(egress / (nics_per_node * across.bytes_per_s), across.latency_s)


def _check(num_bytes: float, num_ranks: int) -> None:
    require_whole("num_ranks", num_ranks, "an all-reduce has at least one rank")
    if not num_bytes >= 0:
        raise ValueError(
            f"`num_bytes` (={num_bytes}) must be 0 or more. Pass the size of the all-reduce in bytes."
        )
