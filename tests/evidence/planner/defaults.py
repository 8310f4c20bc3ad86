"""Cost of the defaults on CUDA against plain DDP, and savings of a plan chosen for the cluster, by the model.

`python -m tests.evidence.planner.defaults` prints the table of recipes/records/simulate/README.md. Nothing is measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import _compute_bucket_assignment_by_size

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.plan_search import FLAT_ON_CUDA, Candidate, candidates
from lightning_hybrid.planning.simulate import simulate
from lightning_hybrid.planning.workload import StepWorkload
from recipes.cli.markdown import markdown_table
from tests.evidence.planner.known_clusters import cluster_of, network

CLUSTERS = ("hgx_h200", "dgx_h100", "dgx_a100", "cloud_100gbe", "p40_roce")
NUM_NODES = (1, 2, 16, 256)
ITEMSIZE = 2  # fp16


@dataclass(frozen=True, kw_only=True)
class DefaultsRow:
    """Seconds of communication of one step, which nothing hides; `flat_s`: of the best flat plan."""

    cluster: str
    num_nodes: int
    ddp_s: float
    auto_s: float
    best: Candidate
    flat_s: float


def gradients() -> list[int]:
    """Return elements of ResNet-50's gradients in the order in which they get ready."""
    return [numel for layer in reversed(network("resnet50")) for numel in reversed(layer.numels)]


def ddp_s(numels: Sequence[int], cluster: Cluster) -> float:
    """Predict the backend's own all-reduce with the buckets that torch makes by its own defaults."""
    tensors = [torch.empty(numel, dtype=torch.float16, device="meta") for numel in numels]
    buckets, _ = _compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
    cuts = [max(bucket) + 1 for bucket in buckets]
    return simulate(
        work_without_overlap(numels), cluster, CommPlan(), itemsize=ITEMSIZE, algorithm="nccl", cuts=cuts
    ).step_s


def work_without_overlap(numels: Sequence[int]) -> StepWorkload:
    """Return a step whose gradients are all ready at once."""
    return StepWorkload(forward_s=0.0, gradients=tuple((numel, 0.0) for numel in numels))


def defaults_row(name: str, num_nodes: int) -> DefaultsRow:
    """Predict one cluster."""
    numels, cluster = gradients(), cluster_of(name, num_nodes)
    found = candidates(work_without_overlap(numels), cluster, itemsize=ITEMSIZE)
    return DefaultsRow(
        cluster=name,
        num_nodes=num_nodes,
        ddp_s=ddp_s(numels, cluster),
        auto_s=simulate(work_without_overlap(numels), cluster, CommPlan(), itemsize=ITEMSIZE).step_s,
        best=found[0],
        flat_s=min(one.step_s for one in found if one.plan.algorithm in FLAT_ON_CUDA),
    )


def defaults_rows() -> Iterator[DefaultsRow]:
    """Predict all clusters."""
    for name in CLUSTERS:
        for num_nodes in NUM_NODES:
            yield defaults_row(name, num_nodes)


def markdown(found: Sequence[DefaultsRow]) -> str:
    """Format a table."""
    titles = ("cluster", "nodes", "DDP, ms", "`auto`, ms", "`auto` / DDP", "best plan", "ms", "saves", "over best flat")
    rows = []
    for one in found:
        plan, best_s = f"{one.best.plan.algorithm}, {one.best.num_buckets} buckets", one.best.step_s
        times = [_ms(one.ddp_s), _ms(one.auto_s), f"{one.auto_s / one.ddp_s:.2f}"]
        over_flat = "" if best_s == one.flat_s else f"{1 - best_s / one.flat_s:.0%}"
        rows.append(
            [one.cluster, str(one.num_nodes), *times, plan, _ms(best_s), f"{1 - best_s / one.auto_s:.0%}", over_flat]
        )
    return markdown_table(titles, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


if __name__ == "__main__":
    print(markdown(list(defaults_rows())))
