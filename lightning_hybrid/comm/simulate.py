"""Training steps on a described cluster, simulated: how long they take, and how much of that communication is to blame.

    forward | backward: gradients get ready one by one  -> buckets -> pieces -> stages on shared links | update
            `Work`                                         `buckets_of`  `pieces_of`   timeline.run

One step is computed from the slowest rank's pace, as every bucket waits for it. Ranks differ by `Jitter`, which is
sampled; so steps have a distribution, of which quantiles are told. What is left out: that communication kernels take
processors from an accelerator's arithmetic, traffic of others, and failures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_hybrid.comm import timeline
from lightning_hybrid.comm.cluster import Cluster
from lightning_hybrid.comm.plan import BucketPlan, CommPlan
from lightning_hybrid.comm.trace import CommTrace
from lightning_hybrid.comm.units import require_whole

ALIGNMENT = 16  # elements, as in comm/chunks.py
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one rank computes in a step, in seconds.

    Arguments:
        forward_s: before the first gradient.
        gradients: for each tensor, in the order in which they get ready: elements, and seconds of backward up to it
            from the one before.
        update_s: after the last bucket is averaged.
        input_s: to make the next batch, beside everything else: a step is never shorter.
    """

    forward_s: float
    gradients: tuple[tuple[int, float], ...]
    update_s: float = 0.0
    input_s: float = 0.0

    def __post_init__(self) -> None:
        times_s = [self.forward_s, self.update_s, self.input_s, *(time_s for _, time_s in self.gradients)]
        if not self.gradients or min(times_s) < 0:
            raise ValueError(
                f"`gradients` (={len(self.gradients)} tensors) must hold at least one, and no time may be negative: "
                "they are what a step computes before communication."
            )

    @property
    def backward_s(self) -> float:
        """From the loss to the last gradient."""
        return sum(time_s for _, time_s in self.gradients)

    @property
    def alone_s(self) -> float:
        """A step of one rank without communication."""
        return max(self.forward_s + self.backward_s + self.update_s, self.input_s)

    def scaled(self, factor: float) -> Work:
        """The same on a rank that takes ``factor`` times as long to compute."""
        gradients = tuple((numel, factor * time_s) for numel, time_s in self.gradients)
        return replace(self, forward_s=factor * self.forward_s, gradients=gradients, update_s=factor * self.update_s)


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """How ranks differ from step to step, in what they compute.

    Arguments:
        relative_std: standard deviation of a rank's time over its mean (normal, never below the mean's half).
        slow_share: probability that a rank is slow in a step, and ``slow_factor``: how many times as long it takes.
        seed: of the samples.
    """

    relative_std: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0
    seed: int = 0

    def slowest(self, num_ranks: int, num_steps: int) -> np.ndarray:
        """The slowest rank's time over the mean, in each step.

        >>> Jitter().slowest(4, 3).tolist()
        [1.0, 1.0, 1.0]
        """
        require_whole("num_steps", num_steps, "steps are counted")
        generator = np.random.default_rng(self.seed)
        factors = np.empty(num_steps)
        for step in range(num_steps):  # one row at a time: 16,384 ranks x 1,000 steps need no memory
            row = np.maximum(0.5, 1 + self.relative_std * generator.standard_normal(num_ranks))
            factors[step] = np.max(np.where(generator.random(num_ranks) < self.slow_share, row * self.slow_factor, row))
        return factors


NO_JITTER = Jitter()


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One simulated step. ``exposed_s``: from the end of backward until the last bucket is averaged."""

    step_s: float
    exposed_s: float
    busy_s: float
    spans: tuple[timeline.Span, ...]
    ready_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Many steps. ``efficiency``: a rank's step alone over the mean step of all."""

    steps_s: np.ndarray
    exposed_s: np.ndarray
    first: StepTimes
    buckets: tuple[BucketPlan, ...]
    alone_s: float

    @property
    def step_s(self) -> float:
        """Of the mean step."""
        return float(self.steps_s.mean())

    @property
    def efficiency(self) -> float:
        """1: communication and waiting for others cost nothing."""
        return self.alone_s / self.step_s

    def quantile_s(self, share: float) -> float:
        """The step time that this share of steps does not exceed."""
        return float(np.quantile(self.steps_s, share))


def buckets_of(
    numels: Sequence[int], cluster: Cluster, plan: CommPlan, *, itemsize: int, on_cuda: bool, cuts: Sequence[int] | None
) -> tuple[BucketPlan, ...]:
    """The buckets of gradients that get ready in this order.

    ``cuts``: None fuses as ``plan`` says; else tensors are fused up to these places, counted in the order of readiness
    (Jia et al. fuse in two segments); every place is one tensor per bucket.
    """
    if cuts is None:
        sizes = plan.bucket_caps([numel * itemsize for numel in numels], num_nodes=cluster.num_nodes)
    else:
        places = [0, *sorted(cuts), len(numels)]
        if any(not 0 <= place <= len(numels) for place in places):
            raise ValueError(f"`cuts` (={list(cuts)}) must be places from 0 to the number of tensors ({len(numels)}).")
        sizes = [sum(numels[a:b]) * itemsize for a, b in itertools.pairwise(places) if b > a]
    dtype = {2: "float16", 4: "float32"}[itemsize]
    return tuple(
        plan.bucket(index=index, numel=size // itemsize, dtype=dtype, num_bytes=size, topology=cluster, on_cuda=on_cuda)
        for index, size in enumerate(sizes)
    )


def ready_times_s(work: Work, buckets: Sequence[BucketPlan]) -> tuple[float, ...]:
    """When the last gradient of each bucket is there, from the begin of the step."""
    ends = list(itertools.accumulate(bucket.numel for bucket in buckets))
    found: list[float] = []
    now_s, numel = work.forward_s, 0
    for size, time_s in work.gradients:
        now_s, numel = now_s + time_s, numel + size
        while len(found) < len(ends) and numel >= ends[len(found)]:
            found.append(now_s)
    return tuple(found)


def piece_bytes(num_bytes: int, num_pieces: int, itemsize: int) -> list[int]:
    """Bytes of the pieces into which comm/chunks.py cuts a bucket; the outer ones are small where there are four.

    >>> piece_bytes(3200, 4, 2)
    [320, 1280, 1280, 320]
    """
    numel = num_bytes // itemsize
    quarters = 4 * num_pieces - 6 if num_pieces >= 4 else num_pieces
    step = -(-numel // (quarters * ALIGNMENT)) * ALIGNMENT
    if num_pieces < 4:
        sizes = [min(step, numel - start) for start in range(0, numel, step)]
        return [size * itemsize for size in sizes]
    middle = max(-(-max(0, numel - 2 * step) // ((num_pieces - 2) * ALIGNMENT)) * ALIGNMENT, ALIGNMENT)
    sizes = [step, *(min(middle, numel - start) for start in range(step, numel, middle))]
    return [size * itemsize for size in sizes if size > 0]


def pieces_of(
    buckets: Sequence[BucketPlan],
    ready_s: Sequence[float],
    cluster: Cluster,
    columns: Callable[[BucketPlan], int],
    *,
    algorithm: str | None = None,
    is_serial: bool = False,
) -> list[timeline.Piece]:
    """The pieces of all buckets; ``algorithm``: instead of that of their plans, in one piece each."""
    found: list[timeline.Piece] = []
    counts: dict[str, int] = {}
    for bucket, at_s in zip(buckets, ready_s, strict=True):
        name = algorithm or bucket.algorithm
        num_pieces = 1 if algorithm else bucket.num_chunks
        for size in piece_bytes(bucket.num_bytes, num_pieces, bucket.num_bytes // bucket.numel):
            column = counts.get(name, 0) % columns(bucket)
            counts[name] = counts.get(name, 0) + 1
            stages = cluster.stages(name, size)
            found.append(
                timeline.Piece(
                    bucket=bucket.index,
                    num_bytes=size,
                    ready_s=at_s,
                    lane=name,
                    column=column,
                    stages=stages,
                    is_serial=is_serial,
                )
            )
    return found


def step_times(work: Work, buckets: Sequence[BucketPlan], pieces: Sequence[timeline.Piece]) -> StepTimes:
    """One step of ranks that all keep this pace. ``pieces`` are ready when ``work`` says."""
    spans = timeline.run(pieces)
    backward_end_s = work.forward_s + work.backward_s
    done_s = max((span.end_s for span in spans), default=backward_end_s)
    exposed_s = max(0.0, done_s - backward_end_s)
    return StepTimes(
        step_s=max(backward_end_s + exposed_s + work.update_s, work.input_s),
        exposed_s=exposed_s,
        busy_s=_union_s([(span.begin_s, span.end_s) for span in spans]),
        spans=tuple(spans),
        ready_s=ready_times_s(work, buckets),
    )


def simulate(
    work: Work,
    cluster: Cluster,
    plan: CommPlan,
    *,
    itemsize: int,
    on_cuda: bool = True,
    algorithm: str | None = None,
    cuts: Sequence[int] | None = None,
    num_columns: int | None = None,
    jitter: Jitter = NO_JITTER,
    num_steps: int = 1,
) -> Outcome:
    """Steps of all ranks.

    Arguments:
        work: of a rank of mean pace.
        cluster, plan: where, and with which buckets and algorithms.
        itemsize: bytes of an element on the wire.
        on_cuda: buckets are not cut, and go one after another, as on one CUDA stream.
        algorithm: None: the plan's. Else one of ``cluster.PEERS`` or ``cluster.OURS`` for every bucket, in one piece.
        cuts: see ``buckets_of``.
        num_columns: collectives that run side by side; None: as the plan says, one on CUDA.
        jitter, num_steps: see ``Jitter``.
    """
    numels = [numel for numel, _ in work.gradients]
    buckets = buckets_of(numels, cluster, plan, itemsize=itemsize, on_cuda=on_cuda, cuts=cuts)
    if on_cuda:
        buckets = tuple(replace(bucket, num_chunks=1) for bucket in buckets)

    def columns(bucket: BucketPlan) -> int:
        if num_columns is not None or on_cuda or algorithm is not None:
            return num_columns or 1
        return plan.num_columns(bucket.algorithm, cluster)

    factors = jitter.slowest(cluster.world_size, num_steps)
    known: dict[float, StepTimes] = {}
    for factor in factors:
        if factor not in known:
            paced = work.scaled(float(factor))
            ready_s = ready_times_s(paced, buckets)
            pieces = pieces_of(buckets, ready_s, cluster, columns, algorithm=algorithm, is_serial=on_cuda)
            known[factor] = step_times(paced, buckets, pieces)
    steps = [known[factor] for factor in factors]
    return Outcome(
        steps_s=np.array([step.step_s for step in steps]),
        exposed_s=np.array([step.exposed_s for step in steps]),
        first=steps[0],
        buckets=buckets,
        alone_s=work.alone_s,
    )


def to_trace(outcome: Outcome) -> CommTrace:
    """The first step as the trace that a real run writes (comm/trace.py): same rows, same counters, same JSON.

    ``to_trace(outcome).write(path, rank=0)`` is for Perfetto.
    """
    now = [0.0]
    trace = CommTrace(clock=lambda: now[0], keep_events=True)
    buckets, spans = {bucket.index: bucket for bucket in outcome.buckets}, outcome.first.spans
    ends_s = {
        index: max((s.end_s for s in spans if s.bucket == index), default=outcome.first.ready_s[index])
        for index in buckets
    }
    events: list[tuple[float, int, Callable[[], object]]] = []
    for place, (index, bucket) in enumerate(buckets.items()):
        ready_s, is_last = outcome.first.ready_s[index], place == len(buckets) - 1

        def begin(bucket: BucketPlan = bucket, is_last: bool = is_last) -> object:
            return trace.begin(num_bytes=bucket.num_bytes, is_last=is_last)

        def end(bucket: BucketPlan = bucket, ready_s: float = ready_s) -> object:
            return trace.end(bucket, ready_s)

        events += [(ready_s, 0, begin), (ends_s[index], 2, end)]
    for span in spans:

        def stage(span: timeline.Span = span) -> object:
            bucket = replace(buckets[span.bucket], algorithm=span.lane)  # type: ignore[arg-type]
            return trace.stage(bucket, span.stage, span.column, span.begin_s, int(span.num_bytes))

        events.append((span.end_s, 1, stage))
    for at_s, _, happen in sorted(events, key=lambda event: event[:2]):
        now[0] = at_s
        happen()
    return trace


def _union_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by any of these intervals."""
    total_s, until_s = 0.0, 0.0
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s
