"""The software costs with which the simulated times of measured all-reduces have the least error.

Over Gloo: a stage, a message, a segment, a core's rate and the share that one ring fills (cost_gloo.py). Over NCCL: the
launch (cost_nccl.py). They are fitted together and compensate each other, so that none has a meaning, or an interval,
of its own. The remaining error becomes a curve over bytes of each algorithm.
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

# The start of the fit of Gloo's costs: those of the emulated cluster (conf/cluster/netlab.yaml), rounded.
FIRST_GUESS = {"stage_s": 1e-4, "message_s": 5e-5, "segment_s": 5e-5, "ring_share": 0.9}

# The fit ends where steps of 3 % do not lower its error by a part in a thousand. Our choice.
LEAST_STRIDE = 0.03
LEAST_PROGRESS = 1e-3

# Larger sums are links alone, and take long to simulate in chunks.
MOST_FITTED_BYTES = 16 * MIB

# Errors of sums count squared up to here and linearly beyond.
ROBUST = 0.1


@dataclass(frozen=True, kw_only=True)
class MeasuredSetup:
    """The machines and the data type of a measurement.

    Args:
        num_nodes: Number of nodes.
        ranks_per_node: Ranks on each node.
        on_cuda: Whether NCCL was measured, else Gloo.
        itemsize: Bytes of an element of the sums that were timed.
        num_shared_cores: Cores of the one machine that all ranks run on; None where there are several machines.
        is_interleaved: Consecutive ranks are on different nodes.
        inside: The connection of the GPUs of a node.
        channels: Of NCCL's graph, from its log; None: not known.
        nccl_version: Of the same log.
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
    """Simulate one all-reduce, cut as the plan cuts it, with nothing to hide it. Return its seconds.

    `algorithm`: `two_level_int8` is `two_level` through a codec.
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
    """Return whether sums of this name go through a codec.

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
    """Return the cluster whose predictions of the sums have the least error, of those of up to `MOST_FITTED_BYTES`.

    Those through a codec are left out. A core's rate is at most `most_bytes_per_s`.
    """
    measured = {
        (name, size): time_s
        for (name, size), time_s in measured.items()
        if not is_coded(name) and size <= MOST_FITTED_BYTES
    }

    def loss(cluster: Cluster) -> float:
        # In the logarithm a factor of two too much is as bad as one too little, at any size.
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
        # A core that sends, receives and adds is at most as fast as one that does one of these. Where the links are too
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
    """Search positive values with the least loss: one after another, up and down by a factor that shrinks.

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
            # By factors: all values are positive, and differ by orders of magnitude.
            for factor in (1 + stride, 1 / (1 + stride)):
                tried = best | {name: best[name] * factor}
                if (tried_loss := loss(tried)) < least:
                    best = tried
                    least = tried_loss
        if least > before * (1 - LEAST_PROGRESS):
            stride /= 2
    return best
