"""Steps inside nodes with averages over nodes in between, as `LocalSteps` makes them."""

from __future__ import annotations

from dataclasses import replace

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.node_wire import NodeWire
from lightning_hybrid.planning.plan_search import with_buckets
from lightning_hybrid.planning.simulate import SimulatedSteps, simulate
from lightning_hybrid.planning.workload import StepWorkload

CHUNK_BYTES = 16 * MIB  # of the average, of which two are under way
BYTES = 8  # of a parameter in an average: its master and its momentum, in fp32; Adam and LAMB send no momentum


def average_s(
    num_bytes: float, cluster: Cluster, plan: CommPlan, *, on_cuda: bool, wire: NodeWire | None = None
) -> float:
    """Compute the time of one average over nodes of `num_bytes` in fp32, which nothing hides.

    They are those of the masters and of the momentum, 4 and 4 per parameter, and are summed over all ranks in chunks of
    16 MiB; `wire`: their form between nodes. Running statistics of BatchNorm, some thousandths, are not counted.
    """
    num_chunks = max(1, round(num_bytes / CHUNK_BYTES))
    chunks = StepWorkload(forward_s=0.0, gradients=((max(1, int(num_bytes / 4 / num_chunks)), 0.0),) * num_chunks)
    chunked = with_buckets(plan, CHUNK_BYTES)
    return simulate(chunks, cluster, chunked, itemsize=4, on_cuda=on_cuda, wire=wire).step_s


def with_averages(inside: SimulatedSteps, *, every: int, average_s: float) -> SimulatedSteps:
    """Return steps inside a node with the time of the average spread over them.

        step = step inside the node + average / every

    A node sends 2 (N - 1) / N of the average's bytes, by `every`, in place of those of the gradients in each step
    (Lin et al. 2020, arXiv:1808.07217).
    """
    more_s = average_s / every
    return replace(inside, steps_s=inside.steps_s + more_s, exposed_s=inside.exposed_s + more_s)
