"""Communication plan: bucket sizes, and the all-reduce algorithm and chunks of each bucket."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from lightning_hybrid.checks import make_whole, require_choice, require_whole
from lightning_hybrid.comm.bucket_sizes import KIB, MIB, ddp_buckets

# Names of the all-reduce algorithms in engine/stages.py.
Algorithm = Literal["flat", "parallel_flat", "hierarchical", "two_level"]


# A topology or a cluster. A plan reads its `world_size`, `num_nodes` and `ranks_per_node`.
NodeShape = Any

# Buckets are not made smaller than this to reach a number of buckets.
LEAST_FUSED_BYTES = 2 * MIB

# If communication takes as long as backward, n equal buckets hide a fraction 1 - 1 / n of it behind backward. On one
# node there is no slow link to hide, and each bucket has a cost: 8 MiB of gradients of 4 ranks on 2 cores took 54 ms in
# 4 buckets and 31 ms in 2. On CUDA, NCCL takes tens of microseconds to start each bucket, so None means DDP's own rule.
NUM_BUCKETS_ACROSS_NODES = 16

# Chunks are not made smaller than this, because their messages would take more time than the overlap saves.
LEAST_CHUNK_BYTES = 64 * KIB
# On CUDA, a chunk costs three launches. For a ResNet-50 on 2 HGX H200, the cost model predicts 7.5 ms with 99 chunks,
# and 0.8 ms if buckets are not split.
CUDA_CHUNK_BYTES = 16 * MIB
MOST_CUDA_CHUNKS = 4

MAX_BYTES = 2**50


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Communication plan of one bucket, with its all-reduce algorithm and number of chunks.

    Buckets with the same contents get the same plan.

    Args:
        index: Index of the bucket.
        numel: Number of elements.
        num_bytes: Size in bytes.
        dtype: Name of the dtype, without `torch.`.
        algorithm: All-reduce algorithm, which depends on the contents.
        num_chunks: Number of chunks, which depends on the contents.
    """

    index: int
    numel: int
    num_bytes: int
    dtype: str
    algorithm: Algorithm
    num_chunks: int

    def describe(self) -> str:
        """Return a one-line description of the bucket's size, algorithm and number of chunks."""
        chunks = ""
        if self.num_chunks > 1:
            chunks = f" in {self.num_chunks} chunks"
        size = f"{self.numel} x {self.dtype} = {_bytes(self.num_bytes)}"
        return f"bucket {self.index}: {size}, {self.algorithm}{chunks}"


@dataclass(frozen=True, kw_only=True)
class CommPlan:
    """Communication plan that sets bucket sizes and selects the all-reduce algorithm of each bucket.

    `algorithm="auto"` selects the algorithm by the following static rule, without measurements:

    ================================================  ================================================================
    CUDA                                              `flat`, in DDP's own buckets. NCCL knows the node's links and
                                                      overlaps its stages. `choose_plan` finds the cases in which
                                                      another algorithm is faster.
    one node, CPU, 16-bit or small                    As in the last two rows. Messages sent directly to their
                                                      destination (gloo_p2p.py) take less time than Gloo's ring.
    one node, CPU, fp32 or wider, and large           `flat`. Gloo adds fp32 fast, and its ring copies less.
    one rank on every node                            `parallel_flat`. There is no hierarchy. Several groups keep the
                                                      wire busy.
    nodes of different sizes                          `hierarchical`. Shards need equally many ranks on every node.
    otherwise, below `hierarchical_below_bytes`       `hierarchical`. Latency dominates, and one ring of leaders has
                                                      less of it than one ring per local rank.
    otherwise                                         `two_level`. Bytes dominate, and each rank's link carries a share.
    ================================================  ================================================================

    An algorithm that is set by name is always used, with one exception: on nodes of different sizes, `flat` replaces
    `two_level`, and `fallback` returns a warning.

    A chunk is a slice of a bucket that passes through the all-reduce stages separately, so that one chunk is sent
    between nodes while another is reduced inside the node. On CUDA, only `hierarchical` and `two_level` use chunks, at
    most four per bucket, for buckets of 32 MiB or more.

    Args:
        algorithm: `auto`, `flat`, `parallel_flat`, `hierarchical` or `two_level`.
        bucket_bytes: Size up to which small tensors are fused. A larger tensor has its own bucket. The default of
            25 MiB is that of DistributedDataParallel, so that by default only the algorithm differs from DDP.
        num_buckets: Target number of buckets. If there would be fewer, tensors are fused into smaller buckets, but not
            below 2 MiB. With 1, only `bucket_bytes` matters. None means 16 between nodes, 1 on one node, and DDP's own
            rule on CUDA (`ddp_buckets`).
        last_bucket_bytes: Size up to which tensors are fused in the bucket that is ready last, whose communication
            backward cannot hide. If `num_buckets` is None, this size is used only between nodes, and not on CUDA.
        chunk_bytes: Size of a chunk of `hierarchical` or `two_level` per node. A chunk has about this size times the
            number of nodes, because a ring splits it again into one shard per node.
        num_parallel_groups: Number of independent sets of process groups, which chunks use in turn. `two_level` with k
            ranks on a node uses 2 / k times as many sets, and at least one, because each of its sets has k flows.
        check_order: Whether ranks compare the order of all buckets once per step (order_check.py). The comparison
            appends 128 elements to the last bucket, which change the position at which Gloo's ring begins to add. With
            `flat`, all buckets except the last are therefore bitwise equal to DistributedDataParallel. Without the
            comparison, the last bucket is equal as well.
        hierarchical_below_bytes: Size below which `auto` uses `hierarchical` (see the rule).

    Raises:
        ValueError: A value is out of its range.
    """

    algorithm: Literal["auto"] | Algorithm = "auto"
    bucket_bytes: int = 25 * MIB
    num_buckets: int | None = None
    last_bucket_bytes: int = MIB
    # On emulated clusters of 2 x 2 to 4 x 4 ranks over 1 Gbit/s with Gloo, `hierarchical` took 13.5 ms and `two_level`
    # 17.3 ms for 1 MB. For 8 MB they took 91.3 ms and 88.9 ms.
    hierarchical_below_bytes: int = MIB
    # On 2 nodes, 8 MiB at 100 Mbit/s took 696 ms in chunks of 512 KiB and 712 ms in chunks of 1 MiB. On 4 nodes they
    # took 1104 ms and 1067 ms.
    chunk_bytes: int = 256 * KIB
    # Gloo's peers agree on each message before it is sent, and meanwhile another flow can use the wire. Too many flows
    # slow each other down: 8 MiB took 723 ms with 8 flows and 704 ms with 4 on nodes of 4 ranks, and 1051 ms with 4
    # flows and 1081 ms with 2 on nodes of 2 ranks.
    num_parallel_groups: int = 2
    check_order: bool = True

    def __post_init__(self) -> None:
        make_whole(
            self, "bucket_bytes", "num_buckets", "last_bucket_bytes", "hierarchical_below_bytes"
        )
        make_whole(self, "chunk_bytes", "num_parallel_groups")
        why = "these are the all-reduce algorithms. Set algorithm='auto' to choose it by bucket size and topology"
        require_choice("algorithm", self.algorithm, ("auto", *get_args(Algorithm)), why)
        _require_bytes(
            "bucket_bytes",
            self.bucket_bytes,
            least=1,
            cure="gradients are fused into buckets of up to this size. Set 26214400, for example, the default of DDP",
        )
        _require_bytes(
            "last_bucket_bytes",
            self.last_bucket_bytes,
            least=1,
            cure="the last bucket is filled up to this size. Set the value of `bucket_bytes` for no separate limit",
        )
        _require_bytes(
            "hierarchical_below_bytes",
            self.hierarchical_below_bytes,
            least=0,
            cure="smaller buckets use the algorithm `hierarchical`. Set 0 to disable this",
        )
        _require_bytes(
            "chunk_bytes",
            self.chunk_bytes,
            least=1,
            cure="buckets are split into chunks of this size. Set a value above `bucket_bytes` to avoid the split",
        )
        if self.num_buckets is not None:
            why = (
                "gradients are fused into about this many buckets. Set 1 to fill buckets up to `bucket_bytes`, or "
                "None to choose the number based on the number of nodes"
            )
            require_whole("num_buckets", self.num_buckets, why)
        why = "True makes ranks check that they submit buckets in the same order. Set True to keep this check"
        require_choice("check_order", self.check_order, (True, False), why)
        if not isinstance(self.num_parallel_groups, int) or not 1 <= self.num_parallel_groups <= 16:
            raise ValueError(
                f"`num_parallel_groups` (={self.num_parallel_groups!r}) must be an integer from 1 to 16, because "
                "each group needs a thread and a process group per stage on every rank. Set 4 or less, "
                "because larger values were not faster in measurements."
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
        """Return the algorithm and the number of chunks for a bucket of the given size and dtype.

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
        """Return the number of chunks into which a bucket is split.

        The number is one if no two stages of the algorithm can overlap.
        """
        if algorithm == "flat" or topology.world_size == 1:
            return 1
        most = max(1, num_bytes // LEAST_CHUNK_BYTES)
        if algorithm == "parallel_flat":
            if on_cuda:
                return 1
            return min(most, self.num_parallel_groups)
        has_one_level = topology.num_nodes == 1 or topology.ranks_per_node == 1
        if has_one_level or num_bytes == 0:
            return 1

        chunk_bytes = self.chunk_bytes * topology.num_nodes
        if on_cuda:
            num_chunks = num_bytes // max(CUDA_CHUNK_BYTES, chunk_bytes)
            return max(1, min(MOST_CUDA_CHUNKS, num_chunks))
        return min(most, -(-num_bytes // chunk_bytes))

    def num_columns(self, algorithm: Algorithm, topology: NodeShape) -> int:
        """Return the number of sets of process groups among which the chunks of an algorithm alternate.

        >>> from lightning_hybrid.comm.topology import Topology
        >>> [CommPlan().num_columns("two_level", Topology.from_ranks_per_node(rank=0, world_size=16, ranks_per_node=k))
        ...  for k in (2, 4, 8)]
        [2, 1, 1]
        """
        if algorithm == "flat":
            return 1
        if algorithm == "two_level" and topology.ranks_per_node is not None:
            num_sets = 2 * self.num_parallel_groups // topology.ranks_per_node
            return max(1, min(self.num_parallel_groups, num_sets))
        return self.num_parallel_groups

    def bucket_caps(
        self, tensor_bytes: Sequence[int], *, num_nodes: int, on_cuda: bool = False
    ) -> list[int]:
        """Group tensors into buckets, and return the size of each bucket in bytes.

        Small tensors are fused up to `bucket_bytes`, or into smaller buckets (see `num_buckets`). A larger tensor has a
        bucket to itself. The last bucket holds tensors of up to `last_bucket_bytes`, and at least one tensor. Tensors
        without elements have no bucket of their own.

        Args:
            tensor_bytes: Size of each tensor in bytes, in the order in which the gradients are ready.
            num_nodes: Number of nodes.
            on_cuda: Whether the gradients are on CUDA.
        """
        if self.has_ddp_buckets(on_cuda=on_cuda):
            return ddp_buckets(tensor_bytes, self.bucket_bytes)
        is_default_on_one_node = self.num_buckets is None and num_nodes == 1
        num_buckets = self.num_buckets or NUM_BUCKETS_ACROSS_NODES
        if is_default_on_one_node:
            num_buckets = 1
        # More buckets hide more of the communication, but each bucket has a cost.
        fused_bytes = max(sum(tensor_bytes) // num_buckets, LEAST_FUSED_BYTES)
        fused_bytes = min(self.bucket_bytes, fused_bytes)
        last_limit = fused_bytes
        if not is_default_on_one_node:
            last_limit = min(self.last_bucket_bytes, fused_bytes)

        # The bucket that is ready last, whose communication backward cannot hide, is filled from the end.
        num_in_last = 0
        last_bytes = 0
        for size in reversed(tensor_bytes):
            if last_bytes > 0 and last_bytes + size > last_limit:
                break
            num_in_last += 1
            last_bytes += size

        sizes: list[int] = []
        open_bytes = 0
        for size in tensor_bytes[: len(tensor_bytes) - num_in_last]:
            if open_bytes > 0 and open_bytes + size > fused_bytes:
                sizes.append(open_bytes)
                open_bytes = 0
            open_bytes += size
        if open_bytes > 0:
            sizes.append(open_bytes)
        if last_bytes > 0:
            sizes.append(last_bytes)
        return sizes

    def has_ddp_buckets(self, *, on_cuda: bool) -> bool:
        """Return whether gradients are grouped into buckets by DDP's own rule."""
        return on_cuda and self.num_buckets is None

    def algorithm_for(
        self, num_bytes: int, topology: NodeShape, *, on_cuda: bool = False, is_half: bool = True
    ) -> Algorithm:
        """Select the all-reduce algorithm for a bucket, given its size, its dtype and the topology.

        The rule is described in the docstring of the class.

        Args:
            num_bytes: Size of the bucket on the wire, in bytes.
            topology: Topology or cluster.
            on_cuda: Whether the bucket is on CUDA.
            is_half: Whether the dtype of the bucket has 16 bits.
        """
        # Shards need equally many ranks on every node. `fallback` returns the warning for the user.
        if self.algorithm == "two_level" and topology.ranks_per_node is None:
            return "flat"
        if self.algorithm != "auto":
            return self.algorithm
        if on_cuda or topology.world_size == 1:  # NCCL has its own hierarchy.
            return "flat"
        if topology.num_nodes == 1 and not is_half and num_bytes >= self.hierarchical_below_bytes:
            return "flat"
        if topology.num_nodes > 1 and topology.ranks_per_node == 1:
            return "parallel_flat"
        if topology.ranks_per_node is None or num_bytes < self.hierarchical_below_bytes:
            return "hierarchical"
        return "two_level"

    def algorithms(self, topology: NodeShape, *, on_cuda: bool = False) -> tuple[Algorithm, ...]:
        """Return all algorithms that the plan can select on a topology, in order of bucket size."""
        algorithms = (
            self.algorithm_for(size, topology, on_cuda=on_cuda, is_half=is_half)
            for size, is_half in self._cases
        )
        return tuple(dict.fromkeys(algorithms))

    def columns(self, topology: NodeShape, *, on_cuda: bool = False) -> dict[Algorithm, int]:
        """Return the number of sets of process groups for each algorithm that the plan can select.

        On CUDA, the number is one.
        """
        columns = {}
        for name in self.algorithms(topology, on_cuda=on_cuda):
            columns[name] = 1
            if not on_cuda:
                columns[name] = self.num_columns(name, topology)
        return columns

    @property
    def _cases(self) -> tuple[tuple[int, bool], ...]:
        """Examples of (bucket size in bytes, is 16-bit dtype) that cover all branches of `algorithm_for`."""
        return (
            (0, True),
            (self.hierarchical_below_bytes, True),
            (self.hierarchical_below_bytes, False),
        )

    def fallback(self, topology: NodeShape) -> str | None:
        """Return a warning if the configured algorithm cannot be used on a topology, or None."""
        if self.algorithm != "two_level" or topology.ranks_per_node is not None:
            return None
        return (
            "`algorithm` (='two_level') requires the same number of ranks on every node, but the "
            f"{topology.world_size} ranks are spread unevenly over {topology.num_nodes} nodes. The flat ring is used "
            "instead. To silence this warning, set comm=Comm(algorithm='hierarchical'), which supports uneven nodes."
        )

    def describe(self, topology: NodeShape, *, on_cuda: bool = False) -> str:
        """Return a one-line summary of the ranks, nodes, all-reduce algorithms and bucket size limit.

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
        """Hash of the plan's options, as 16 hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the plan as a JSON string whose keys are the constructor's arguments."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CommPlan:
        """Create a plan from a JSON string that `to_json` returned.

        Raises:
            ValueError: A key is not an argument or occurs twice, or the text is not valid JSON. NaN is not valid.
        """
        try:
            values = json.loads(
                text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
            )
        except RecursionError:
            raise ValueError(
                f"The plan (={text[:80]!r}) is nested too deeply. A plan is a JSON object that contains only numbers "
                "and strings. Create it with `CommPlan.to_json`."
            ) from None
        if not isinstance(values, dict):
            raise ValueError(
                f"The plan (={text[:80]!r}) must be a JSON object whose keys are arguments of CommPlan. Create it with "
                "`CommPlan.to_json`."
            )
        field_names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(field_names))
        if unknown:
            raise ValueError(
                f"`{unknown[0]}` (={values[unknown[0]]!r}) is not an option of a plan. Use one of {field_names}."
            )
        return cls(**values)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # If a key occurs twice, JSON would silently take the last value.
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(
                f"`{name}` is given more than once in the plan. Remove the duplicates."
            )
        values[name] = value
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(
        f"The plan contains {name}, which is not valid JSON. Replace it with a number."
    )


def _require_bytes(name: str, value: int, *, least: int, cure: str) -> None:
    require_whole(name, value, cure, least=least, unit="bytes")
    if value > MAX_BYTES:
        raise ValueError(f"`{name}` (={value}) must be at most {MAX_BYTES} bytes (1 PiB): {cure}.")


def _count(number: int, noun: str) -> str:
    """Format a number with its noun in the singular or plural, such as "2 nodes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def _bytes(count: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} bytes"
