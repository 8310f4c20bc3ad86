"""Training run to be planned for any number of ranks, and the search for its best communication plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.checks import require_whole
from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.planning.estimates.compression import BYTES, average_s, with_averages
from lightning_hybrid.planning.estimates.layers import Layer, work_of
from lightning_hybrid.planning.model.cluster import Cluster, bounds
from lightning_hybrid.planning.model.node_wire import NodeWire, WireName
from lightning_hybrid.planning.model.plan_search import Candidate, rank_plans, with_buckets
from lightning_hybrid.planning.model.simulate import NO_JITTER, Jitter, SimulatedSteps, simulate
from lightning_hybrid.planning.model.workload import StepWorkload


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Training run to be planned, with its network, device, cluster and communication plan.

    The arguments are the same as in conf/simulate.yaml.
    """

    layers: tuple[Layer, ...]
    images_per_s: float
    batch_size_per_rank: int
    cluster: Cluster
    plan: CommPlan
    itemsize: int
    on_cuda: bool
    input_images_per_s: float | None = None
    update_s: float = 0.0
    algorithm: str | None = None
    cuts: tuple[int, ...] | None = None
    num_columns: int | None = None
    jitter: Jitter = NO_JITTER
    num_steps: int = 1
    comm_dtype_across_nodes: WireName | None = None
    sync_across_nodes_every: int = 1
    is_rate_estimated: bool = False

    @property
    def wire(self) -> NodeWire | None:
        """Data type or codec of traffic between nodes, or None for the default data type.

        Averages of master weights and momentum are fp32.
        """
        name = self.comm_dtype_across_nodes
        return (
            None
            if name is None
            else NodeWire(name=name, itemsize=4 if self.is_local else self.itemsize)
        )

    @property
    def is_local(self) -> bool:
        """True if nodes train independently for several steps between two averages."""
        return self.sync_across_nodes_every > 1 and self.cluster.num_nodes > 1

    @property
    def averaged_bytes(self) -> int:
        """Size of master weights and momentum in fp32, in bytes."""
        return BYTES * sum(numel for layer in self.layers for numel in layer.numels)

    @property
    def average_s(self) -> float:
        """Time to average master weights and momentum over nodes once, in seconds."""
        return average_s(
            self.averaged_bytes, self.cluster, self.plan, on_cuda=self.on_cuda, wire=self.wire
        )

    def node_bytes(self, outcome: SimulatedSteps) -> float:
        """Return the number of bytes per step that are all-reduced between nodes, in their wire format."""
        if self.is_local:
            num_bytes = self.averaged_bytes / self.sync_across_nodes_every
        else:
            num_bytes = float(sum(bucket.num_bytes for bucket in outcome.buckets))
        return num_bytes if self.wire is None else self.wire.num_bytes(num_bytes)

    @property
    def global_batch_size(self) -> int:
        """Number of images in a step over all ranks."""
        return self.cluster.world_size * self.batch_size_per_rank

    def work(self) -> StepWorkload:
        """Return the compute times of one rank in a step.

        All ranks of a node share its input pipeline.
        """
        node_batch = self.batch_size_per_rank * self.cluster.ranks_per_node
        input_s = 0.0 if self.input_images_per_s is None else node_batch / self.input_images_per_s
        return work_of(
            self.layers,
            batch_size=self.batch_size_per_rank,
            images_per_s=self.images_per_s,
            update_s=self.update_s,
            input_s=input_s,
        )

    def run(self) -> SimulatedSteps:
        """Simulate training steps of the scenario."""
        outcome = simulate(
            self.work(),
            self.cluster.of(1) if self.is_local else self.cluster,
            self.plan,
            itemsize=self.itemsize,
            on_cuda=self.on_cuda,
            algorithm=self.algorithm,
            cuts=self.cuts,
            num_columns=self.num_columns,
            jitter=self.jitter,
            num_steps=self.num_steps,
            wire=None if self.is_local else self.wire,
        )
        if not self.is_local:
            return outcome
        return with_averages(outcome, every=self.sync_across_nodes_every, average_s=self.average_s)

    def bounds(self) -> tuple[Scenario, Scenario] | None:
        """Return the scenarios for the lower and upper bound of the step time, or None if unknown.

        80 % of measured step times are expected between the bounds.
        """
        cluster_bounds = bounds(self.cluster)
        if cluster_bounds is None:
            return None
        shares = (MOST_SHARE, LEAST_SHARE) if self.is_rate_estimated else (PEAK_SHARE, PEAK_SHARE)
        fast, slow = (
            replace(self, cluster=cluster, images_per_s=self.images_per_s * share / PEAK_SHARE)
            for cluster, share in zip(cluster_bounds, shares, strict=True)
        )
        return fast, slow

    def at(self, num_ranks: int) -> Scenario:
        """Return a copy of the scenario with another number of ranks, rounded up to whole nodes.

        If this number is smaller than the number of ranks per node, the result has one smaller node.
        """
        per_node = min(self.cluster.ranks_per_node, num_ranks)
        cluster = replace(
            self.cluster, ranks_per_node=per_node, num_nodes=-(-num_ranks // per_node)
        )
        return replace(self, cluster=cluster)


# Fraction of a device's peak that training reaches. Descriptions in conf/cluster with a rate and a peak have 0.18 to
# 0.27.
PEAK_SHARE = 0.2
LEAST_SHARE = 0.13
MOST_SHARE = 0.27


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search for the best combination of algorithms and bucket sizes.

    Args:
        algorithms: Algorithms to try. None stands for the plan's choice by bytes.
        bucket_bytes: Bucket sizes to try. `num_buckets` of the plans is 1, so that only these sizes count.
        num_shown: Number of plans in the report.
    """

    algorithms: Sequence[str | None]
    bucket_bytes: Sequence[int]
    num_shown: int = 5

    def __post_init__(self) -> None:
        require_whole(
            "num_shown",
            self.num_shown,
            "the report lists this number of plans. Set num_shown=5",
            least=0,
        )

    def run(self, scenario: Scenario) -> list[Candidate]:
        """Simulate all candidate plans, and return them without duplicates, sorted by step time.

        Among candidates with equal times, the one with fewer buckets comes first.
        """
        plans = [
            with_buckets(replace(scenario.plan, algorithm=algorithm or "auto"), size)  # type: ignore[arg-type]
            for algorithm, size in itertools.product(self.algorithms, self.bucket_bytes)
        ]
        return rank_plans(
            scenario.work(),
            scenario.cluster,
            plans,
            itemsize=scenario.itemsize,
            on_cuda=scenario.on_cuda,
            wire=scenario.wire,
        )
