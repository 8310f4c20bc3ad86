"""Time all-reduces and training steps on your cluster: `python recipes/bench.py devices=4`, or under torchrun."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

# Before torch is imported: two threads in each of several processes are slower than one. Yours wins if it is set.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `recipes` is not installed

import hydra
from hydra.utils import instantiate
from lightning.fabric import Fabric
from omegaconf import DictConfig, OmegaConf

from lightning_hybrid.comm import CommPlan, Topology
from recipes.benchmarks import report as bench_report
from recipes.benchmarks.allreduce import AllReduceBench
from recipes.benchmarks.steps import StepBench
from recipes.cli import config_check, launch

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "world.accelerator": str,
    "world.devices": config_check.Ranks | list[int] | str,
    "world.num_nodes": config_check.Ranks,
    "link_bytes_per_s": config_check.Positive | None,
    "about": str | None,
    "allreduce": AllReduceBench | None,
    "steps": StepBench | None,
    "run_dir": str,
}


def measure(benches: list[Any], fabric: Fabric, topology: Topology) -> Iterator[bench_report.Row]:
    """Rows of every benchmark, as they come."""
    for bench in benches:
        yield from bench.run(fabric, topology)


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench")
def main(cfg: DictConfig) -> None:
    """Measure on all ranks; rank zero prints each case when it is done, and writes the report."""
    with launch.job() as launched:
        for name in ("lightning.pytorch", "lightning.fabric"):  # a line about devices for every fit
            logging.getLogger(name).setLevel(logging.WARNING)
        with launch.short_errors():
            config_check.check(cfg, KEYS)
            benches = [instantiate(cfg[name]) for name in ("allreduce", "steps") if cfg[name] is not None]
            fabric = Fabric(strategy="ddp", **cfg.world)
            launched.append(fabric)
            fabric.launch()
        topology = Topology.discover()
        world = CommPlan().describe(topology).partition(";")[0]
        fabric.print(world)
        rows = list[bench_report.Row]()
        for row in measure(benches, fabric, topology):
            rows.append(row)
            fabric.print("  ".join(bench_report.cells(rows, cfg.link_bytes_per_s)[-1]), flush=True)
        if fabric.is_global_zero:
            config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
            folder = Path(config.pop("run_dir"))
            title = world if cfg.about is None else f"{world}\n{cfg.about}"
            bench_report.write(folder, rows, link_bytes_per_s=cfg.link_bytes_per_s, config=config, title=title)
            print(f"\n{bench_report.markdown(rows, cfg.link_bytes_per_s)}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
