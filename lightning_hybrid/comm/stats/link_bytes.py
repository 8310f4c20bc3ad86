"""Bytes that all-reduce algorithms send over a node's links, and the minimum for any algorithm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_hybrid.comm.collective_names import Exchange, is_exchange
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Number of bytes that one all-reduce sends over the links of the busiest node.

    Bytes are counted in one direction and without headers.

    Args:
        least_across: Bytes that any algorithm must send from a node to other nodes.
        across: Bytes that this algorithm sends from a node to other nodes.
        inside: Bytes that the ranks of a node send each other.
    """

    least_across: float = 0.0
    across: float = 0.0
    inside: float = 0.0

    def without_gather(self, scope: Literal["node", "world"]) -> Traffic:
        """Return the traffic of the all-reduce without its final all-gather, as in a reduce-scatter.

        Args:
            scope: Ranks that share the sum: the ranks of a node, or all ranks.
        """
        across = self.across
        if scope == "world":
            across = self.across / 2
        return replace(self, inside=self.inside / 2, across=across)


NO_TRAFFIC = Traffic()


def traffic_of(
    algorithm: Algorithm | Exchange,
    topology: Topology,
    num_bytes: float,
    *,
    num_bytes_across: float | None = None,
    is_ring: bool = True,
) -> Traffic:
    """Return the number of bytes that one all-reduce sends over the links of the busiest node.

    The formulas use P ranks on N nodes, k ranks on the largest node, S = `num_bytes` and A = `num_bytes_across`:

        any               least_across = 2 (N - 1) / N A
        flat,             across = e 2 (P - 1) / P A               e, i: edges of the ring 0 -> 1 -> ... -> P - 1 -> 0
        parallel_flat     inside = i 2 (P - 1) / P A               that leave a node (e) and that stay in it (i)
        hierarchical      across = 2 (N - 1) / N A
                          inside = (k - 1) S + (k - 1) S           reduce to the leader, and broadcast
        two_level         across = k 2 (N - 1) / N A / k           one ring for each of k shards
                          inside = (k - 1) S                       scatter: each rank keeps one of k shards
                                 + (k - 1) S                       gather
        node_sum          inside = 2 (k - 1) S                     a ring in each node
        node_gather,      inside = (k - 1) S                       each rank's 1 / k to the other ranks
        node_collect      inside = (k - 1) / k S                   each rank's 1 / k to the node's leader
        world_sum         as flat
        world_gather,     across = (N - 1) / N S                   each rank's 1 / P to equal local ranks, then as
        world_collect                                              node_gather; or directly to rank zero

    Codecs do not use a ring. Each rank sends one shard to each other rank, and then the sum of its own shard. If a
    group has one rank on each node, the bytes are the same as above. With several ranks on a node, `flat` and
    `parallel_flat` send

        across = 2 k (P - k) / P A            inside = 2 k (k - 1) / P A

    `e` is 1 if ranks are numbered node by node, and k if ranks are assigned to nodes in turn. On one node A is S.
    Adasum sends as much as `hierarchical`. The formulas describe the algorithms on the CPU, because NCCL has its own
    rings. They ignore the checksum of a step, fractions of a KiB, the inner products of Adasum, and, with a codec, the
    shorter last shard of a chunk. They also ignore that chunks of a few KiB, which each node sends to all other nodes
    (`between_nodes_form`), cost N / 2 times `across`.

    Args:
        algorithm: All-reduce algorithm, or collective of a sharded update.
        topology: Topology.
        num_bytes: Size of the tensor in bytes.
        num_bytes_across: Size of the tensor between nodes in bytes. The default is `num_bytes`.
        is_ring: Whether reductions between nodes use a ring. It is False for a codec.

    Raises:
        ValueError: `algorithm` is `two_level`, but there are no shards, because nodes differ in size.

    Source: Patarasuk and Yuan 2009 (J. Parallel Distrib. Comput. 69); tests/netlab measures `across` and `inside`.
    """
    num_ranks = topology.world_size
    num_nodes = topology.num_nodes
    most_ranks = max(len(node) for node in topology.nodes)  # The busiest node is the largest.
    if is_exchange(algorithm):
        return _traffic_of_exchange(algorithm, topology, num_bytes)
    wire = num_bytes
    if num_bytes_across is not None and num_nodes > 1:
        wire = num_bytes_across
    least_across = 2 * (num_nodes - 1) / num_nodes * wire
    if algorithm in ("flat", "parallel_flat") and not is_ring and num_nodes > 1:
        part = 2 / num_ranks * wire  # bytes that one rank sends to one other rank
        across = most_ranks * (num_ranks - most_ranks) * part
        inside = most_ranks * (most_ranks - 1) * part
        return Traffic(least_across=least_across, across=across, inside=inside)
    if algorithm in ("flat", "parallel_flat"):
        edge = 2 * (num_ranks - 1) / num_ranks * wire  # bytes over each edge of the ring
        most_leaving = 0
        most_staying = 0
        for node in topology.nodes:
            ranks = frozenset(node)
            num_leaving = sum((rank + 1) % num_ranks not in ranks for rank in ranks)
            most_leaving = max(most_leaving, num_leaving)
            most_staying = max(most_staying, len(node) - num_leaving)
        return Traffic(
            least_across=least_across, across=most_leaving * edge, inside=most_staying * edge
        )
    if algorithm == "two_level" and topology.ranks_per_node is None:
        raise ValueError(
            f"`algorithm` (={algorithm!r}) requires the same number of ranks on every node, but these nodes have "
            f"{[len(node) for node in topology.nodes]} ranks. Pass 'flat', because the engine uses the flat ring "
            "on such nodes."
        )
    return Traffic(
        least_across=least_across, across=least_across, inside=2 * (most_ranks - 1) * num_bytes
    )


def _traffic_of_exchange(name: str, topology: Topology, num_bytes: float) -> Traffic:
    """Return the traffic of a collective of a sharded update, using the formulas in `traffic_of`."""
    if name == "world_sum":
        return replace(traffic_of("flat", topology, num_bytes), least_across=0.0)
    num_nodes = topology.num_nodes
    most_ranks = max(len(node) for node in topology.nodes)
    scope, _, form = name.partition("_")
    across = 0.0
    num_sharers = most_ranks
    if scope == "world":
        across = (num_nodes - 1) / num_nodes * num_bytes
        num_sharers = topology.world_size
    factors = {"sum": 2.0, "gather": 1.0, "collect": 1 / num_sharers}
    return Traffic(across=across, inside=factors[form] * (most_ranks - 1) * num_bytes)
