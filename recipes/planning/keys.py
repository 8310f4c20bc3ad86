"""Keys of conf/simulate.yaml and conf/cluster, and what each must hold."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.simulate import Jitter
from recipes.cli.config_values import COUNT, NOT_NEGATIVE, POSITIVE
from recipes.planning.scenario import Search

SIMULATE_KEYS: dict[str, Any] = {
    "num_nodes": COUNT,
    "batch_size_per_rank": COUNT,
    "image_shape": list[COUNT],  # type: ignore[valid-type]
    "images_per_s": (POSITIVE, None),
    "profile": str | None,
    "update_s": NOT_NEGATIVE,
    "itemsize": COUNT,
    "plan": CommPlan,
    "algorithm": str | None,
    "cuts": list[int] | None,
    "num_columns": (COUNT, None),
    "jitter": Jitter,
    "num_steps": COUNT,
    "epochs": POSITIVE,
    "images_per_epoch": COUNT,
    "scaling_ranks": list[COUNT],  # type: ignore[valid-type]
    "search": Search | None,
    "run_dir": str,
    "model": nn.Module,
    "cluster.about": str,
    "cluster.links": Cluster,
    "cluster.on_cuda": bool,
    "cluster.images_per_s": dict[str, POSITIVE],  # type: ignore[valid-type]
    "cluster.input_images_per_s": (POSITIVE, None),
    "cluster.watts_per_node": (POSITIVE, None),
    "cluster.price_per_node_hour": (POSITIVE, None),
}
