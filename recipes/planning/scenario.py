"""A training run to be planned, at any scale; and the search for its best plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.plan_search import Candidate, rank_plans, with_buckets
from lightning_hybrid.planning.simulate import NO_JITTER, Jitter, SimulatedSteps, simulate
from lightning_hybrid.planning.workload import StepWorkload
from recipes.cli.config_check import CountOrZero
from recipes.planning.layers import Layer, work_of


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Network, device, cluster and plan; arguments as in conf/simulate.yaml.

    ``measured``: what a rank computes, instead of ``images_per_s`` spread over ``layers``.
    """

    layers: tuple[Layer, ...]
    images_per_s: float
    batch_size_per_rank: int
    cluster: Cluster
    plan: CommPlan
    itemsize: int
    on_cuda: bool
    measured: StepWorkload | None = None
    input_images_per_s: float | None = None
    update_s: float = 0.0
    algorithm: str | None = None
    cuts: tuple[int, ...] | None = None
    num_columns: int | None = None
    jitter: Jitter = NO_JITTER
    num_steps: int = 1

    @property
    def global_batch_size(self) -> int:
        """Images of a step."""
        return self.cluster.world_size * self.batch_size_per_rank

    def work(self) -> StepWorkload:
        """Of one rank. The input of a node feeds its ranks alike."""
        node_batch = self.batch_size_per_rank * self.cluster.ranks_per_node
        input_s = 0.0 if self.input_images_per_s is None else node_batch / self.input_images_per_s
        if self.measured is not None:
            return replace(self.measured, update_s=self.update_s, input_s=input_s)
        return work_of(
            self.layers,
            batch_size=self.batch_size_per_rank,
            images_per_s=self.images_per_s,
            update_s=self.update_s,
            input_s=input_s,
        )

    def run(self) -> SimulatedSteps:
        """Simulate it."""
        return simulate(
            self.work(),
            self.cluster,
            self.plan,
            itemsize=self.itemsize,
            on_cuda=self.on_cuda,
            algorithm=self.algorithm,
            cuts=self.cuts,
            num_columns=self.num_columns,
            jitter=self.jitter,
            num_steps=self.num_steps,
        )

    def at(self, num_ranks: int) -> Scenario:
        """The same with so many ranks: whole nodes, and part of one below."""
        per_node = min(self.cluster.ranks_per_node, num_ranks)
        cluster = replace(self.cluster, ranks_per_node=per_node, num_nodes=-(-num_ranks // per_node))
        return replace(self, cluster=cluster)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Tries every algorithm with every bucket size, and says what each costs.

    Arguments:
        algorithms: null is the plan's choice by bytes.
        bucket_bytes: caps; ``num_buckets`` of the plan is 1, so that they are what counts.
        num_shown: how many to tell of.
    """

    algorithms: Sequence[str | None]
    bucket_bytes: Sequence[int]
    num_shown: CountOrZero = 5

    def run(self, scenario: Scenario) -> list[Candidate]:
        """All that differ, the best first; of equals the one with fewer buckets."""
        plans = [
            with_buckets(replace(scenario.plan, algorithm=algorithm or "auto"), size)  # type: ignore[arg-type]
            for algorithm, size in itertools.product(self.algorithms, self.bucket_bytes)
        ]
        return rank_plans(
            scenario.work(), scenario.cluster, plans, itemsize=scenario.itemsize, on_cuda=scenario.on_cuda
        )
