"""Share of a ResNet-50 step that the orthogonalisation takes on a node, by the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.cost_nccl import Nccl
from recipes.cli.markdown import markdown_table
from recipes.networks.resnet import ResNet
from recipes.planning.layers import flops_per_image, layers_of
from tests.evidence.orthogonal_cost.updates import shares

CLUSTERS = Path(__file__).resolve().parents[3] / "conf" / "cluster"
LIMIT = 0.05  # of a step
IMAGES = 64  # of a GPU in a step without accumulation
GLOBAL_BATCH = 65536  # of the recipe, by one node


@dataclass(frozen=True, kw_only=True)
class PlannedShare:
    """What the planner says of one node.

    Attributes:
        step_s: A step of `IMAGES` images by one device, without communication.
        rate_flops: FLOP/s that the device reaches in such a step.
        alone_s, shared_s: The iterations at that rate, by every device alone and by the one with the most of them.
        gather_s: The broadcasts of the results, one after the other, each with the start of a collective.
        one_gather_s: What a single all-gather of the same bytes would take.
    """

    cluster: str
    num_ranks: int
    step_s: float
    rate_flops: float
    alone_s: float
    shared_s: float
    gather_s: float
    one_gather_s: float

    @property
    def rate_needed(self) -> float:
        """FLOP/s of the iterations at which they and the broadcasts take `LIMIT` of the step; inf: at none."""
        left_s = LIMIT * self.step_s - self.gather_s
        return self.shared_s * self.rate_flops / left_s if left_s > 0 else float("inf")

    def share(self, *, images: int = IMAGES) -> float:
        """Return the part of a step of this many images per device, the update itself not counted in the step."""
        return (self.shared_s + self.gather_s) / (self.step_s * images / IMAGES)


def planned(name: str) -> PlannedShare:
    """Ask the planner about one node of a cluster of `conf/cluster`.

    Raises:
        ValueError: The cluster has no rate for ResNet-50, or its links are not NCCL's.
    """
    path = CLUSTERS / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"`clusters` (={name}) must be names of conf/cluster: no such file is there.")
    cfg = OmegaConf.create({"num_nodes": 1, "cluster": OmegaConf.load(path)})
    cluster: Cluster = instantiate(cfg.cluster.links)
    nccl = cluster.transport
    if "resnet50" not in cfg.cluster.images_per_s or not isinstance(nccl, Nccl):
        raise ValueError(f"`clusters` (={name}) must have NCCL and images_per_s of resnet50: a share is of that step.")
    with torch.device("meta"):
        model = ResNet()
    per_image, rate = flops_per_image(layers_of(model, (3, 224, 224))), cfg.cluster.images_per_s.resnet50
    parts = shares([tuple(weight.shape) for weight in model.parameters()], cluster.ranks_per_node)
    flops = [part[0] for part in parts]
    sent = [nccl.reduce(part[1], cluster.ranks_per_node, cluster.inside).total_s for part in parts]
    gather = nccl.scatter_reduce(sum(part[1] for part in parts), cluster.ranks_per_node, cluster.inside)
    return PlannedShare(
        cluster=name,
        num_ranks=cluster.ranks_per_node,
        step_s=IMAGES / rate,
        rate_flops=rate * per_image,
        alone_s=sum(flops) / (rate * per_image),
        shared_s=max(flops) / (rate * per_image),
        gather_s=sum(sent),
        one_gather_s=gather.total_s,
    )


def all_planned(clusters: Sequence[str] | None) -> Iterator[PlannedShare]:
    """Yield what the planner says of each cluster."""
    yield from map(planned, clusters or ())


def markdown(rows: Sequence[PlannedShare]) -> str:
    """Format the shares of a step; the last column is a step of the recipe's batch by one node, which accumulates."""
    header = [
        "node",
        "step ms",
        "TFLOP/s in it",
        "alone",
        "shared",
        "gather",
        "shared + gather",
        "one gather",
        "needs",
        "65,536 images",
    ]
    table = [
        [
            f"{row.num_ranks} of {row.cluster}",
            f"{1e3 * row.step_s:.1f}",
            f"{row.rate_flops / 1e12:.1f}",
            *(f"{100 * part / row.step_s:.1f} %" for part in (row.alone_s, row.shared_s, row.gather_s)),
            f"{100 * row.share():.1f} %",
            f"{100 * row.one_gather_s / row.step_s:.1f} %",
            f"{row.rate_needed / 1e12:.0f} TFLOP/s" if row.rate_needed < float("inf") else "",
            f"{100 * row.share(images=GLOBAL_BATCH // row.num_ranks):.2f} %",
        ]
        for row in rows
    ]
    return markdown_table(header, table)
