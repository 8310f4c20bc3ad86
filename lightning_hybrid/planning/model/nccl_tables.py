"""Tuning tables of NCCL and of a cloud's NCCL plug-in, in seconds and bytes.

They hold latencies, bandwidth limits per channel and chunk sizes.

Sources, as of June and August 2026: NCCL, `src/graph/tuning.cc` (latencies, limits, corrections), `src/enqueue.cc` and
`src/transport/nvls.cc` (chunks), `src/graph/connect.cc` (channels); aws-ofi-nccl, `platform-aws.cpp`,
`nccl_ofi_model.cpp` (latencies) and `nccl_ofi_regions.cpp` (choices that replace NCCL's).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_hybrid.planning.model.cost import Link

Generation = Literal["pascal", "volta", "ampere", "hopper", "blackwell"]
Fabric = Literal["ib", "roce", "efa", "slingshot", "tcp", "tcpxo"]
Plugin = Literal["aws_p5", "aws_p5en", "aws_p6"]

US = 1e-6
KIB = 1024
GB = 1e9
GENERATIONS = get_args(Generation)

# Seconds, as (LL, LL128, Simple).
BASE_S = {"tree": (6.8 * US, 14 * US, 8.4 * US), "ring": (6.6 * US, 14 * US, 8.4 * US)}
HOP_S = {
    ("nvlink", "tree"): (0.6 * US, 1.25 * US, 4 * US),
    ("nvlink", "ring"): (0.6 * US, 1.9 * US, 3.4 * US),
    ("pci", "tree"): (1 * US, 1.9 * US, 4 * US),
    ("pci", "ring"): (1 * US, 2.5 * US, 5.7 * US),
    ("net", "tree"): (5 * US, 8.5 * US, 14 * US),
    ("net", "ring"): (2.7 * US, 4 * US, 14 * US),
}
NVLS_HOP_S = 25 * US
NVLS_TREE_HOP_S = 20.9 * US
# Factors on the latency of Simple rings between nodes, for all but the smallest sizes.
PLATEAU, PLATEAU_BEFORE_AMPERE = (
    1.4,
    1.9,
)
PLATEAU_BYTES_PER_RANK = 64

# Latency of a hop over EFA in place of LL's 5 us over InfiniBand, by generation: p3dn, p4d, p5, p6.
EFA_HOP_S = {"volta": 150 * US, "ampere": 75 * US, "hopper": 20 * US, "blackwell": 18 * US}
EFA_SIMPLE_S = 3 * US

# First NCCL version that has each algorithm.
SINCE = {"ring": (2, 0), "tree": (2, 4), "nvls": (2, 17), "nvls_tree": (2, 18)}
NVLS_SHARE = {"hopper": 0.85, "blackwell": 0.74}  # of the links' rate

# Bus bandwidth of a channel in bytes/s on 2 nodes and on more.
RING_LL128 = {"hopper": (36.7 * GB,) * 2, "blackwell": (40 * GB,) * 2}
TREE_LL128 = {"hopper": (36.7 * GB, 29 * GB), "blackwell": (31.67 * GB, 20 * GB)}
LL128_BEFORE_HOPPER = (20 * GB,) * 2
TREE = {
    "ampere": (23.6 * GB, 17.8 * GB),
    "hopper": (41.4 * GB, 36 * GB),
    "blackwell": (42.8 * GB, 24 * GB),
}
TREE_BEFORE_AMPERE = (18.5 * GB, 10 * GB)
NVLS_TREE = {"hopper": (57.7 * GB, 45.5 * GB), "blackwell": (96 * GB, 80 * GB)}
LL = {"intel": (39 * GB, 20.4 * GB), "amd": (22.5 * GB, 19 * GB)}  # of all channels

# Fraction of their bandwidth that NCCL expects trees to reach, by protocol, at 64 B, 128 B, 256 B, ...
TREE_CORRECTION = (
    (
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.7,
        0.7,
        0.7,
        0.7,
        0.6,
        0.5,
        0.4,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1,
        1,
        1,
        1,
    ),
    (
        1,
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.8,
        0.8,
        0.7,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.8,
        0.9,
        0.9,
        0.9,
        0.9,
        1,
        1,
    ),
    (
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.8,
        0.7,
        0.6,
        0.6,
        0.5,
        0.5,
        0.5,
        0.5,
        0.6,
        0.7,
        0.8,
        0.7,
        0.7,
        0.8,
        0.9,
        0.9,
    ),
)

# On nodes of 8 the plug-in uses trees: with LL up to the first number of bytes, and with LL128 up to the bytes listed
# for that many ranks or more.
PLUGIN_TREES = {
    "aws_p5": (0, ((16, 31.4e6), (32, 37.7e6), (64, 117e6), (128, 302e6), (1024, 537e6))),
    "aws_p5en": (192 * KIB, ((16, 13.1e6), (127, 129e6), (1024, 218e6))),
    "aws_p6": (
        384 * KIB,
        ((16, 4.7e6), (32, 18.4e6), (64, 40.4e6), (128, 57.1e6), (256, 72.9e6), (1024, 97e6)),
    ),
}


@dataclass(frozen=True)
class NcclJob:
    """Description of an all-reduce for NCCL's tables, with its size, links and channels.

    `across` has the payload bandwidth of a whole node.
    """

    num_bytes: float
    num_nodes: int
    ranks_per_node: int
    inside: Link
    across: Link
    channels: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def rounds(self) -> int:
        """Depth of a binary tree that connects the nodes."""
        return (self.num_nodes - 1).bit_length()

    @property
    def column(self) -> int:
        """Column of NCCL's bandwidth tables, which is 0 for up to two nodes and 1 for more."""
        return self.num_nodes > 2


def tree_correction(num_bytes: float, place: int) -> float:
    """Return the fraction of bandwidth that NCCL expects a tree to reach at this message size.

    The table is read at the largest power of two up to the size. The fraction is 1 below 64 B or
    beyond the table. `place` is the protocol: 0 is LL, 1 is LL128, 2 is Simple.

    >>> tree_correction(63, 0), tree_correction(64 << 13, 0), tree_correction(1 << 40, 2)
    (1.0, 0.4, 1.0)
    """
    step = (int(num_bytes) >> 6).bit_length() - 1
    return float(TREE_CORRECTION[place][step]) if 0 <= step < len(TREE_CORRECTION[place]) else 1.0


def nvls_tree_round_bytes(
    num_bytes: float, *, num_nodes: int, heads: int, generation: Generation
) -> float:
    """Return the number of bytes per node that are in flight on an edge of an NVLS tree.

    They are channels x heads x chunk, and at most `num_bytes`.

    >>> nvls_tree_round_bytes(2**30, num_nodes=2, heads=8, generation="hopper") / 2**20
    16.0
    """
    num_channels = 16
    most = 64 * KIB if num_nodes >= 4 else 128 * KIB
    if generation == "blackwell":
        num_channels = 32 if num_nodes == 2 else 24
        most = 64 * KIB
    chunk = most
    parts = num_channels * heads
    if num_bytes < 4 * parts * chunk:
        chunk = min(chunk, 64 * KIB)
    if num_bytes < parts * chunk:
        chunk = 32 * KIB
    return min(num_bytes, parts * chunk)


def tree_round_bytes(
    num_bytes: float, place: int, *, num_channels: int, num_nodes: int, ranks_per_node: int
) -> float:
    """Return the number of bytes per node that are in flight on an edge of a tree.

    They are channels x chunk, and at most `num_bytes`. `place` is the protocol: 0 is LL, 1 is
    LL128, 2 is Simple.

    >>> tree_round_bytes(2**30, 2, num_channels=16, num_nodes=4, ranks_per_node=8) / 2**20
    8.0
    """
    chunk = (32 * KIB, 576_000, 512 * KIB)[place]
    if place == 1:  # chunks get smaller until there are enough for a pipeline of this depth
        depth = num_nodes.bit_length() + 0.1 * ranks_per_node
        while num_bytes // (num_channels * chunk) < depth * 64 / ranks_per_node and chunk > 131_072:
            chunk //= 2
        while num_bytes // (num_channels * chunk) < depth * 16 / ranks_per_node and chunk > 32_768:
            chunk //= 2
    return min(num_bytes, num_channels * chunk)
