"""The plan of communication: how large a bucket is, which all-reduce carries it, in how many chunks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from lightning_hybrid.checks import make_whole, require_choice, require_whole
from lightning_hybrid.comm.bucket_layout import KIB, MIB, ddp_buckets

# Names of the all-reduce algorithms in engine/stages.py.
Algorithm = Literal["flat", "parallel_flat", "hierarchical", "two_level"]


# What a plan needs to know of a topology, or of a cluster: `world_size`, `num_nodes` and `ranks_per_node`.
NodeShape = Any

# Buckets are not made smaller than this only to have more of them.
LEAST_FUSED_BYTES = 2 * MIB

# Backward hides all but the first of n equal buckets at its begin and the last at its end: of communication that takes
# as long as backward, 1 - 1 / n. On one node there is no slow link to hide, and each bucket costs its start: 8 MiB of
# gradients, 4 ranks on 2 cores took 54 ms in 4 buckets, 31 in 2. On CUDA a bucket costs the tens of microseconds that
# NCCL takes to start, so None is DDP's own rule there.
NUM_BUCKETS_ACROSS_NODES = 16

# No chunk is made smaller than this: its messages would cost more than they hide.
LEAST_CHUNK_BYTES = 64 * KIB
# On CUDA a chunk costs three launches: by the model 99 took a ResNet-50 7.5 ms on 2 HGX H200, whole buckets 0.8.
CUDA_CHUNK_BYTES = 16 * MIB
MOST_CUDA_CHUNKS = 4

MAX_BYTES = 2**50


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """The plan of one bucket. Equal contents get equal plans."""

    index: int
    numel: int
    num_bytes: int
    dtype: str  # without `torch.`
    algorithm: Algorithm  # this and the next are decided by the contents, which stand above
    num_chunks: int

    def describe(self) -> str:
        """Describe the bucket in one line."""
        chunks = f" in {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        size = f"{self.numel} x {self.dtype} = {_bytes(self.num_bytes)}"
        return f"bucket {self.index}: {size}, {self.algorithm}{chunks}"


@dataclass(frozen=True, kw_only=True)
class CommPlan:
    """Bucket sizes, and for a bucket of given bytes the algorithm and the number of chunks.

    `algorithm="auto"` is this static rule, and measures nothing:

    ================================================  ================================================================
    CUDA                                              flat, in DDP's own buckets: NCCL knows the node's links and makes
                                                      one pipeline of its stages; `choose_plan` says where that loses
    one node, CPU, 16-bit or small                    as the last two: what goes straight to where it is needed
                                                      (gloo_p2p.py) takes less time than Gloo's ring
    one node, CPU, fp32 or wider, and large           flat: Gloo adds fp32 fast, and its ring copies less
    one rank on every node                            parallel_flat: no hierarchy either, but a wire to keep busy
    nodes of different size                           hierarchical: shards need as many ranks on every node
    else, fewer than `hierarchical_below_bytes`       hierarchical: latency counts, and one ring of leaders has less
                                                      of it than a ring for every local rank
    else                                              two_level: bytes count, and every rank's link carries a share
    ================================================  ================================================================

    `two_level` asked for by name where nodes differ is carried by flat (`fallback` says so); everything else asked
    for by name is done as asked.

    A chunk is a part of a bucket that goes through the stages by itself, so that the wire between nodes carries one
    while another is summed inside the node. On CUDA only hierarchies are cut, from 32 MiB on, into four at most.

    Args:
        algorithm: `auto`, `flat`, `parallel_flat`, `hierarchical` or `two_level`.
        bucket_bytes: small tensors are fused up to this size; a larger one travels alone. 25 MiB is
            DistributedDataParallel's own, so that by default the algorithm is the only thing that differs from it.
        num_buckets: tensors are fused into smaller buckets than that where it would make fewer than this, but not
            smaller than 2 MiB. 1: `bucket_bytes` it is. None: 16 between nodes, 1 on one node, on CUDA DDP's own rule
            (`ddp_buckets`).
        last_bucket_bytes: as `bucket_bytes`, for the bucket that is ready last: backward is over then and hides
            nothing of it. Where `num_buckets` is None, between nodes only, and not on CUDA.
        chunk_bytes: buckets of `hierarchical` and `two_level` are cut into chunks of about this size times the
            number of nodes, as a ring cuts each again into one part per node.
        num_parallel_groups: chunks go round over this many independent sets of process groups, of `two_level` with k
            ranks on a node over 2 / k times as many, but one at least: each is k flows.
        check_order: compare, once per step, the order of all buckets over ranks (order_check.py). The 128 elements
            that do it shift where Gloo's ring begins to add, so without them `flat` is plain DistributedDataParallel
            bit for bit, and with them all but the last bucket is.
        hierarchical_below_bytes: bytes below which `auto` takes `hierarchical`, see the rule.

    Raises:
        ValueError: if a value is outside these.
    """

    algorithm: Literal["auto"] | Algorithm = "auto"
    bucket_bytes: int = 25 * MIB
    num_buckets: int | None = None
    last_bucket_bytes: int = MIB
    # On emulated clusters of 2 x 2 to 4 x 4 ranks over 1 Gbit/s Gloo the hierarchical form took 13.5 ms against 17.3 at
    # 1 MB, and 91.3 against 88.9 at 8 MB.
    hierarchical_below_bytes: int = MIB
    # 8 MiB at 100 Mbit/s took 696 ms in chunks of 512 KiB and 712 of 1 MiB on 2 nodes, 1104 and 1067 on 4 nodes.
    chunk_bytes: int = 256 * KIB
    # Gloo asks consent for each message, and another flow uses the wire meanwhile; too many hinder each other: 8 MiB
    # took 723 ms with 8 flows, 704 with 4 (4 ranks a node), 1051 with 4 and 1081 with 2 (2 ranks a node).
    num_parallel_groups: int = 2
    check_order: bool = True

    def __post_init__(self) -> None:
        make_whole(
            self, "bucket_bytes", "num_buckets", "last_bucket_bytes", "hierarchical_below_bytes"
        )
        make_whole(self, "chunk_bytes", "num_parallel_groups")
        why = "it names the all-reduce. Write algorithm='auto' to have it chosen by bucket size and topology"
        require_choice("algorithm", self.algorithm, ("auto", *get_args(Algorithm)), why)
        _require_bytes(
            "bucket_bytes",
            self.bucket_bytes,
            least=1,
            cure="write bucket_bytes=26214400 for the 25 MiB of DistributedDataParallel",
        )
        _require_bytes(
            "last_bucket_bytes",
            self.last_bucket_bytes,
            least=1,
            cure="`bucket_bytes` makes it like others",
        )
        _require_bytes(
            "hierarchical_below_bytes", self.hierarchical_below_bytes, least=0, cure="0 means never"
        )
        _require_bytes(
            "chunk_bytes",
            self.chunk_bytes,
            least=1,
            cure="more than `bucket_bytes` means one chunk",
        )
        if self.num_buckets is not None:
            why = "how many buckets to aim at. 1 fills them up to `bucket_bytes`, None chooses by the number of nodes"
            require_whole("num_buckets", self.num_buckets, why)
        require_choice(
            "check_order", self.check_order, (True, False), "whether orders of buckets are compared"
        )
        if not isinstance(self.num_parallel_groups, int) or not 1 <= self.num_parallel_groups <= 16:
            raise ValueError(
                f"`num_parallel_groups` (={self.num_parallel_groups!r}) must be a whole number from 1 to 16: each "
                "costs every rank a thread and a process group per stage, and beyond 4 none was seen to help."
            )

    def bucket(
        self,
        *,
        index: int,
        numel: int,
        dtype: str,
        num_bytes: int,
        topology: NodeShape,
        on_cuda: bool = False,
    ) -> BucketPlan:
        """Decide the plan of a bucket by its contents.

        >>> from lightning_hybrid.comm.topology import Topology
        >>> topology = Topology.from_ranks_per_node(rank=0, world_size=16, ranks_per_node=8)
        >>> CommPlan().bucket(index=0, numel=2**21, dtype="float16", num_bytes=4 * MIB, topology=topology).describe()
        'bucket 0: 2097152 x float16 = 4 MiB, two_level in 8 chunks'
        """
        is_half = dtype in ("float16", "bfloat16")
        algorithm = self.algorithm_for(num_bytes, topology, on_cuda=on_cuda, is_half=is_half)
        num_chunks = self.num_chunks_for(num_bytes, algorithm, topology, on_cuda=on_cuda)
        return BucketPlan(
            index=index,
            numel=numel,
            num_bytes=num_bytes,
            dtype=dtype,
            algorithm=algorithm,
            num_chunks=num_chunks,
        )

    def num_chunks_for(
        self, num_bytes: int, algorithm: Algorithm, topology: NodeShape, on_cuda: bool = False
    ) -> int:
        """Return into how many chunks a bucket is cut: one where there are no two stages to overlap."""
        if algorithm == "flat" or topology.world_size == 1:
            return 1
        most = max(1, num_bytes // LEAST_CHUNK_BYTES)
        if algorithm == "parallel_flat":
            return 1 if on_cuda else min(most, self.num_parallel_groups)
        if (
            topology.num_nodes == 1 or topology.ranks_per_node == 1
        ):  # one level: no other stage to overlap with
            return 1
        chunk_bytes = self.chunk_bytes * topology.num_nodes
        if on_cuda:
            return max(1, min(MOST_CUDA_CHUNKS, num_bytes // max(CUDA_CHUNK_BYTES, chunk_bytes)))
        return min(most, -(-num_bytes // chunk_bytes)) if num_bytes else 1

    def num_columns(self, algorithm: Algorithm, topology: NodeShape) -> int:
        """Return over how many independent sets of process groups the chunks go round.

        >>> from lightning_hybrid.comm.topology import Topology
        >>> [CommPlan().num_columns("two_level", Topology.from_ranks_per_node(rank=0, world_size=16, ranks_per_node=k))
        ...  for k in (2, 4, 8)]
        [2, 1, 1]
        """
        if algorithm == "flat":
            return 1
        if algorithm == "two_level" and topology.ranks_per_node is not None:
            return max(
                1,
                min(
                    self.num_parallel_groups,
                    2 * self.num_parallel_groups // topology.ranks_per_node,
                ),
            )
        return self.num_parallel_groups

    def bucket_caps(
        self, tensor_bytes: Sequence[int], *, num_nodes: int, on_cuda: bool = False
    ) -> list[int]:
        """Return the bytes of each bucket, for tensors in the order in which their gradients get ready.

        Small tensors are fused until the next would pass `bucket_bytes`, or less (see `num_buckets`); a larger one
        travels alone; from the end, tensors are fused up to `last_bucket_bytes`, and at least the last one is in that
        bucket.
        """
        if self.has_ddp_buckets(on_cuda=on_cuda):
            return ddp_buckets(tensor_bytes, self.bucket_bytes)
        is_left_whole = self.num_buckets is None and num_nodes == 1
        num_buckets = self.num_buckets or (1 if is_left_whole else NUM_BUCKETS_ACROSS_NODES)
        # More buckets hide more of the communication, smaller ones cost more starts: never below LEAST_FUSED_BYTES.
        fused_bytes = min(
            self.bucket_bytes, max(sum(tensor_bytes) // num_buckets, LEAST_FUSED_BYTES)
        )
        last_bytes = (
            fused_bytes if is_left_whole else min(self.last_bucket_bytes, fused_bytes)
        )  # exposed in any case
        num_last, last = (
            0,
            0,
        )  # from the end: the bucket that is ready last, of which backward hides nothing
        for size in reversed(tensor_bytes):
            if num_last and last + size > last_bytes:  # at least one tensor, however large
                break
            num_last = num_last + 1
            last = last + size
        caps: list[int] = []
        open_bytes = 0
        for size in tensor_bytes[: len(tensor_bytes) - num_last]:
            if open_bytes and open_bytes + size > fused_bytes:
                caps.append(open_bytes)
                open_bytes = 0
            open_bytes += size
        return [*caps, *([open_bytes] if open_bytes else []), *([last] if num_last else [])]

    def has_ddp_buckets(self, *, on_cuda: bool) -> bool:
        """Return whether buckets are left to DistributedDataParallel."""
        return on_cuda and self.num_buckets is None

    def algorithm_for(
        self, num_bytes: int, topology: NodeShape, *, on_cuda: bool = False, is_half: bool = True
    ) -> Algorithm:
        """Choose the algorithm of a bucket of `num_bytes` on the wire, of a 16-bit dtype or not, by the table above."""
        # Shards need as many ranks on every node. `fallback` says it to the user.
        if self.algorithm == "two_level" and topology.ranks_per_node is None:
            return "flat"
        if self.algorithm != "auto":
            return self.algorithm
        if (
            on_cuda or topology.world_size == 1
        ):  # NCCL has its own hierarchy; alone there is nothing to sum
            return "flat"
        if topology.num_nodes == 1 and not is_half and num_bytes >= self.hierarchical_below_bytes:
            return "flat"
        if topology.num_nodes > 1 and topology.ranks_per_node == 1:
            return "parallel_flat"
        if topology.ranks_per_node is None or num_bytes < self.hierarchical_below_bytes:
            return "hierarchical"
        return "two_level"

    def algorithms(self, topology: NodeShape, *, on_cuda: bool = False) -> tuple[Algorithm, ...]:
        """List every algorithm that some bucket may get, the one for small buckets first."""
        algorithms = (
            self.algorithm_for(size, topology, on_cuda=on_cuda, is_half=is_half)
            for size, is_half in self._cases
        )
        return tuple(dict.fromkeys(algorithms))

    def columns(self, topology: NodeShape, *, on_cuda: bool = False) -> dict[Algorithm, int]:
        """Return the number of sets of process groups of every algorithm that some bucket may get: one on CUDA."""
        names = self.algorithms(topology, on_cuda=on_cuda)
        return {name: 1 if on_cuda else self.num_columns(name, topology) for name in names}

    @property
    def _cases(self) -> tuple[tuple[int, bool], ...]:
        # Bytes, and whether of 16 bits: one case of each kind between which `algorithm_for` distinguishes.
        return (
            (0, True),
            (self.hierarchical_below_bytes, True),
            (self.hierarchical_below_bytes, False),
        )

    def fallback(self, topology: NodeShape) -> str | None:
        """Return a sentence for the user if this plan cannot be followed to the letter, or None."""
        if self.algorithm != "two_level" or topology.ranks_per_node is not None:
            return None
        return (
            f"`algorithm` (='two_level') needs nodes of equal size, and the {topology.world_size} ranks are spread "
            f"unevenly over {topology.num_nodes} nodes: the flat ring is used instead. "
            "comm=Comm(algorithm='hierarchical') works with uneven nodes."
        )

    def describe(self, topology: NodeShape, *, on_cuda: bool = False) -> str:
        """Describe ranks, nodes and the chosen all-reduce in one line.

        >>> from lightning_hybrid.comm.topology import Topology
        >>> topology = Topology.from_ranks_per_node(rank=0, world_size=1024, ranks_per_node=8)
        >>> for part in CommPlan(bucket_bytes=16 * MIB).describe(topology).split("; "):
        ...     print(part)
        comm: 1024 ranks on 128 nodes of 8
        all-reduce: two-level for buckets of 1 MiB or more, hierarchical below
        bucket limit 16 MiB
        plan 08c3
        """
        ranks = _count(topology.world_size, "rank")
        nodes = _count(topology.num_nodes, "node")
        if topology.num_nodes > 1:
            if topology.ranks_per_node is None:
                nodes += " of different size"
            else:
                nodes += f" of {topology.ranks_per_node}"

        small, large, single = (
            self.algorithm_for(size, topology, on_cuda=on_cuda, is_half=is_half).replace("_", "-")
            for size, is_half in self._cases
        )
        choice = large
        if not small == large == single:
            choice += f" for buckets of {_bytes(self.hierarchical_below_bytes)} or more"
            if single != large:
                choice += f" ({single} in fp32)"
            choice += f", {small} below"
        return (
            f"comm: {ranks} on {nodes}; all-reduce: {choice}; "
            f"bucket limit {_bytes(self.bucket_bytes)}; plan {self.plan_hash[:4]}"
        )

    @property
    def plan_hash(self) -> str:
        """16 hexadecimal digits (64 bits) that differ where plans differ."""
        # Keys are sorted, so equal plans have equal hashes.
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Write the plan as JSON. Keys are the constructor's arguments."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CommPlan:
        """Read the plan that `to_json` wrote.

        Raises:
            ValueError: for a key that is no argument, or that is there twice, and for text that is no JSON (NaN too).
        """
        try:
            values = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        except RecursionError:
            raise ValueError(
                "a plan must be a JSON object of numbers and words: this one is nested without end"
            ) from None
        if not isinstance(values, dict):
            raise ValueError(
                f"a plan (={text[:80]!r}) must be a JSON object whose keys are the arguments of CommPlan"
            )
        field_names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(field_names))
        if unknown:
            raise ValueError(
                f"`{unknown[0]}` (={values[unknown[0]]!r}) is no key of a plan: keys are {field_names}"
            )
        return cls(**values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of two values for one key JSON would take the last without a word.
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name in values if sum(name == key for key, _ in pairs) > 1)
        raise ValueError(
            f"`{twice}` must stand in a plan once, and is there twice: take one of the values out"
        )
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} must not stand in a plan: it is no number, and no JSON")


def _require_bytes(name: str, value: int, *, least: int, cure: str) -> None:
    require_whole(name, value, cure, least=least, unit="bytes")
    if value > MAX_BYTES:
        raise ValueError(
            f"`{name}` (={value}) must be at most {MAX_BYTES} (1 PiB), as no memory is larger: {cure}."
        )


def _count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 node", "2 nodes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def _bytes(count: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} bytes"
