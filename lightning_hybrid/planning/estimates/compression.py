"""Estimates of the time saved by compressing gradients between nodes, or by averaging less often.

A codec shortens exposed communication, but takes time itself. It saved time in only 6 of more than 200
data-center set-ups (Agarwal et al. 2022, MLSys, arXiv:2103.00543). With slow links between nodes, many
set-ups gain. Because a codec changes the gradients, it must save `CLEARLY_LESS_BY_CODEC` of a step, and
it is only proposed, never applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.comm.codec.coded_plan import adds_up_in_nodes
from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.model.cluster_costs import ClusterCosts
from lightning_hybrid.planning.model.node_wire import NodeWire, WireName
from lightning_hybrid.planning.model.plan_search import with_buckets
from lightning_hybrid.planning.model.simulate import SimulatedSteps, simulate
from lightning_hybrid.planning.model.workload import StepWorkload

# Fraction of the best step time without a codec that a codec must save. Our choice.
CLEARLY_LESS_BY_CODEC = 0.05

# In descending order of bits. bfloat16 takes the same time as float16.
NAMES: tuple[WireName, ...] = ("float16", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class WireStep:
    """Simulated step time with one data type or codec for traffic between nodes.

    All ranks have mean speed.

    Attributes:
        name: `comm_dtype_across_nodes`. None: as in the buckets.
        step_s: Time of the step in seconds.
        exposed_s: Time of communication that backward does not hide, in seconds.
        codec_s: Time of a rank for rounding in seconds, exposed or not.
        node_bytes: Bytes that any algorithm must send from a node, 2 (N - 1) / N A.
    """

    name: WireName | None
    step_s: float
    exposed_s: float
    codec_s: float
    node_bytes: float


def wire_step(
    outcome: SimulatedSteps, cluster: ClusterCosts, *, itemsize: int, name: WireName | None
) -> WireStep:
    """Create a `WireStep` from a simulated step, to compare data types between nodes.

    `name` is the data type or codec between nodes in that simulation.
    """
    wire = None if name is None else NodeWire(name=name, itemsize=itemsize)
    sums = [(bucket.algorithm, bucket.num_bytes) for bucket in outcome.buckets]
    num_bytes = sum(size for _, size in sums)
    across = num_bytes if wire is None else wire.num_bytes(num_bytes)
    return WireStep(
        name=name,
        step_s=outcome.step_s,
        exposed_s=float(outcome.exposed_s.mean()),
        codec_s=sum(cluster.codec_s(algorithm, size, wire) for algorithm, size in sums),
        node_bytes=2 * (cluster.num_nodes - 1) / cluster.num_nodes * across,
    )


def compressed_steps(
    work: StepWorkload,
    cluster: ClusterCosts,
    plans: Sequence[CommPlan],
    *,
    itemsize: int,
    on_cuda: bool,
) -> tuple[WireStep, ...]:
    """Simulate a step for each narrower data type between nodes, each with its best plan.

    The result is empty for a single node. A codec needs a reduction inside each node first, so
    plans without one are tried with `algorithm="auto"`.
    """
    if cluster.num_nodes == 1:
        return ()
    in_nodes = [
        plan if adds_up_in_nodes(plan, cluster) else replace(plan, algorithm="auto")
        for plan in plans
    ]
    found = []
    for name in NAMES if itemsize > 2 else NAMES[1:]:
        wire = NodeWire(name=name, itemsize=itemsize)
        tried = plans if wire.bits is None else list(dict.fromkeys(in_nodes))
        steps = (
            simulate(work, cluster, plan, itemsize=itemsize, on_cuda=on_cuda, wire=wire)
            for plan in tried
        )
        best = min(steps, key=lambda outcome: outcome.step_s)
        found.append(wire_step(best, cluster, itemsize=itemsize, name=name))
    return tuple(found)


def proposed(plain: WireStep, steps: Sequence[WireStep]) -> WireStep | None:
    """Return the compressed step to recommend over `plain`, or None if compression saves too little.

    A step with fewer bits replaces the previous choice only if it saves another `CLEARLY_LESS_BY_CODEC` of the time.

    >>> def step(name, step_s):
    ...     return WireStep(name=name, step_s=step_s, exposed_s=0.0, codec_s=0.0, node_bytes=0.0)
    >>> [getattr(proposed(step(None, 1.0), [step("int8", int8_s), step("int4", int4_s)]), "name", None)
    ...  for int8_s, int4_s in ((0.97, 0.96), (0.8, 0.78), (0.8, 0.5))]
    [None, 'int8', 'int4']
    """
    best: WireStep | None = None
    for step in steps:  # in descending order of bits
        if step.step_s <= (1 - CLEARLY_LESS_BY_CODEC) * (best or plain).step_s:
            best = step
    return best


# ---- steps inside nodes, with averages over nodes in between (`sync_across_nodes_every`) ----

CHUNK_BYTES = 16 * MIB  # for the average, with two chunks in flight
BYTES = 8  # per parameter in an average, for fp32 master weight and momentum. Adam and LAMB send no momentum


def average_s(
    num_bytes: float,
    cluster: ClusterCosts,
    plan: CommPlan,
    *,
    on_cuda: bool,
    wire: NodeWire | None = None,
) -> float:
    """Return the time in seconds to average `num_bytes` bytes of fp32 values over nodes.

    Nothing hides this time. The bytes are master weights and momentum, 4 and 4 per parameter, which
    are all-reduced over all ranks in chunks of 16 MiB. `wire` is their data type or codec between
    nodes. BatchNorm's running statistics, some thousandths of the bytes, are not counted.
    """
    num_chunks = max(1, round(num_bytes / CHUNK_BYTES))
    chunks = StepWorkload(
        forward_s=0.0, gradients=((max(1, int(num_bytes / 4 / num_chunks)), 0.0),) * num_chunks
    )
    chunked = with_buckets(plan, CHUNK_BYTES)
    return simulate(chunks, cluster, chunked, itemsize=4, on_cuda=on_cuda, wire=wire).step_s


def with_averages(inside: SimulatedSteps, *, every: int, average_s: float) -> SimulatedSteps:
    """Add the time of periodic averages between nodes to simulated steps inside nodes.

        step = step inside the node + average / every

    Per step a node sends 2 (N - 1) / N of the average's bytes divided by `every`, instead of the gradients' bytes
    (Lin et al. 2020, arXiv:1808.07217).
    """
    more_s = average_s / every
    return replace(inside, steps_s=inside.steps_s + more_s, exposed_s=inside.exposed_s + more_s)
