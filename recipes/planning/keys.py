"""Keys of conf/simulate.yaml and conf/cluster, and what each must hold."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.node_wire import WireName
from lightning_hybrid.planning.simulate import Jitter
from recipes.cli.ranges import Count, NotNegative, Positive
from recipes.planning.estimates.failures import Failures
from recipes.planning.scenario import Search

SIMULATE_KEYS: dict[str, Any] = {
    "num_nodes": Count,
    "batch_size_per_rank": Count,
    "image_shape": list[Count],
    "images_per_s": Positive | None,
    "update_s": NotNegative,
    "itemsize": Count,
    "precision": Literal["16-true", "bf16-true", "32-true"],
    "optimizer": Literal["sgd", "lars", "adamw", "lamb"] | None,
    "track_memory": bool,
    "plan": CommPlan,
    "algorithm": str | None,
    "cuts": list[int] | None,
    "comm_dtype_across_nodes": WireName | None,
    "sync_across_nodes_every": Count,
    "num_columns": Count | None,
    "jitter": Jitter,
    "num_steps": Count,
    "failures": Failures,
    "epochs": Positive,
    "images_per_epoch": Count,
    "scaling_ranks": list[Count] | None,
    "search": Search | None,
    "compare": list[str] | None,
    "prices_per_node_hour": list[Positive] | None,
    "pictures": bool,
    "run_dir": str,
    "model": nn.Module,
    "cluster.about": str,
    "cluster.links": Cluster,
    "cluster.on_cuda": bool,
    "cluster.images_per_s": dict[str, Positive],
    "cluster.peak_flops": Positive | None,
    "cluster.input_images_per_s": Positive | None,
    "cluster.gpu_memory_bytes": Positive | None,
    "cluster.watts_per_node": Positive | None,
    "cluster.price_per_node_hour": Positive | None,
}
