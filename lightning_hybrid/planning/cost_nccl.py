"""Seconds of NCCL's collectives, by the model with which NCCL itself chooses among its algorithms and protocols.

    time = launch + base latency + hops * latency per hop + bytes / bandwidth + filling

The constants are those of NCCL's source (`src/graph/tuning.cc` and `topo.h`, of 2026): latencies of a start and of a
hop by algorithm, protocol and type of link, and the part of a link's rate that each protocol reaches. LL sends a flag
with every 4 bytes, LL128 with every 120, Simple waits for whole chunks. The model was made to rank algorithms, so that
it chooses here too; `tests/evidence/planner` compares its times with measured ones. `filling` is our addition.

    ring        2 (P - 1) hops, of which 2 (N - 1) between nodes        2 (P - 1) / P S through the slowest link
    tree        2 ((k - 1) + log2 N) hops                               2 S; between two nodes S
    nvls        one hop through the switch of the node                  (1 + 1 / k) S
    nvls_tree   one hop and 2 log2 N between nodes                      2 S between nodes; between two S
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_hybrid.checks import require_number, require_whole
from lightning_hybrid.planning.cost import Cost, Link

NcclAlgorithm = Literal["ring", "tree", "nvls", "nvls_tree"]
Protocol = Literal["ll", "ll128", "simple"]

US = 1e-6

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
NVLS_HOP_S, NVLS_TREE_HOP_S = 25 * US, 20.9 * US
SHARE_OF_PROTOCOL = (0.5, 0.92, 1.0)
SHARE_OF_TREE = 0.92
# Our addition: a pipeline that has to fill. On NVSwitch with NVLink SHARP, between nodes, sums of 1 to 128 MiB were
# measured at 0.9 to 1.9 times NCCL's formula (NVIDIA/nccl-tests issue 309: 2, 4 and 8 nodes of 8 H100 on 8 x 400
# Gbit/s), growing with the depth of the tree and with the bytes until all chunks are as large as they get. Ampere's
# trees show no difference (2 x 8 A100 of Oracle's cloud, 0.9 to 1.1). Over the network software of other clouds (EFA,
# TCP) these sums take 1.3 to 5 times as long as here.
# Of a tree between nodes, per doubling of the nodes: beyond many bytes, and the bytes at which it is half of that.
FILLING_S, FILLING_HALF_BYTES = 110 * US, 24 * 2**20
PLATEAU, PLATEAU_BEFORE_AMPERE = 1.4, 1.9  # of the latency of Simple rings between nodes, beyond the smallest sizes
PLATEAU_BYTES_PER_RANK = 64

# The part of their bandwidth that trees reach, by protocol, at 64 B, 128 B, 256 B, ...
TREE_CORRECTION = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """NCCL on given hardware.

    Args:
        inside: `nvlink` or `pci`: the connection of the GPUs of a node.
        is_before_ampere: V100, P100, P40 and older.
        algorithms: Algorithms to choose from; `nvls` and `nvls_tree` need Hopper or newer, `tree` NCCL 2.4 or newer.
        protocols: Protocols to choose from; LL128 needs NVLink and Volta or newer.
        ll_up_to_bytes: None: the fastest by the model (NCCL 2.5 or newer). Before, LL was used up to this size and
            Simple above: 16384.
        nvls_share: The part of the links' rate that NVLS reaches; 0.85 on Hopper, 0.74 on Blackwell.
        net_overhead_s: Host time of a ring's hop next to a network: 1e-6 on Intel, 2e-6 on AMD.
        launch_s: Seconds per collective outside NCCL's model: kernel launch and the start of all ranks.
    """

    inside: Literal["nvlink", "pci"]
    is_before_ampere: bool = False
    algorithms: Sequence[NcclAlgorithm] = ("ring", "tree")
    protocols: Sequence[Protocol] = ("ll", "ll128", "simple")
    ll_up_to_bytes: int | None = None
    nvls_share: float = 0.85
    net_overhead_s: float = 1e-6
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("net_overhead_s", "launch_s"):
            require_number(name, getattr(self, name), "it is a time in seconds, 0 where there is none")
        require_whole("ll_up_to_bytes", self.ll_up_to_bytes or 0, "it is a size of messages; null: NCCL's own", least=0)
        for name, values, known in (
            ("inside", [self.inside], ["nvlink", "pci"]),
            ("algorithms", list(self.algorithms), list(get_args(NcclAlgorithm))),
            ("protocols", list(self.protocols), list(get_args(Protocol))),
        ):
            if not values or any(value not in known for value in values):
                raise ValueError(
                    f"`{name}` (={values}) must be of {', '.join(known)}: it says what NCCL has on this hardware."
                )

    def all_reduce(
        self,
        num_bytes: float,
        *,
        num_nodes: int,
        ranks_per_node: int,
        inside: Link,
        across: Link,
        algorithm: NcclAlgorithm | None = None,
    ) -> Cost:
        """Compute the cost of an all-reduce by the fastest algorithm and protocol, or of one algorithm.

        `inside.bytes_per_s` is the rate of a GPU in each direction, `across.bytes_per_s` that of a node, all its NICs
        together. A hop takes NCCL's own latency, or the link's where that is more (sockets, slow fabrics).
        """
        require_whole("num_nodes", num_nodes, "nodes are counted")
        require_whole("ranks_per_node", ranks_per_node, "ranks are counted")
        if num_nodes * ranks_per_node == 1:
            return Cost()
        found = [
            (kind, self._all_reduce(kind, place, num_bytes, num_nodes, ranks_per_node, inside, across))
            for kind in ([algorithm] if algorithm else self.algorithms)
            if _is_possible(kind, num_nodes, ranks_per_node)
            for place in self._protocols(num_bytes, kind)
        ]
        # Filling is added after the choice: NCCL chooses by its own model, which does not have it.
        chosen, cost = min(found, key=lambda pair: pair[1].total_s)
        return cost + Cost(latency_s=self._filling_s(chosen, num_bytes, num_nodes))

    def _filling_s(self, algorithm: NcclAlgorithm, num_bytes: float, num_nodes: int) -> float:
        # Where there is NVLS, that is from Hopper on: Ampere's trees show no such difference.
        if algorithm not in ("tree", "nvls_tree") or "nvls_tree" not in self.algorithms:
            return 0.0
        return (num_nodes - 1).bit_length() * FILLING_S * num_bytes / (num_bytes + FILLING_HALF_BYTES)

    def coded_sum(self, num_bytes: float, num_nodes: int, across: Link) -> Cost:
        """Compute the cost of a sum through a codec between nodes, one rank on each, without the codec's own time.

        Two exchange `num_bytes`, by a gather of both; more send parts by an all-to-all, which is taken to cost what a
        gather does, and gather the sums. A gather is half of a ring's all-reduce.
        """
        gathered = 2 * num_bytes if num_nodes == 2 else num_bytes
        found = []
        for place in self._protocols(gathered, "ring"):
            ring = self._all_reduce("ring", place, gathered, num_nodes, 1, across, across)
            start_s = self.launch_s + BASE_S["ring"][place]
            hops_s = (ring.latency_s - start_s) / 2
            found.append(Cost(latency_s=start_s + hops_s, transfer_s=ring.transfer_s / 2))
        fastest = min(found, key=lambda cost: cost.total_s)
        return fastest if num_nodes == 2 else fastest + fastest

    def scatter_reduce(self, num_bytes: float, num_ranks: int, inside: Link) -> Cost:
        """Compute the cost of a scatter-reduce inside a node, round a ring; the gather costs the same."""
        return self._inside_ring(num_bytes, num_ranks, inside, (num_ranks - 1) / num_ranks)

    def reduce(self, num_bytes: float, num_ranks: int, inside: Link) -> Cost:
        """Compute the cost of a reduce inside a node, along a chain in chunks; the broadcast costs the same."""
        return self._inside_ring(num_bytes, num_ranks, inside, 1.0)

    def _inside_ring(self, num_bytes: float, num_ranks: int, inside: Link, share: float) -> Cost:
        require_whole("num_ranks", num_ranks, "ranks are counted")
        if num_ranks == 1:
            return Cost()
        found = [
            Cost(
                latency_s=self.launch_s + BASE_S["ring"][place] + (num_ranks - 1) * HOP_S[self.inside, "ring"][place],
                transfer_s=share * num_bytes / (SHARE_OF_PROTOCOL[place] * inside.bytes_per_s),
            )
            for place in self._protocols(num_bytes, "ring")
        ]
        return min(found, key=lambda cost: cost.total_s)

    def _protocols(self, num_bytes: float, algorithm: NcclAlgorithm) -> list[int]:
        # As indices of the tables above: 0 is LL, 1 is LL128, 2 is Simple, the only one that NVLS has.
        if algorithm.startswith("nvls"):
            return [2]
        names = list(get_args(Protocol))
        if self.ll_up_to_bytes is not None:
            return [0 if num_bytes <= self.ll_up_to_bytes else 2]
        return [names.index(name) for name in self.protocols]

    def _all_reduce(
        self,
        algorithm: NcclAlgorithm,
        place: int,
        num_bytes: float,
        num_nodes: int,
        ranks_per_node: int,
        inside: Link,
        across: Link,
    ) -> Cost:
        # `place` is the index of the protocol (LL, LL128, Simple). The formulas are those of NCCL's tuning.cc: a hop
        # costs the latency of its link; bytes cross the slowest link; trees carry S between two nodes, else 2 S.
        num_ranks, rounds = num_nodes * ranks_per_node, (num_nodes - 1).bit_length()
        if algorithm == "ring":
            overhead_s = 0.0 if num_nodes == 1 else self.net_overhead_s * (3 if place == 2 else 1)
            inside_s = max(HOP_S[self.inside, "ring"][place], overhead_s, inside.latency_s)
            across_s = max(HOP_S["net", "ring"][place], across.latency_s)
            hops_s = 2 * (num_ranks - num_nodes) * inside_s + 2 * (num_nodes - 1) * across_s
            # tuning.cc's plateau of Simple rings between nodes.
            if place == 2 and num_nodes > 1 and num_bytes / num_ranks >= PLATEAU_BYTES_PER_RANK:
                hops_s *= PLATEAU_BEFORE_AMPERE if self.is_before_ampere else PLATEAU
            rate = inside.bytes_per_s if num_nodes == 1 else across.bytes_per_s
            if ranks_per_node > 1:
                rate = min(rate, inside.bytes_per_s)
            transfer_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / rate / SHARE_OF_PROTOCOL[place]
            return Cost(latency_s=self.launch_s + BASE_S["ring"][place] + hops_s, transfer_s=transfer_s)
        up_and_down = 0 if num_nodes == 1 else 1 if num_nodes == 2 else 2
        across_s = up_and_down * num_bytes / across.bytes_per_s
        if algorithm == "tree":
            inside_s = max(HOP_S[self.inside, "tree"][place], inside.latency_s)
            hop_s = max(HOP_S["net", "tree"][place], across.latency_s)
            hops_s = 2 * ((ranks_per_node - 1) * inside_s + rounds * hop_s)
            # Up the tree and down again: inside a node all bytes pass twice.
            slowest_s = max(across_s, (2 if ranks_per_node > 1 else 0) * num_bytes / inside.bytes_per_s)
            share = SHARE_OF_TREE * SHARE_OF_PROTOCOL[place] * _tree_correction(num_bytes, place)
            return Cost(latency_s=self.launch_s + BASE_S["tree"][place] + hops_s, transfer_s=slowest_s / share)
        inside_s = (1 + 1 / ranks_per_node) * num_bytes / (self.nvls_share * inside.bytes_per_s)
        hop_s = max(NVLS_TREE_HOP_S, across.latency_s)
        return Cost(latency_s=self.launch_s + NVLS_HOP_S + 2 * rounds * hop_s, transfer_s=max(inside_s, across_s))


def _is_possible(algorithm: NcclAlgorithm, num_nodes: int, ranks_per_node: int) -> bool:
    # NVLS is the switch inside one node; NVLS tree joins such switches by a tree between nodes.
    if algorithm == "nvls":
        return num_nodes == 1 and ranks_per_node > 1
    return algorithm != "nvls_tree" or num_nodes > 1


def _tree_correction(num_bytes: float, place: int) -> float:
    """Look up the correction at the power of two below the size; 1 below 64 B or beyond the table.

    >>> _tree_correction(63, 0), _tree_correction(64 << 13, 0), _tree_correction(1 << 40, 2)
    (1.0, 0.4, 1.0)
    """
    step = (int(num_bytes) >> 6).bit_length() - 1
    return float(TREE_CORRECTION[place][step]) if 0 <= step < len(TREE_CORRECTION[place]) else 1.0
