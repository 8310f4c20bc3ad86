"""The bytes that an all-reduce puts on a node's links: what its algorithm sends, and the least that any must."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_hybrid.comm.bucket_layout import Exchange, is_exchange
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The bytes of one all-reduce, each of the node that has most. Sums, in one direction, without headers."""

    least_across: float = 0.0  # what any algorithm must send from a node to the others
    across: float = 0.0  # what this one sends
    inside: float = 0.0  # what the ranks of a node send one another

    def without_gather(self, scope: Literal["node", "world"]) -> Traffic:
        """Return that of a sum of which each rank gets a part, as the ranks of a node share it, or all."""
        return replace(
            self, inside=self.inside / 2, across=self.across / (2 if scope == "world" else 1)
        )


NO_TRAFFIC = Traffic()


def traffic_of(
    algorithm: Algorithm | Exchange,
    topology: Topology,
    num_bytes: float,
    *,
    num_bytes_across: float | None = None,
    is_ring: bool = True,
) -> Traffic:
    """Count the bytes on the links of the busiest node, for one all-reduce of `num_bytes`.

    With P ranks on N nodes, k on the largest, S bytes, and A bytes where sums travel between nodes in another dtype
    (`num_bytes_across`; None: A = S):

        any               least_across = 2 (N - 1) / N A
        flat,             across = e 2 (P - 1) / P A               e, i: edges of the ring 0 -> 1 -> ... -> P - 1 -> 0
        parallel_flat     inside = i 2 (P - 1) / P A               that leave a node, and that stay in it
        hierarchical      across = 2 (N - 1) / N A
                          inside = (k - 1) S + (k - 1) S           all to the leader, and back
        two_level         across = k 2 (N - 1) / N A / k           one ring for each of k shards
                          inside = (k - 1) S                       scatter: each rank keeps one shard of k
                                 + (k - 1) S                       gather
        node_sum          inside = 2 (k - 1) S                     a ring in each node
        node_gather,      inside = (k - 1) S                       each rank's 1 / k to the others, or
        node_collect      inside = (k - 1) / k S                   to the node's leader
        world_sum         as flat
        world_gather,     across = (N - 1) / N S                   each rank's 1 / P to those of its local rank, then as
        world_collect                                              node_gather; or straight to rank zero

    A codec has no ring (`is_ring` False): each rank sends each other one its part, and then its sum of its own part.
    Nothing changes with one rank of each node in a group; `flat` and `parallel_flat` with several ranks on a node send

        across = 2 k (P - k) / P A            inside = 2 k (k - 1) / P A

    `e` is 1 where ranks are numbered node by node, k where they go round the nodes. On one node A is S. Left out are
    the checksum of a step, fractions of a KiB, Adasum's inner products (else it sends as `hierarchical`), and that
    chunks of few KiB, which nodes exchange whole (`between_nodes_form`), cost N / 2 times `across`; with a codec, that
    the last part of a chunk may be shorter. These are the algorithms as they are on the CPU; NCCL has its own rings.

    Raises:
        ValueError: for `two_level` on nodes of different size, which has no shards there.

    Source: Patarasuk and Yuan 2009 (J. Parallel Distrib. Comput. 69); tests/netlab measures `across` and `inside`.
    """
    num_ranks = topology.world_size
    num_nodes = topology.num_nodes
    most_ranks = max(len(node) for node in topology.nodes)  # the busiest node is the largest
    if is_exchange(algorithm):
        if algorithm == "world_sum":
            return replace(traffic_of("flat", topology, num_bytes), least_across=0.0)
        scope, _, form = algorithm.partition("_")
        times = {"sum": 2.0, "gather": 1.0}.get(
            form, 1 / (most_ranks if scope == "node" else num_ranks)
        )
        across = (num_nodes - 1) / num_nodes * num_bytes if scope == "world" else 0.0
        return Traffic(across=across, inside=times * (most_ranks - 1) * num_bytes)
    wire = num_bytes if num_bytes_across is None or num_nodes == 1 else num_bytes_across
    least_across = 2 * (num_nodes - 1) / num_nodes * wire
    if algorithm in ("flat", "parallel_flat") and not is_ring and num_nodes > 1:
        part = 2 / num_ranks * wire  # what one rank sends to one other
        across = most_ranks * (num_ranks - most_ranks) * part
        inside = most_ranks * (most_ranks - 1) * part
        return Traffic(least_across=least_across, across=across, inside=inside)
    if algorithm in ("flat", "parallel_flat"):
        edge = 2 * (num_ranks - 1) / num_ranks * wire  # bytes over each edge of the ring
        # On each node, the edges of the ring 0 -> 1 -> ... -> 0 that leave it, and those that stay inside.
        leaving = [
            sum((rank + 1) % num_ranks not in node for rank in node)
            for node in map(frozenset, topology.nodes)
        ]
        staying = [len(node) - out for node, out in zip(topology.nodes, leaving, strict=True)]
        return Traffic(
            least_across=least_across, across=max(leaving) * edge, inside=max(staying) * edge
        )
    if algorithm == "two_level" and topology.ranks_per_node is None:
        raise ValueError(
            f"`algorithm` (={algorithm!r}) needs nodes of equal size, and these hold "
            f"{[len(node) for node in topology.nodes]} ranks: it is carried by `flat` there, whose bytes to ask for"
        )
    return Traffic(
        least_across=least_across, across=least_across, inside=2 * (most_ranks - 1) * num_bytes
    )
