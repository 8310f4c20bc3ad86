"""Simulation of training steps on a described cluster, including communication that is not hidden.

    forward | backward: gradients get ready one by one  -> buckets -> chunks -> stages on shared links | update
            workload.StepWorkload                       buckets_of  chunks_of_step  simulate_events

Every bucket waits for the slowest rank, whose compute time is sampled from `Jitter`. Traffic of other jobs, and
failures, are not modeled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_hybrid.checks import require_number, require_whole
from lightning_hybrid.comm.codec.coded_plan import plan_for_codec
from lightning_hybrid.comm.plan import BucketPlan, CommPlan
from lightning_hybrid.planning.model.cluster_costs import ClusterCosts
from lightning_hybrid.planning.model.event_simulation import SimulatedChunk, Span, simulate_events
from lightning_hybrid.planning.model.node_wire import NodeWire
from lightning_hybrid.planning.model.workload import (
    StepWorkload,
    buckets_of,
    chunks_of_step,
    ready_times_s,
)


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Random variation of compute times between ranks and steps.

    Args:
        relative_std: Standard deviation of a rank's compute time relative to the mean (normal distribution, never below
            half the mean).
        slow_share: Probability that a rank is slow in a step.
        slow_factor: Factor by which a slow rank takes longer.
        seed: Seed of the samples.
    """

    relative_std: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_number(
            "relative_std",
            self.relative_std,
            "a standard deviation cannot be negative. Set 0 for none, or 0.05 for 5 % of a step",
        )
        if not 0 <= self.slow_share <= 1:
            raise ValueError(
                f"`slow_share` (={self.slow_share}) must be a number from 0 to 1, because it is a "
                "probability. Set 0 for none, or 0.01 for one rank in a hundred."
            )
        require_number(
            "slow_factor",
            self.slow_factor,
            "the compute time of a slow rank is multiplied by it. Set 1 for no slowdown",
            above=True,
        )
        require_whole(
            "seed",
            self.seed,
            "NumPy's random number generators accept no other seeds. Set seed=0",
            least=0,
        )

    def slowest(self, num_ranks: int, num_steps: int) -> np.ndarray:
        """Sample the compute time of the slowest rank in each step, relative to the mean.

        >>> Jitter().slowest(4, 3).tolist()
        [1.0, 1.0, 1.0]
        """
        require_whole("num_steps", num_steps, "at least one step is simulated")
        if self.relative_std == 0 and (self.slow_share == 0 or self.slow_factor == 1):
            return np.ones(num_steps)
        generator = np.random.default_rng(self.seed)
        factors = np.empty(num_steps)
        # Samples are drawn one step at a time, to save memory with many ranks and steps.
        for step in range(num_steps):
            row = np.maximum(0.5, 1 + self.relative_std * generator.standard_normal(num_ranks))
            factors[step] = np.max(
                np.where(generator.random(num_ranks) < self.slow_share, row * self.slow_factor, row)
            )
        return factors


NO_JITTER = Jitter()


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of one simulated training step, in seconds.

    `exposed_s` is the time from the end of backward until the last bucket is averaged. `busy_s` is
    the time in which at least one stage of communication runs. `ready_s` holds the time at which
    each bucket is ready.
    """

    step_s: float
    exposed_s: float
    busy_s: float
    spans: tuple[Span, ...]
    ready_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class SimulatedSteps:
    """Times of several simulated training steps."""

    steps_s: np.ndarray
    exposed_s: np.ndarray
    first: StepTimes
    buckets: tuple[BucketPlan, ...]
    alone_s: float

    @property
    def step_s(self) -> float:
        """Mean time of a step in seconds."""
        return float(self.steps_s.mean())

    @property
    def efficiency(self) -> float:
        """Parallel efficiency: step time of a single rank divided by the mean step time of all ranks.

        1 means that communication and waiting for other ranks cost nothing.
        """
        return self.alone_s / self.step_s

    def quantile_s(self, share: float) -> float:
        """Return the `share` quantile of the step time, in seconds."""
        return float(np.quantile(self.steps_s, share))


def step_times(
    work: StepWorkload, buckets: Sequence[BucketPlan], chunks: Sequence[SimulatedChunk]
) -> StepTimes:
    """Simulate one step in which all ranks have the compute times of `work`.

    `chunks` become ready at the times that `work` determines.
    """
    spans = simulate_events(chunks)
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
    work: StepWorkload,
    cluster: ClusterCosts,
    plan: CommPlan,
    *,
    itemsize: int,
    on_cuda: bool = True,
    algorithm: str | None = None,
    cuts: Sequence[int] | None = None,
    num_columns: int | None = None,
    jitter: Jitter = NO_JITTER,
    num_steps: int = 1,
    wire: NodeWire | None = None,
) -> SimulatedSteps:
    """Simulate training steps of all ranks.

    Args:
        work: Compute times of a rank with mean speed.
        cluster: Cluster on which the steps run.
        plan: Communication plan with the buckets and algorithms.
        itemsize: Bytes of an element on the wire.
        on_cuda: Whether chunks run one after another, as on one CUDA stream. The second stream of the engine is not
            modeled.
        algorithm: One of `PEERS` or `OURS` of `cluster_costs`, used for every bucket in one chunk. None: the plan's.
        cuts: See `buckets_of`.
        num_columns: Number of collectives that run at the same time. None: as the plan says, and one on CUDA.
        jitter: Random variation of compute times between ranks and steps.
        num_steps: Number of steps to sample.
        wire: Data type or codec between nodes. None: that of the buckets. A codec changes the plan by
            `plan_for_codec`, as in a run.
    """
    if cluster.num_nodes > 1 and wire is not None and (bits := wire.bits) is not None:
        work = work.on_wire(wire)
        plan = plan_for_codec(plan, cluster, bits=bits, on_cuda=on_cuda)
    numels = [numel for numel, _ in work.gradients]
    buckets = buckets_of(numels, cluster, plan, itemsize=itemsize, on_cuda=on_cuda, cuts=cuts)

    def columns(bucket: BucketPlan) -> int:
        if num_columns is not None or on_cuda or algorithm is not None:
            return num_columns or 1
        return plan.num_columns(bucket.algorithm, cluster)

    def step_of(paced: StepWorkload) -> StepTimes:
        ask: Any = {"algorithm": algorithm, "is_serial": on_cuda, "wire": wire}
        return step_times(
            paced,
            buckets,
            chunks_of_step(buckets, ready_times_s(paced, buckets), cluster, columns, **ask),
        )

    factors = cluster.slowdown * jitter.slowest(cluster.world_size, num_steps)
    # Steps differ only by the speed of their slowest rank, so one simulation is enough without jitter.
    known: dict[float, StepTimes] = {}
    for factor in factors:
        if factor not in known:
            known[factor] = step_of(work.scaled(float(factor)))
    steps = [known[factor] for factor in factors]
    return SimulatedSteps(
        steps_s=np.array([step.step_s for step in steps]),
        exposed_s=np.array([step.exposed_s for step in steps]),
        first=steps[0],
        buckets=buckets,
        alone_s=work.alone_s,
    )


def _union_s(spans: Sequence[tuple[float, float]]) -> float:
    total_s = 0.0
    until_s = 0.0
    # `until_s` is the end of the time covered so far, so that overlapping spans count once.
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s
