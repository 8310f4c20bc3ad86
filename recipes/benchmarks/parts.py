"""Benchmark that measures the speed-ups from bucketing and from hierarchical all-reduces separately.

    per_tensor_ring            one flat ring for each tensor, one after another
    fused_ring                 the same ring, for buckets
    per_tensor_hierarchical    reduce in the node, ring of the leaders, broadcast, for each tensor
    hybrid                     buckets, each with the algorithm that the library's rule selects
    planned                    buckets and algorithms that the planner chooses for this cluster

All gradients are ready at once, so no computation hides the communication. If the cluster is described, each measured
time is reported with the planner's prediction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.plan_search import choose_plan
from lightning_hybrid.planning.model.simulate import simulate
from lightning_hybrid.planning.model.workload import StepWorkload
from recipes.benchmarks.allreduce import DTYPES, slowest, synchronize
from recipes.benchmarks.gradient_sets import GRADIENT_SETS, numel
from recipes.benchmarks.report import Timing
from recipes.cli.ranges import CountOrZero, NotNegative

PLANNED = "planned"
"""Name of the variant whose plan the planner chooses."""

ALGORITHMS = {
    "per_tensor_ring": "flat",
    "fused_ring": "flat",
    "per_tensor_hierarchical": "hierarchical",
    "hybrid": "auto",
}
"""Algorithm of each variant with a fixed plan."""

PER_TENSOR = ("per_tensor_ring", "per_tensor_hierarchical")


@dataclass(frozen=True, kw_only=True)
class PartsArm:
    """Benchmark variant that all-reduces gradients with a given communication plan, with or without bucketing.

    Args:
        name: Name of the variant.
        plan: Communication plan with algorithm, chunks and bucket sizes.
        numels: Number of elements of each gradient, in the order in which they become ready.
        is_fused: Whether small gradients share a bucket.

    >>> plan = CommPlan(bucket_bytes=2**22, num_buckets=1)
    >>> PartsArm(name="hybrid", plan=plan, numels=(2**20, 2**19, 10, 20), is_fused=True).bucket_numels(4, 2)
    [1048576, 524288, 30]
    >>> PartsArm(name="per_tensor_ring", plan=plan, numels=(2**20, 10, 20), is_fused=False).bucket_numels(4, 2)
    [1048576, 10, 20]
    """

    name: str
    plan: CommPlan
    numels: tuple[int, ...]
    is_fused: bool

    @property
    def cuts(self) -> list[int] | None:
        """Gradient indices at which the simulator starts new buckets, or None to use the bucket size of the plan."""
        if self.is_fused:
            return None
        return list(range(1, len(self.numels)))

    def bucket_numels(self, itemsize: int, num_nodes: int, on_cuda: bool = False) -> list[int]:
        """Return the number of elements in each gradient bucket."""
        if not self.is_fused:
            return list(self.numels)
        tensor_bytes = [size * itemsize for size in self.numels]
        sizes = self.plan.bucket_caps(tensor_bytes, num_nodes=num_nodes, on_cuda=on_cuda)
        return [size // itemsize for size in sizes]

    def predicted_s(self, cluster: Cluster, itemsize: int, on_cuda: bool = False) -> float:
        """Simulate the all-reduce of all gradients on a cluster, and return the predicted time in seconds."""
        gradients = tuple((size, 0.0) for size in self.numels)
        work = StepWorkload(forward_s=0.0, gradients=gradients)
        steps = simulate(
            work, cluster, self.plan, itemsize=itemsize, on_cuda=on_cuda, cuts=self.cuts
        )
        return steps.step_s


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Wall-clock and CPU time of one all-reduce of all gradients, in seconds.

    `wall_s` is the time of the slowest rank. `cpu_s` is the total processor time of all ranks.
    """

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class PartsBench:
    """Benchmark that times the all-reduce of a network's gradients with several communication plans.

    A sample is one reduction of all gradients, from a barrier until the slowest rank has all results. Each round takes
    one sample of every variant, and rounds begin with different variants. Every result is checked.

    Args:
        gradients: Names of `recipes.benchmarks.gradient_sets`. Empty: nothing is measured.
        arms: Names of variants, see the module. The first one is the reference for the others.
        dtypes: Names of torch dtypes, such as `float16`.
        num_rounds: Number of samples per variant, network and dtype.
        num_warmup_rounds: Number of rounds before the measured ones. The engine compares each new bucket between ranks,
            which costs one message per bucket.
        cluster: Description of these nodes and links, for predictions. None: no predictions.
        timeout_s: Timeout of every collective in seconds.
    """

    gradients: Sequence[str]
    arms: Sequence[str]
    dtypes: Sequence[str]
    num_rounds: CountOrZero
    num_warmup_rounds: CountOrZero = 1
    cluster: Cluster | None = None
    timeout_s: NotNegative = 300.0

    def __post_init__(self) -> None:
        _require_names("gradients", self.gradients, tuple(GRADIENT_SETS))
        _require_names("arms", self.arms, (*ALGORITHMS, PLANNED))
        _require_names("dtypes", self.dtypes, DTYPES)
        if PLANNED in self.arms and self.gradients and self.cluster is None:
            raise ValueError(
                f"`arms` (={PLANNED}) needs a `cluster`, because the planner chooses a plan for the "
                f"described nodes and links. Set cluster=p40_roce, for example, or remove {PLANNED} from "
                "parts.arms."
            )

    def run(self, fabric: Fabric, topology: Topology) -> Iterator[Timing]:
        """Measure every combination of network and dtype, and yield one `Timing` per variant.

        Collective: every rank must call it.

        Raises:
            ValueError: `cluster` does not match the nodes of the job.
        """
        if self.gradients:
            self._check_nodes(topology)
        for gradients in self.gradients:
            shapes = reversed(GRADIENT_SETS[gradients]())
            numels = tuple(numel([shape]) for shape in shapes)
            for dtype in self.dtypes:
                case = f"{gradients} {dtype}"
                yield from self._case(fabric, topology, case, numels, getattr(torch, dtype))

    def _check_nodes(self, topology: Topology) -> None:
        cluster = self.cluster
        if cluster is None:
            return
        described = (cluster.num_nodes, cluster.ranks_per_node)
        if described != (topology.num_nodes, topology.ranks_per_node):
            raise ValueError(
                f"`cluster` (={described[0]} nodes x {described[1]} ranks) does not match this job, "
                f"which has {topology.num_nodes} nodes with "
                f"{topology.ranks_per_node or 'unequal numbers of'} ranks per node. Set world.num_nodes and "
                "cluster.links.ranks_per_node, or leave `cluster` out."
            )

    def _case(
        self,
        fabric: Fabric,
        topology: Topology,
        case: str,
        numels: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Iterator[Timing]:
        on_cuda = fabric.device.type == "cuda"
        arms = [self._arm(fabric, name, numels, dtype.itemsize) for name in self.arms]
        with ExitStack() as stack:
            sums = list[ArmSums]()
            for arm in arms:
                engine = self._engine(fabric, topology, arm.plan)
                stack.callback(engine.close)
                bucket_numels = arm.bucket_numels(dtype.itemsize, topology.num_nodes, on_cuda)
                sums.append(ArmSums(engine, bucket_numels))
            samples = self._samples(fabric, arms, sums, torch.empty(sum(numels), dtype=dtype))
        for arm in arms:
            predicted_s = None
            if self.cluster is not None and fabric.is_global_zero:
                predicted_s = arm.predicted_s(self.cluster, dtype.itemsize, on_cuda)
            yield Timing(
                section="parts",
                case=case,
                arm=arm.name,
                num_bytes=sum(numels) * dtype.itemsize,
                num_nodes=topology.num_nodes,
                times_s=tuple(sample.wall_s for sample in samples[arm.name]),
                cpu_s=tuple(sample.cpu_s for sample in samples[arm.name]),
                predicted_s=predicted_s,
                load_average=os.getloadavg()[0],
            )

    def _arm(self, fabric: Fabric, name: str, numels: tuple[int, ...], itemsize: int) -> PartsArm:
        if name in ALGORITHMS:
            plan = CommPlan(algorithm=ALGORITHMS[name])  # type: ignore[arg-type]
        else:
            plan = self._chosen_plan(fabric, numels, itemsize)
        return PartsArm(name=name, plan=plan, numels=numels, is_fused=name not in PER_TENSOR)

    def _chosen_plan(self, fabric: Fabric, numels: tuple[int, ...], itemsize: int) -> CommPlan:
        """Let the planner choose a communication plan on rank zero, and return it on all ranks.

        If every rank searched for the plan, ranks that share few cores would slow each other down. Collective: every
        rank must call it.
        """
        assert self.cluster is not None
        plan = CommPlan()
        if fabric.is_global_zero:
            on_cuda = fabric.device.type == "cuda"
            plan = choose_plan(numels, self.cluster, itemsize=itemsize, on_cuda=on_cuda)
        return fabric.broadcast(plan)

    def _engine(self, fabric: Fabric, topology: Topology, plan: CommPlan) -> CommEngine:
        timeout = timedelta(seconds=self.timeout_s)
        return CommEngine(topology=topology, plan=plan, timeout=timeout, device=fabric.device)

    def _samples(
        self, fabric: Fabric, arms: Sequence[PartsArm], sums: Sequence[ArmSums], flat: Tensor
    ) -> Mapping[str, Sequence[Sample]]:
        """Run all rounds, and return the samples of each variant, which are the same on every rank."""
        flat = flat.to(fabric.device)
        samples = {arm.name: list[Sample]() for arm in arms}
        for turn in range(-self.num_warmup_rounds, self.num_rounds):
            for position in range(len(arms)):
                index = (turn + position) % len(arms)
                sample = sums[index].sample(fabric, flat)
                if turn >= 0:
                    samples[arms[index].name].append(sample)
        return samples


class ArmSums:
    """All-reduce of a network's gradient buckets, one after another, by one communication engine.

    Args:
        engine: Communication engine that reduces the buckets.
        bucket_numels: Number of elements of each bucket, in submission order.
    """

    def __init__(self, engine: CommEngine, bucket_numels: Sequence[int]) -> None:
        self.engine: CommEngine = engine
        self.bucket_numels: list[int] = list(bucket_numels)

    def buckets(self, flat: Tensor) -> list[Tensor]:
        """Split a flat gradient tensor into views, one per bucket."""
        return list(flat.split(self.bucket_numels))

    def sum_all(self, buckets: Sequence[Tensor]) -> None:
        """All-reduce every bucket in place, and wait until all are finished.

        Collective: every rank must call it.
        """
        last = len(buckets) - 1
        futures = []
        for index, bucket in enumerate(buckets):
            is_last = index == last
            futures.append(self.engine.submit(bucket, bucket_index=index, is_last=is_last))
        for future in futures:
            future.wait()

    def sample(self, fabric: Fabric, flat: Tensor) -> Sample:
        """Time one all-reduce of all gradients, and check its result.

        Collective: every rank must call it.

        Raises:
            RuntimeError: A result is wrong on this rank.
        """
        buckets = self.buckets(flat)
        fill(buckets, fabric.global_rank)
        fabric.barrier()
        synchronize(fabric.device)
        began_s = time.perf_counter()
        cpu_began_s = time.process_time()
        self.sum_all(buckets)
        synchronize(fabric.device)
        wall_s = time.perf_counter() - began_s
        cpu = torch.tensor(time.process_time() - cpu_began_s, dtype=torch.float64)
        check(buckets, fabric.world_size, self.engine.plan.algorithm)
        cpu = cpu.to(fabric.device)
        if dist.is_initialized():
            dist.all_reduce(cpu)
        return Sample(wall_s=slowest([wall_s], fabric.device)[0], cpu_s=float(cpu))


def fill(buckets: Sequence[Tensor], rank: int) -> None:
    """Fill each bucket with zeros or ones, so that adjacent ranks and adjacent buckets get different values."""
    for index, bucket in enumerate(buckets):
        bucket.fill_((rank + index) % 2)


def check(buckets: Sequence[Tensor], world_size: int, name: str) -> None:
    """Raise if a bucket that `fill` initialized holds a wrong result after the all-reduce.

    Every element must be the number of ranks that filled the bucket with ones.

    Raises:
        RuntimeError: A result is wrong.
    """
    for index, bucket in enumerate(buckets):
        num_ones = (world_size + index % 2) // 2
        low, high = bucket.aminmax()
        if float(low) != num_ones or float(high) != num_ones:
            raise RuntimeError(
                f"`{name}` computed a wrong result for the all-reduce of bucket {index}. The values range "
                f"from {float(low)} to {float(high)}, but all should be {num_ones}. Please report this bug."
            )


def _require_names(key: str, names: Sequence[str], choices: Sequence[str]) -> None:
    for name in names:
        if name not in choices:
            raise ValueError(
                f"`{key}` (={name}) must contain only these names: {', '.join(choices)}. Remove {name} "
                f"from parts.{key}."
            )
