"""Workload of a training step: computation times, gradient buckets and their chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.comm.bucket_sizes import chunk_numels
from lightning_hybrid.comm.plan import BucketPlan, CommPlan
from lightning_hybrid.planning.model.cluster_costs import ClusterCosts
from lightning_hybrid.planning.model.event_simulation import SimulatedChunk
from lightning_hybrid.planning.model.node_wire import NodeWire


@dataclass(frozen=True, kw_only=True)
class StepWorkload:
    """Computation times of one rank in a training step, in seconds.

    Args:
        forward_s: Time before the backward pass.
        gradients: For each gradient in the order in which they become ready, its number of elements and the time of
            backward since the gradient before.
        update_s: Time after the last bucket is averaged.
        input_s: Time to make the next batch, in parallel with everything else. A step is never shorter.
    """

    forward_s: float
    gradients: tuple[tuple[int, float], ...]
    update_s: float = 0.0
    input_s: float = 0.0

    def __post_init__(self) -> None:
        times_s = [
            self.forward_s,
            self.update_s,
            self.input_s,
            *(time_s for _, time_s in self.gradients),
        ]
        if not self.gradients:
            raise ValueError(
                "`gradients` (=()) must contain at least one tensor. Pass the size and time of each gradient."
            )
        if min(times_s) < 0:
            raise ValueError(
                f"`forward_s`, `update_s`, `input_s` and the times in `gradients` must not be negative, "
                f"but the smallest is {min(times_s):g} s. Pass no negative times."
            )

    @property
    def backward_s(self) -> float:
        """Time of the backward pass in seconds, until the last gradient is ready."""
        return sum(time_s for _, time_s in self.gradients)

    @property
    def alone_s(self) -> float:
        """Step time of a single rank without communication, in seconds."""
        return max(self.forward_s + self.backward_s + self.update_s, self.input_s)

    def scaled(self, factor: float) -> StepWorkload:
        """Return the workload of a rank that takes `factor` times as long to compute."""
        gradients = tuple((numel, factor * time_s) for numel, time_s in self.gradients)
        return replace(
            self,
            forward_s=factor * self.forward_s,
            gradients=gradients,
            update_s=factor * self.update_s,
        )

    def on_wire(self, wire: NodeWire) -> StepWorkload:
        """Return the workload with each gradient padded to the size at which it is sent between nodes."""
        return replace(
            self, gradients=tuple((wire.padded(numel), time_s) for numel, time_s in self.gradients)
        )


def buckets_of(
    numels: Sequence[int],
    cluster: ClusterCosts,
    plan: CommPlan,
    *,
    itemsize: int,
    on_cuda: bool,
    cuts: Sequence[int] | None,
) -> tuple[BucketPlan, ...]:
    """Fuse gradients into buckets, in the order in which they become ready.

    `cuts` are the indices before which buckets end, in the order of readiness (Jia et al. fuse in
    two segments). All indices make one bucket per tensor. None fuses as `plan` says.
    """
    if cuts is None:
        sizes = plan.bucket_caps(
            [n * itemsize for n in numels], num_nodes=cluster.num_nodes, on_cuda=on_cuda
        )
    else:
        places = [0, *sorted(cuts), len(numels)]
        if any(not 0 <= place <= len(numels) for place in places):
            raise ValueError(
                f"`cuts` (={list(cuts)}) must be positions from 0 to the number of tensors (={len(numels)}), because "
                "a bucket ends at each position. Set positions within this range."
            )
        sizes = [sum(numels[a:b]) * itemsize for a, b in itertools.pairwise(places) if b > a]
    # Plans distinguish only 16 bits and more. float64 and complex elements have 8 bytes or more.
    dtype = {2: "float16", 4: "float32"}.get(itemsize, "float64")
    return tuple(
        plan.bucket(
            index=index,
            numel=size // itemsize,
            dtype=dtype,
            num_bytes=size,
            topology=cluster,
            on_cuda=on_cuda,
        )
        for index, size in enumerate(sizes)
    )


def ready_times_s(work: StepWorkload, buckets: Sequence[BucketPlan]) -> tuple[float, ...]:
    """Return the time at which the last gradient of each bucket is ready.

    Times are in seconds from the start of the step.
    """
    ends = list(itertools.accumulate(bucket.numel for bucket in buckets))
    found: list[float] = []
    now_s = work.forward_s
    numel = 0
    for size, time_s in work.gradients:
        now_s = now_s + time_s
        numel = numel + size
        # A bucket is ready with the tensor that holds its last element. One tensor may complete several buckets.
        while len(found) < len(ends) and numel >= ends[len(found)]:
            found.append(now_s)
    return tuple(found)


def chunk_sizes_bytes(num_bytes: int, num_chunks: int, itemsize: int) -> list[int]:
    """Return the sizes of a bucket's chunks in bytes."""
    return [numel * itemsize for numel in chunk_numels(num_bytes // itemsize, num_chunks)]


def chunks_of_step(
    buckets: Sequence[BucketPlan],
    ready_s: Sequence[float],
    cluster: ClusterCosts,
    columns: Callable[[BucketPlan], int],
    *,
    algorithm: str | None = None,
    is_serial: bool = False,
    wire: NodeWire | None = None,
) -> list[SimulatedChunk]:
    """Return the chunks of all buckets of a step.

    `algorithm` replaces the algorithms of the buckets, with one chunk per bucket.
    """
    found: list[SimulatedChunk] = []
    counts: dict[str, int] = {}
    for bucket, at_s in zip(buckets, ready_s, strict=True):
        name = algorithm or bucket.algorithm
        num_chunks = 1 if algorithm else bucket.num_chunks
        for size in chunk_sizes_bytes(
            bucket.num_bytes, num_chunks, bucket.num_bytes // bucket.numel
        ):
            # Chunks of each algorithm take turns over the columns.
            column = counts.get(name, 0) % columns(bucket)
            counts[name] = counts.get(name, 0) + 1
            stages = cluster.stages(name, size, wire, of_bytes=bucket.num_bytes)
            found.append(
                SimulatedChunk(
                    bucket=bucket.index,
                    num_bytes=size,
                    ready_s=at_s,
                    algorithm=name,
                    column=column,
                    stages=stages,
                    is_serial=is_serial,
                )
            )
    return found
