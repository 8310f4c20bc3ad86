"""Seconds of an all-reduce by counting: every algorithm of ours and of others, as pure functions of bytes and ranks.

    time = latency + transfer + addition          "alpha-beta-gamma" (Hockney 1994; Thakur, Rabenseifner, Gropp 2005)

    alpha   seconds until a message arrives, however short          Link.latency_s
    beta    seconds per byte on a link, in each direction           1 / Link.bytes_per_s
    gamma   seconds per byte to add two buffers                     1 / add_bytes_per_s

With P ranks and S bytes (log2 rounded up):

    ================  =======================  ==========================  ================
    algorithm         latency                  transfer                    addition
    ================  =======================  ==========================  ================
    ring              2 (P - 1) alpha          2 (P - 1) / P S beta        (P - 1) / P S gamma
    halving_doubling  2 log2 P alpha           2 (P - 1) / P S beta        (P - 1) / P S gamma
    doubling          log2 P alpha             log2 P S beta               log2 P S gamma
    double_tree       2 log2 P alpha           2 S beta (2 ranks: S beta)  S gamma
    in_network        2 alpha                  S beta                      none
    levels            sums over levels, each on what the inner ones left of S (two-level, torus, BlueConnect)
    hierarchical      2 (k - 1) alpha + ring   2 (k - 1) S beta + ring     (k - 1) S gamma + ring
    ================  =======================  ==========================  ================

These are lower limits of what software does: consent for messages and protocols are in `cost_gloo.py` and
`cost_nccl.py`. Nothing here knows a cluster; `cluster.py` puts links and algorithms together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.checks import require_positive, require_whole


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects two ranks: ``latency_s`` one way, ``bytes_per_s`` of payload in each direction at the same time.

    >>> Link(latency_s=2e-6, bytes_per_s=12.5e9).seconds(25e3)
    4e-06

    Raises ``ValueError`` for a negative latency or a rate that is not positive.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        require_positive(
            "bytes_per_s", self.bytes_per_s, "it is the rate of a link in bytes per second, 1.25e10 for 100 Gbit/s"
        )
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(
                f"`latency_s` (={self.latency_s}) must not be negative, nor infinite: it is the time of the shortest "
                "message, one way, in seconds: 5.0e-6 on a usual fabric."
            )

    def seconds(self, num_bytes: float) -> float:
        """Of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one collective, by cause. Costs of parts that follow each other add."""

    latency_s: float = 0.0
    transfer_s: float = 0.0
    add_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.latency_s + self.transfer_s + self.add_s

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            latency_s=self.latency_s + other.latency_s,
            transfer_s=self.transfer_s + other.transfer_s,
            add_s=self.add_s + other.add_s,
        )


NO_COST = Cost()


# ---- one level -------------------------------------------------------------------------------------------------------


def ring(num_bytes: float, num_ranks: int, link: Link, *, add_bytes_per_s: float = math.inf) -> Cost:
    """All-reduce round a ring: scatter-reduce, then gather (Patarasuk and Yuan 2009).

    >>> ring(8e6, 4, Link(latency_s=1e-6, bytes_per_s=1e9))     # 6 hops; 1.5 times the bytes
    Cost(latency_s=6e-06, transfer_s=0.012, add_s=0.0)
    """
    scatter = scatter_reduce(num_bytes, num_ranks, link, add_bytes_per_s=add_bytes_per_s)
    return scatter + gather(num_bytes, num_ranks, link)


def scatter_reduce(num_bytes: float, num_ranks: int, link: Link, *, add_bytes_per_s: float = math.inf) -> Cost:
    """Every rank ends with the sum of one part of P."""
    _check(num_bytes, num_ranks)
    share = (num_ranks - 1) / num_ranks * num_bytes
    return Cost(
        latency_s=(num_ranks - 1) * link.latency_s,
        transfer_s=share / link.bytes_per_s,
        add_s=share / add_bytes_per_s,
    )


def gather(num_bytes: float, num_ranks: int, link: Link) -> Cost:
    """Every rank ends with all P parts."""
    return scatter_reduce(num_bytes, num_ranks, link)


def halving_doubling(num_bytes: float, num_ranks: int, link: Link, *, add_bytes_per_s: float = math.inf) -> Cost:
    """All-reduce by recursive halving, then doubling (Rabenseifner 2004).

    Where P is no power of two, the ranks beyond the next lower one hand their buffer over first and get the sum last:
    two rounds with all bytes more.
    """
    _check(num_bytes, num_ranks)
    core = 1 << (num_ranks.bit_length() - 1)
    share = (core - 1) / core * num_bytes
    extra = num_bytes if core < num_ranks else 0.0
    return Cost(
        latency_s=2 * (core.bit_length() - 1 + (core < num_ranks)) * link.latency_s,
        transfer_s=2 * (share + extra) / link.bytes_per_s,
        add_s=(share + extra) / add_bytes_per_s,
    )


def doubling(num_bytes: float, num_ranks: int, link: Link, *, add_bytes_per_s: float = math.inf) -> Cost:
    """All-reduce by recursive doubling: the fewest rounds there can be, all bytes in each."""
    rounds = _log2(num_bytes, num_ranks)
    return Cost(
        latency_s=rounds * link.latency_s,
        transfer_s=rounds * num_bytes / link.bytes_per_s,
        add_s=rounds * num_bytes / add_bytes_per_s,
    )


def double_tree(num_bytes: float, num_ranks: int, link: Link, *, add_bytes_per_s: float = math.inf) -> Cost:
    """All-reduce up and down two binary trees, each for half the bytes (Sanders, Speck, Traeff 2009), well pipelined.

    A rank is inside one tree and a leaf of the other, so that it sends and receives at most S on the way up and S on
    the way down. Two ranks have one edge: S.
    """
    depth = _log2(num_bytes, num_ranks)
    num_times = 0 if num_ranks == 1 else 1 if num_ranks == 2 else 2
    return Cost(
        latency_s=2 * depth * link.latency_s,
        transfer_s=num_times * num_bytes / link.bytes_per_s,
        add_s=(num_bytes if num_ranks > 1 else 0.0) / add_bytes_per_s,
    )


def in_network(num_bytes: float, num_ranks: int, link: Link) -> Cost:
    """All-reduce added up in the switches (SHARP): every rank sends and receives its bytes once."""
    _check(num_bytes, num_ranks)
    if num_ranks == 1:
        return NO_COST
    return Cost(latency_s=2 * link.latency_s, transfer_s=num_bytes / link.bytes_per_s)


# ---- several levels --------------------------------------------------------------------------------------------------


def levels(num_bytes: float, sizes: Sequence[tuple[int, Link]], *, add_bytes_per_s: float = math.inf) -> Cost:
    """All-reduce over a product of groups: scatter-reduce level by level, then gather back the same way.

    ``sizes``: ranks and link of each level, the innermost first. Two levels (node, world) are our ``two_level`` and the
    2D torus of Mikami et al. 2018 (arXiv:1811.05233); more are BlueConnect (Cho et al. 2019). One is the ring.

        time = sum over levels j of   2 (p_j - 1) alpha_j + 2 (p_j - 1) / p_j S / (p_1 ... p_{j-1}) beta_j

    >>> link = Link(latency_s=0.0, bytes_per_s=1e9)
    >>> levels(8e6, [(4, link), (2, link)]).transfer_s == ring(8e6, 8, link).transfer_s     # the same bytes
    True
    """
    cost, left = NO_COST, num_bytes
    for num_ranks, link in sizes:
        cost += ring(left, num_ranks, link, add_bytes_per_s=add_bytes_per_s)
        left /= num_ranks
    return cost


def hierarchical(
    num_bytes: float,
    *,
    num_nodes: int,
    ranks_per_node: int,
    inside: Link,
    across: Link,
    add_bytes_per_s: float = math.inf,
) -> Cost:
    """All-reduce of Jia et al. 2018 (arXiv:1807.11205): reduce in the node, ring of the leaders, broadcast in the node.

        4 (k - 1) + 2 (P / k - 1) hops by its count; here a leader hears its k - 1 ranks one after another, and so back:

    >>> link = Link(latency_s=1.0, bytes_per_s=1.0)
    >>> hierarchical(0, num_nodes=128, ranks_per_node=8, inside=link, across=link).latency_s
    268.0
    """
    _check(num_bytes, ranks_per_node)
    others = ranks_per_node - 1
    reduce = Cost(
        latency_s=others * inside.latency_s,
        transfer_s=others * num_bytes / inside.bytes_per_s,
        add_s=others * num_bytes / add_bytes_per_s,
    )
    broadcast = Cost(latency_s=reduce.latency_s, transfer_s=reduce.transfer_s)
    return reduce + ring(num_bytes, num_nodes, across, add_bytes_per_s=add_bytes_per_s) + broadcast


# ---- pieces, and what none can beat ----------------------------------------------------------------------------------


def pipelined_s(stages_s: Sequence[float], num_pieces: int) -> float:
    """Seconds of equal pieces through stages that work at the same time.

        time = sum over stages + (pieces - 1) * slowest stage         ``stages_s``: each of one piece

    >>> pipelined_s([1.0, 3.0, 1.0], 4)
    14.0
    """
    require_whole("num_pieces", num_pieces, "pieces of a buffer are counted")
    return sum(stages_s) + (num_pieces - 1) * max(stages_s, default=0.0)


def best_num_pieces(stages: Sequence[Cost]) -> int:
    """Into how many pieces to cut a buffer, where ``stages`` are its costs in one.

    With m pieces each stage takes a_j + b_j / m, the time is sum a + (m - 1) max a + (sum b - max b) / m + max b, and
    the least is at m = sqrt((sum b - max b) / max a).

    >>> best_num_pieces([Cost(latency_s=1.0, transfer_s=100.0), Cost(latency_s=1.0, transfer_s=900.0)])
    10
    """
    bytes_s = [stage.transfer_s + stage.add_s for stage in stages]
    most_latency_s = max((stage.latency_s for stage in stages), default=0.0)
    hidden_s = sum(bytes_s) - max(bytes_s, default=0.0)
    if most_latency_s <= 0 or hidden_s <= 0:
        return 1
    least = max(1, math.floor(math.sqrt(hidden_s / most_latency_s)))
    return min((least, least + 1), key=lambda m: (m - 1) * most_latency_s + hidden_s / m)


def least_s(num_bytes: float, *, num_nodes: int, across: Link, nics_per_node: int = 1) -> float:
    """What no all-reduce among the nodes' own processors can beat between N nodes with r NICs each.

        time >= max(2 (N - 1) / N S / (r B),  alpha)

    The bytes are those that must leave a node (Patarasuk and Yuan 2009); and nothing is known of another node before
    one message has come. Switches that add (``in_network``) can take half of the first. One node has no such bound: 0.

    >>> least_s(8e6, num_nodes=2, across=Link(latency_s=0.0, bytes_per_s=1e9))
    0.008
    """
    _check(num_bytes, num_nodes)
    if num_nodes == 1:
        return 0.0
    egress = 2 * (num_nodes - 1) / num_nodes * num_bytes
    return max(egress / (nics_per_node * across.bytes_per_s), across.latency_s)


def _log2(num_bytes: float, num_ranks: int) -> int:
    _check(num_bytes, num_ranks)
    return (num_ranks - 1).bit_length()


def _check(num_bytes: float, num_ranks: int) -> None:
    require_whole("num_ranks", num_ranks, "ranks that take part are counted")
    if not num_bytes >= 0:
        raise ValueError(f"`num_bytes` (={num_bytes}) must not be negative: it is what is summed, in bytes.")
