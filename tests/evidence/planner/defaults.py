"""What the defaults on CUDA cost beside plain DDP, and what a plan chosen for the cluster would save, by the model.

`python -m tests.evidence.planner.defaults` prints the table of recipes/records/simulate/README.md.
Nothing in it is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import _compute_bucket_assignment_by_size

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.plan_search import FLAT_ON_CUDA, Candidate, candidates
from lightning_hybrid.planning.simulate import simulate
from lightning_hybrid.planning.workload import StepWorkload
from tests.evidence.planner.known_clusters import cluster_of, network

CLUSTERS = ("hgx_h200", "dgx_h100", "dgx_a100", "cloud_100gbe", "p40_roce")
NUM_NODES = (1, 2, 16, 256)
ITEMSIZE = 2  # fp16


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of communication of one step, which nothing hides; `flat_s`: of the best plan without a hierarchy."""

    cluster: str
    num_nodes: int
    ddp_s: float
    auto_s: float
    best: Candidate
    flat_s: float


def gradients() -> list[int]:
    """Elements of ResNet-50's gradients in the order in which they get ready."""
    return [numel for layer in reversed(network("resnet50")) for numel in reversed(layer.numels)]


def ddp_s(numels: Sequence[int], cluster: Cluster) -> float:
    """Of the backend's own all-reduce with the buckets that torch makes by its own defaults."""
    tensors = [torch.empty(numel, dtype=torch.float16, device="meta") for numel in numels]
    buckets, _ = _compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
    cuts = [max(bucket) + 1 for bucket in buckets]
    return simulate(work_of(numels), cluster, CommPlan(), itemsize=ITEMSIZE, algorithm="nccl", cuts=cuts).step_s


def work_of(numels: Sequence[int]) -> StepWorkload:
    """All gradients are there at once."""
    return StepWorkload(forward_s=0.0, gradients=tuple((numel, 0.0) for numel in numels))


def row(name: str, num_nodes: int) -> Row:
    """Of one cluster."""
    numels, cluster = gradients(), cluster_of(name, num_nodes)
    found = candidates(work_of(numels), cluster, itemsize=ITEMSIZE)
    return Row(
        cluster=name,
        num_nodes=num_nodes,
        ddp_s=ddp_s(numels, cluster),
        auto_s=simulate(work_of(numels), cluster, CommPlan(), itemsize=ITEMSIZE).step_s,
        best=found[0],
        flat_s=min(one.step_s for one in found if one.plan.algorithm in FLAT_ON_CUDA),
    )


def rows() -> Iterator[Row]:
    """Of all of them."""
    for name in CLUSTERS:
        for num_nodes in NUM_NODES:
            yield row(name, num_nodes)


def markdown(found: Sequence[Row]) -> str:
    """A table."""
    titles = ("cluster", "nodes", "DDP, ms", "`auto`, ms", "`auto` / DDP", "best plan", "ms", "saves", "over best flat")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for one in found:
        plan = f"{one.best.plan.algorithm}, {one.best.num_buckets} buckets"
        cells = [
            one.cluster,
            str(one.num_nodes),
            _ms(one.ddp_s),
            _ms(one.auto_s),
            f"{one.auto_s / one.ddp_s:.2f}",
            plan,
        ]
        cells += [_ms(one.best.step_s), f"{1 - one.best.step_s / one.auto_s:.0%}"]
        cells.append("" if one.best.step_s == one.flat_s else f"{1 - one.best.step_s / one.flat_s:.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


if __name__ == "__main__":
    print(markdown(list(rows())))
