"""Plan of a run before renting: `python recipes/simulate.py cluster=p40_roce model=resnet50 num_nodes=256`."""

from typing import Any, Literal

import _path  # noqa: F401
import hydra
from omegaconf import DictConfig
from torch import nn

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.node_wire import WireName
from lightning_hybrid.planning.simulate import Jitter
from recipes.cli import config_check, launch
from recipes.cli.ranges import Count, NotNegative, Positive
from recipes.cli.results import config_and_folder
from recipes.planning import simulate_report
from recipes.planning.estimates.failures import Failures
from recipes.planning.run_time import comparison
from recipes.planning.scenario import Search, scenario_of

launch.register_resolvers()

KEYS: dict[str, Any] = {
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
"""Keys of conf/simulate.yaml and conf/cluster, and what each must hold."""


@hydra.main(version_base="1.3", config_path="../conf", config_name="simulate")
def main(cfg: DictConfig) -> None:
    """Simulate; print the answer; write `simulate.json`, `table.md`, a timeline and, if asked for, pictures."""
    with launch.short_errors(cfg):
        config_check.check(cfg, KEYS)
        if cfg.compare:
            print(comparison(cfg))
            return
        found = simulate_report.SimulationReport.of(scenario_of(cfg), cfg)
    config, folder = config_and_folder(cfg)
    found.write(folder, config)
    print(f"{found.printed()}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
