"""What is decided before training starts: how large a bucket is, and which all-reduce carries it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Literal, Protocol, get_args

Algorithm = Literal["flat", "hierarchical", "two_level"]
"""Names of the all-reduce algorithms in ``allreduce.py``."""

KIB = 1024
MIB = 1024 * KIB


class NodeShape(Protocol):
    """What a plan needs to know of a topology."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node; None where nodes differ."""


@dataclass(frozen=True, kw_only=True)
class CommPlan:
    """Bucket size, and the algorithm for a bucket of given bytes.

    ``algorithm="auto"`` is this static rule, and measures nothing:

    ================================================  ================================================================
    one node, or one rank on every node               flat: there is no hierarchy to use
    nodes of different size                           hierarchical: shards need as many ranks on every node
    else, fewer than ``hierarchical_below_bytes``     hierarchical: latency counts, and one ring of leaders has less
                                                      of it than a ring for every local rank
    else                                              two_level: bytes count, and every rank's link carries a share
    ================================================  ================================================================

    ``two_level`` asked for by name where nodes differ is carried by flat (``fallback`` says so); everything else asked
    for by name is done as asked.

    Arguments:
        algorithm: ``auto``, ``flat``, ``hierarchical`` or ``two_level``.
        bucket_bytes: gradients are fused into buckets of about this size. 25 MiB is DistributedDataParallel's own, so
            that by default the algorithm is the only thing that differs from it.
        hierarchical_below_bytes: see the rule. 1 MiB: on emulated clusters of 2 x 2 to 4 x 4 ranks over 1 Gbit/s Gloo
            the hierarchical form took 13.5 ms against 17.3 ms at 1 MB and 91.3 ms against 88.9 ms at 8 MB.

    Raises ``ValueError`` for a value outside these.

    >>> from lightning_hybrid.comm.topology import Topology
    >>> topology = Topology.from_ranks_per_node(rank=0, world_size=1024, ranks_per_node=8)
    >>> CommPlan().algorithm_for(4 * KIB, topology), CommPlan().algorithm_for(25 * MIB, topology)
    ('hierarchical', 'two_level')
    """

    algorithm: Literal["auto"] | Algorithm = "auto"
    bucket_bytes: int = 25 * MIB
    hierarchical_below_bytes: int = MIB

    def __post_init__(self) -> None:
        names = ("auto", *get_args(Algorithm))
        if self.algorithm not in names:
            raise ValueError(
                f"`algorithm` (={self.algorithm!r}) must be one of {', '.join(names)}: it names the all-reduce. "
                "Set `strategy.algorithm=auto` to have it chosen by bucket size and topology."
            )
        _require_whole("bucket_bytes", self.bucket_bytes, least=1, cure="DistributedDataParallel's own is 26214400")
        _require_whole("hierarchical_below_bytes", self.hierarchical_below_bytes, least=0, cure="0 means never")

    def algorithm_for(self, num_bytes: int, topology: NodeShape) -> Algorithm:
        """The algorithm that carries a bucket of ``num_bytes`` bytes on the wire."""
        if self.algorithm == "two_level" and topology.ranks_per_node is None:
            return "flat"
        if self.algorithm != "auto":
            return self.algorithm
        if topology.num_nodes == 1 or topology.ranks_per_node == 1:
            return "flat"
        if topology.ranks_per_node is None or num_bytes < self.hierarchical_below_bytes:
            return "hierarchical"
        return "two_level"

    def algorithms(self, topology: NodeShape) -> tuple[Algorithm, ...]:
        """Every algorithm that some bucket may get, the one for small buckets first."""
        small, large = self.algorithm_for(0, topology), self.algorithm_for(self.hierarchical_below_bytes, topology)
        return (small,) if small == large else (small, large)

    def fallback(self, topology: NodeShape) -> str | None:
        """A sentence for the user where this plan cannot be followed to the letter; None where it can."""
        if self.algorithm != "two_level" or topology.ranks_per_node is not None:
            return None
        return (
            f"`algorithm` (='two_level') needs nodes of equal size, and the {topology.world_size} ranks are spread "
            f"unevenly over {topology.num_nodes} nodes: the flat ring is used instead. "
            "`strategy.algorithm=hierarchical` works with uneven nodes."
        )

    def describe(self, topology: NodeShape) -> str:
        """One line that says what was chosen.

        >>> from lightning_hybrid.comm.topology import Topology
        >>> topology = Topology.from_ranks_per_node(rank=0, world_size=1024, ranks_per_node=8)
        >>> CommPlan(bucket_bytes=16 * MIB, hierarchical_below_bytes=256 * KIB).describe(topology)
        'comm: 1024 ranks = 128 nodes x 8; fused buckets of 16 MiB; two-level from 256 KiB, hierarchical below; \
plan c890'
        """
        nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes} nodes"
        per_node = "of different size" if topology.ranks_per_node is None else f"x {topology.ranks_per_node}"
        ranks = "1 rank" if topology.world_size == 1 else f"{topology.world_size} ranks"
        used = [name.replace("_", "-") for name in self.algorithms(topology)]
        choice = f"{used[1]} from {_bytes(self.hierarchical_below_bytes)}, {used[0]} below" if used[1:] else used[0]
        return (
            f"comm: {ranks} = {nodes} {per_node}; fused buckets of {_bytes(self.bucket_bytes)}; {choice}; "
            f"plan {self.plan_hash[:4]}"
        )

    @property
    def plan_hash(self) -> str:
        """16 hexadecimal digits (64 bits) that differ where plans differ."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON; keys are the constructor's arguments.

        >>> CommPlan.from_json(CommPlan(algorithm="flat").to_json()) == CommPlan(algorithm="flat")
        True
        """
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CommPlan:
        """The plan that ``to_json`` wrote. Raises ``ValueError`` for a key that is no argument."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a plan (={text!r}) must be a JSON object whose keys are the arguments of CommPlan")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"`{unknown[0]}` (={values[unknown[0]]!r}) is no key of a plan: keys are {known}")
        return cls(**values)


def _require_whole(name: str, value: object, *, least: int, cure: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}` (={value!r}) must be a whole number of bytes, {least} or more: {cure}.")


def _bytes(count: int) -> str:
    """256 KiB, 25 MiB, 1000 bytes.

    >>> _bytes(1536), _bytes(1000), _bytes(3 * MIB // 2)
    ('1.5 KiB', '1000 bytes', '1.5 MiB')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} bytes"
