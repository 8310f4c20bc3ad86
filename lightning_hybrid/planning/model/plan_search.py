"""Search for the best communication plan on a described cluster, based on simulated steps.

The rules of `algorithm="auto"` depend on bytes and ranks, but not on links. They are wrong if
latency is high. At 1 Gbit/s and 2 ms one way they choose two-level for an all-reduce of 4 MiB,
which takes 153 ms, while hierarchical takes 97 ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_hybrid.comm.codec.coded_plan import adds_up_in_nodes, plan_for_codec
from lightning_hybrid.comm.plan import KIB, MIB, CommPlan
from lightning_hybrid.planning.model.cluster_costs import OURS, ClusterCosts
from lightning_hybrid.planning.model.node_wire import NodeWire, bits_of
from lightning_hybrid.planning.model.simulate import simulate
from lightning_hybrid.planning.model.workload import StepWorkload

FLAT_ON_CUDA = ("auto", "flat", "parallel_flat")

# The last size puts all gradients in one bucket.
BUCKETS_BYTES = (MIB // 4, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 25 * MIB, 64 * MIB, 1024 * MIB)

# Sizes at which `auto` changes from `hierarchical` to `two_level`.
BELOW_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)

CHUNKS_BYTES = (128 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB, 1024 * MIB)
GROUPS = (1, 2, 4)

# Number of the best pairs of bucket size and algorithm for which chunks and groups are tried too.
NUM_REFINED = 4

# Fraction of a step that a plan must save to be preferred to the library's own. The model is not more precise.
CLEARLY_LESS = 0.01

# Fraction of a step that a hierarchical plan must save on CUDA to be preferred to the best flat plan. It launches three
# NCCL kernels instead of one, and the model omits that they take multiprocessors from backward.
CLEARLY_LESS_BY_HIERARCHY = 0.05


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Candidate communication plan with its simulated step time.

    All ranks have mean speed in the simulation.
    """

    plan: CommPlan
    num_buckets: int
    step_s: float
    exposed_s: float
    on_cuda: bool = False

    def __str__(self) -> str:
        plan = self.plan
        if self.on_cuda:  # there `chunk_bytes` hardly matters, and `auto` is flat
            return f"{'flat' if plan.algorithm == 'auto' else plan.algorithm}, {_buckets(plan, on_cuda=True)}"
        change = (
            f" (two-level from {plan.hierarchical_below_bytes / MIB:g} MiB)"
            if plan.algorithm == "auto"
            else ""
        )
        pieces = f"chunks of {plan.chunk_bytes / KIB:g} KiB, {plan.num_parallel_groups} groups"
        return f"{plan.algorithm}{change}, {_buckets(plan)}, {pieces}"


def rank_plans(
    work: StepWorkload,
    cluster: ClusterCosts,
    plans: Iterable[CommPlan],
    *,
    itemsize: int,
    on_cuda: bool,
    wire: NodeWire | None = None,
) -> list[Candidate]:
    """Simulate a step with each plan, and return the candidates sorted by step time.

    Among times that are equal to three digits, fewer buckets come first. If several plans do the
    same with these gradients on this cluster, only the first is in the result. With a codec as
    `wire`, only plans that reduce inside nodes first are in the result.
    """
    found: dict[object, Candidate] = {}
    if (bits := bits_of(wire)) is not None:
        fit = (plan for plan in plans if adds_up_in_nodes(plan, cluster))
        plans = [plan_for_codec(plan, cluster, bits=bits, on_cuda=on_cuda) for plan in fit]
    for plan in plans:
        outcome = simulate(work, cluster, plan, itemsize=itemsize, on_cuda=on_cuda, wire=wire)
        # Different settings often lead to the same buckets, so buckets and columns identify a candidate, not its plan.
        done = (
            outcome.buckets,
            tuple(plan.num_columns(bucket.algorithm, cluster) for bucket in outcome.buckets),
        )
        times: Any = {"step_s": outcome.step_s, "exposed_s": float(outcome.exposed_s.mean())}
        one = Candidate(plan=plan, num_buckets=len(outcome.buckets), on_cuda=on_cuda, **times)
        found.setdefault(done, one)
    return sorted(
        found.values(),
        key=lambda candidate: (float(f"{candidate.step_s:.3g}"), candidate.num_buckets),
    )


def candidates(
    work: StepWorkload,
    cluster: ClusterCosts,
    *,
    itemsize: int,
    on_cuda: bool = True,
    base: CommPlan | None = None,
    wire: NodeWire | None = None,
) -> tuple[Candidate, ...]:
    """Simulate steps with many plans, and return all candidates, the recommended one first.

    Algorithms are combined with bucket sizes. Without CUDA, chunk sizes and numbers of groups are
    then tried for the best of these. `base` (default: the library's plan) comes first unless
    another plan shortens the step by at least 1 %. On CUDA, a hierarchical plan comes first only if
    its step is at least 5 % shorter than under every flat plan.
    """
    base = CommPlan() if base is None else base
    bits = bits_of(wire) if cluster.num_nodes > 1 else None
    if bits is not None:
        base = plan_for_codec(base, cluster, bits=bits, on_cuda=on_cuda)
    ask: Any = {"itemsize": itemsize, "on_cuda": on_cuda, "wire": wire}
    coarse = rank_plans(work, cluster, [base, *_coarse(base)], **ask)
    # Chunks and groups are tried for the best few only, with 18 simulations each. On CUDA few buckets are chunked.
    refined = [
        replace(candidate.plan, chunk_bytes=chunk, num_parallel_groups=groups)
        for candidate in coarse[:NUM_REFINED]
        for chunk, groups in itertools.product(CHUNKS_BYTES, GROUPS)
    ]
    found = rank_plans(
        work, cluster, [*(c.plan for c in coarse), *([] if on_cuda else refined)], **ask
    )
    first = chosen(found, on_cuda=on_cuda)
    found = [first, *(candidate for candidate in found if candidate is not first)]
    # `base` was tried first, so the result contains it and not an equal plan.
    own = next(candidate for candidate in found if candidate.plan == base)
    if found[0].step_s > (1 - CLEARLY_LESS) * own.step_s:
        found = [own, *(candidate for candidate in found if candidate is not own)]
    return tuple(found)


def chosen(candidates: Sequence[Candidate], *, on_cuda: bool) -> Candidate:
    """Return the fastest candidate. On CUDA, prefer a flat plan unless another plan saves at least 5 %."""
    flat = next(
        (candidate for candidate in candidates if candidate.plan.algorithm in FLAT_ON_CUDA), None
    )
    if (
        on_cuda
        and flat is not None
        and candidates[0].step_s > (1 - CLEARLY_LESS_BY_HIERARCHY) * flat.step_s
    ):
        return flat
    return candidates[0]


def choose_plan(
    numels: Sequence[int],
    cluster: ClusterCosts,
    *,
    backward_s: float = 0.0,
    itemsize: int = 2,
    on_cuda: bool = True,
    base: CommPlan | None = None,
    wire: NodeWire | None = None,
) -> CommPlan:
    """Return the communication plan with the shortest simulated step on a cluster.

    The choice is deterministic, so ranks with the same cluster description choose the same plan.

    Args:
        numels: Numbers of elements of the gradients in the order in which they become ready, the last layer first.
        cluster: Nodes of the job. `cluster.of(num_nodes)` is the same cluster with another number of nodes.
        backward_s: Time of a rank's backward pass in seconds, spread over the gradients by their elements. If it is
            0, no communication is hidden.
        itemsize: Bytes of an element on the wire.
        on_cuda: As in `simulate`.
        base: Plan to start from, which is preferred if the model sees a difference of less than 1 %.
        wire: Data type or codec between nodes. None: that of the buckets.
    """
    total = sum(numels)
    gradients = tuple((numel, backward_s * numel / total) for numel in numels)
    work = StepWorkload(forward_s=0.0, gradients=gradients)
    return candidates(work, cluster, itemsize=itemsize, on_cuda=on_cuda, base=base, wire=wire)[
        0
    ].plan


def _coarse(base: CommPlan) -> list[CommPlan]:
    algorithms = [replace(base, algorithm=name) for name in OURS]
    by_size = [
        replace(base, algorithm="auto", hierarchical_below_bytes=below) for below in BELOW_BYTES
    ]
    plans = [*algorithms, *by_size]
    return [
        *plans,
        *(with_buckets(plan, size) for plan, size in itertools.product(plans, BUCKETS_BYTES)),
    ]


def with_buckets(plan: CommPlan, bucket_bytes: int) -> CommPlan:
    """Return a copy of the plan that fuses gradients into buckets of `bucket_bytes`.

    The number of buckets is not limited, and the last bucket is not larger than the others.
    """
    last_bytes = min(bucket_bytes, plan.last_bucket_bytes)
    return replace(plan, bucket_bytes=bucket_bytes, num_buckets=1, last_bucket_bytes=last_bytes)


def _buckets(plan: CommPlan, *, on_cuda: bool = False) -> str:
    if plan.has_ddp_buckets(on_cuda=on_cuda):
        return f"DDP's buckets of {plan.bucket_bytes / MIB:g} MiB"
    if plan.num_buckets == 1:
        return f"buckets of {plan.bucket_bytes / MIB:g} MiB"
    aim = "the library's number of" if plan.num_buckets is None else plan.num_buckets
    return f"{aim} buckets of up to {plan.bucket_bytes / MIB:g} MiB"
