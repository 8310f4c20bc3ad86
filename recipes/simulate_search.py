"""A training run to be planned, at any scale; and the search for its best plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.comm.cluster import Cluster
from lightning_hybrid.comm.pieces import Work
from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.comm.simulate import NO_JITTER, Jitter, Outcome, simulate
from recipes.simulate_models import Layer, work_of


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
    measured: Work | None = None
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

    def work(self) -> Work:
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

    def run(self) -> Outcome:
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
class Candidate:
    """A plan and its step: all ranks at mean pace."""

    algorithm: str | None
    bucket_bytes: int
    num_buckets: int
    step_s: float
    exposed_s: float

    def __str__(self) -> str:
        return f"{self.algorithm or 'auto'}, buckets of {self.bucket_bytes / 2**20:g} MiB"


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
    num_shown: int = 5

    def run(self, scenario: Scenario) -> list[Candidate]:
        """All of them, the best first; of equals the one with fewer buckets."""
        found = []
        for algorithm, size in itertools.product(self.algorithms, self.bucket_bytes):
            plan = replace(
                scenario.plan,
                algorithm=algorithm or "auto",  # type: ignore[arg-type]
                bucket_bytes=size,
                num_buckets=1,
                last_bucket_bytes=min(size, scenario.plan.last_bucket_bytes),
            )
            tried = replace(scenario, plan=plan, algorithm=None, cuts=None, jitter=NO_JITTER, num_steps=1)
            outcome = tried.run()
            found.append(
                Candidate(
                    algorithm=algorithm,
                    bucket_bytes=size,
                    num_buckets=len(outcome.buckets),
                    step_s=outcome.step_s,
                    exposed_s=float(outcome.exposed_s.mean()),
                )
            )
        return sorted(found, key=lambda candidate: (candidate.step_s, candidate.num_buckets))
