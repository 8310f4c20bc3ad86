"""Estimation of software overheads, which are chosen so that simulated all-reduces match measured ones.

Over Gloo the costs are a stage, a message, a segment, a core's rate and the fraction of a link that
one ring uses (cost_gloo.py). Over NCCL the cost is the launch (cost_nccl.py). The costs are fitted
together and compensate each other, so a single one has no meaning or interval of its own. The
remaining error becomes a curve over bytes for each algorithm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.cluster_costs import PEERS
from lightning_hybrid.planning.model.cost_nccl import Nccl
from lightning_hybrid.planning.model.node_wire import NodeWire
from lightning_hybrid.planning.model.simulate import simulate
from lightning_hybrid.planning.model.workload import StepWorkload

# Start values of the fit of Gloo's costs: rounded costs of the emulated cluster (conf/cluster/netlab.yaml).
FIRST_GUESS = {"stage_s": 1e-4, "message_s": 5e-5, "segment_s": 5e-5, "ring_share": 0.9}

# The fit ends when steps of 3 % lower its error by less than a thousandth. Our choice.
LEAST_STRIDE = 0.03
LEAST_PROGRESS = 1e-3

# The links determine the time of larger all-reduces, which also take long to simulate in chunks.
MOST_FITTED_BYTES = 16 * MIB

# Errors of all-reduces up to this value are squared, and larger errors count linearly.
ROBUST = 0.1


@dataclass(frozen=True, kw_only=True)
class MeasuredSetup:
    """Description of a measurement's machines, ranks and data type.

    Args:
        num_nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        on_cuda: Whether NCCL was measured. False: Gloo.
        itemsize: Bytes of an element in the measured all-reduces.
        num_shared_cores: Number of cores if all ranks run on one machine. None: there are several machines.
        is_interleaved: Whether consecutive ranks are on different nodes.
        inside: Connection of the GPUs of a node.
        channels: Number of channels of NCCL's graph, from its log. None: unknown.
        nccl_version: Version of NCCL, from the same log.
    """

    num_nodes: int
    ranks_per_node: int
    on_cuda: bool
    itemsize: int
    num_shared_cores: int | None = None
    is_interleaved: bool = False
    inside: Literal["nvlink", "pci"] = "nvlink"
    channels: int | None = None
    nccl_version: str = "2.27"


def predicted_all_reduce_s(
    cluster: Cluster, algorithm: str, num_bytes: int, setup: MeasuredSetup
) -> float:
    """Simulate one all-reduce that does not overlap computation, and return its time in seconds.

    Its chunks are those of the plan. `algorithm` may have a suffix: `two_level_int8` is `two_level`
    through a codec.
    """
    work = StepWorkload(forward_s=0.0, gradients=((max(1, num_bytes // setup.itemsize), 0.0),))
    is_peer = algorithm in PEERS
    wire = None
    if is_coded(algorithm):
        algorithm, _, name = algorithm.rpartition("_")
        wire = NodeWire(name=name, itemsize=setup.itemsize)  # type: ignore[arg-type]
    plan = CommPlan() if is_peer else CommPlan(algorithm=algorithm)  # type: ignore[arg-type]
    return simulate(
        work,
        cluster,
        plan,
        itemsize=setup.itemsize,
        on_cuda=setup.on_cuda,
        algorithm=algorithm if is_peer else None,
        cuts=[],
        wire=wire,
    ).step_s


def is_coded(algorithm: str) -> bool:
    """Return whether the all-reduce algorithm with this name uses a codec.

    >>> is_coded("two_level_int8"), is_coded("two_level")
    (True, False)
    """
    return algorithm.endswith(("_int8", "_int4"))


def fit_overheads(
    bare: Cluster,
    measured: dict[tuple[str, int], float],
    setup: MeasuredSetup,
    *,
    most_bytes_per_s: float,
) -> Cluster:
    """Fit software overheads to measured all-reduce times, and return the updated cluster description.

    All-reduces through a codec, or of more than `MOST_FITTED_BYTES`, are ignored. A core's rate is
    at most `most_bytes_per_s`.
    """
    measured = {
        (name, size): time_s
        for (name, size), time_s in measured.items()
        if not is_coded(name) and size <= MOST_FITTED_BYTES
    }

    def loss(cluster: Cluster) -> float:
        # On a logarithmic scale, predictions of twice and half the measured time have the same error, at any size.
        errors = (
            math.log(predicted_all_reduce_s(cluster, name, size, setup) / time_s) / ROBUST
            for (name, size), time_s in measured.items()
        )
        return statistics.fmean(math.sqrt(1 + error * error) - 1 for error in errors)

    transport = bare.transport
    if isinstance(transport, Nccl):

        def launched(values: dict[str, float]) -> Cluster:
            return replace(bare, transport=replace(transport, launch_s=values["launch_s"]))

        return launched(_descend({"launch_s": 1e-5}, lambda values: loss(launched(values))))

    def with_costs(values: dict[str, float]) -> Cluster:
        # A core that sends, receives and adds is at most as fast as one that does one of these. If the links are too
        # slow to show the core's rate, the fit ends at this bound.
        core = replace(bare.inside, bytes_per_s=min(values["core_bytes_per_s"], most_bytes_per_s))
        costs = replace(
            transport,
            stage_s=values["stage_s"],
            message_s=values["message_s"],
            segment_s=values["segment_s"],
            ring_share=min(1.0, values["ring_share"]),
        )
        return replace(bare, inside=core, transport=costs)

    guess = FIRST_GUESS | {"core_bytes_per_s": most_bytes_per_s / 2}
    return with_costs(_descend(guess, lambda values: loss(with_costs(values))))


def _descend(
    values: dict[str, float], loss: Callable[[dict[str, float]], float]
) -> dict[str, float]:
    """Minimize a function of positive values by coordinate descent.

    Each value in turn is multiplied and divided by a factor that shrinks.

    >>> found = _descend({"x": 1.0, "y": 1.0}, lambda v: (v["x"] - 7) ** 2 + (v["y"] - v["x"] / 2) ** 2)
    >>> abs(found["x"] - 7) < 0.1, abs(found["y"] - 3.5) < 0.1
    (True, True)
    """
    best = dict(values)
    least = loss(values)
    stride = 1.0
    while stride > LEAST_STRIDE:
        before = least
        for name in values:
            # Use factors, because all values are positive and differ by orders of magnitude.
            for factor in (1 + stride, 1 / (1 + stride)):
                tried = best | {name: best[name] * factor}
                if (tried_loss := loss(tried)) < least:
                    best = tried
                    least = tried_loss
        if least > before * (1 - LEAST_PROGRESS):
            stride /= 2
    return best
