"""Command that benchmarks all-reduces of buffers and gradients, and training steps.

Run `python recipes/bench.py world.devices=4`, or use torchrun.
"""

import logging
from itertools import chain
from typing import Any

import _path  # noqa: F401
import hydra
from hydra.utils import instantiate
from lightning.fabric import Fabric
from omegaconf import DictConfig

from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.planning.model.cluster import Cluster
from recipes.benchmarks import report as bench_report
from recipes.benchmarks.allreduce import AllReduceBench
from recipes.benchmarks.parts import PartsBench
from recipes.benchmarks.steps import StepBench
from recipes.cli import config_check, launch
from recipes.cli.ranges import Positive, Ranks
from recipes.cli.results import config_and_folder

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "world.accelerator": str,
    "world.devices": Ranks | list[int] | str,
    "world.num_nodes": Ranks,
    "link_bytes_per_s": Positive | None,
    "about": str | None,
    "num_nodes": Ranks,
    "cluster.links": Cluster | None,
    "allreduce": AllReduceBench | None,
    "parts": PartsBench | None,
    "steps": StepBench | None,
    "run_dir": str,
}

SECTIONS = ("allreduce", "parts", "steps")
"""Keys of the benchmarks, in the order in which they run."""


def benches_of(cfg: DictConfig) -> list[Any]:
    """Build the configured benchmarks, in the order in which they run.

    Raises:
        ValueError: Nothing would be measured, or an argument of a benchmark is invalid.
    """
    sections = [cfg[name] for name in SECTIONS if cfg[name] is not None]
    if all("gradients" in section and not section.gradients for section in sections):
        values = []
        for name in SECTIONS:
            if cfg[name] is None:
                values.append(f"`{name}` (=null)")
            else:
                values.append(f"`{name}.gradients` (=[])")
        raise ValueError(
            f"{', '.join(values[:-1])} and {values[-1]} must not all be empty, because nothing would be "
            "measured. Remove allreduce=null or steps=null, or set parts.gradients=[resnet50]."
        )
    return [instantiate(section) for section in sections]


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench")
def main(cfg: DictConfig) -> None:
    """Run the configured benchmarks on all ranks.

    Rank zero prints each result as soon as it is measured, and writes the report at the end.
    """
    with launch.job(cfg) as launched:
        # Lightning would print lines about devices for every training run.
        for name in (
            "lightning.pytorch",
            "lightning.fabric",
        ):
            logging.getLogger(name).setLevel(logging.WARNING)
        with launch.short_errors(cfg):
            config_check.check(cfg, KEYS)
            benches = benches_of(cfg)
            fabric = Fabric(strategy="ddp", **cfg.world)
            launched.append(fabric)
            fabric.launch()
        topology = Topology.discover()
        world = CommPlan().describe(topology).partition(";")[0]
        fabric.print(world)
        fabric.print("Each row is printed as soon as it has been measured.")
        rows = list[bench_report.Timing]()
        printed_header: tuple[str, ...] = ()
        for row in chain.from_iterable(bench.run(fabric, topology) for bench in benches):
            rows.append(row)
            header = bench_report.header(rows)
            if header != printed_header:  # a new section has another header
                fabric.print(bench_report.aligned(header), flush=True)
                printed_header = header
            fabric.print(
                bench_report.aligned(bench_report.cells(rows, cfg.link_bytes_per_s)[-1]), flush=True
            )
        if fabric.is_global_zero:
            config, folder = config_and_folder(cfg)
            if cfg.about is None:
                title = world
            else:
                title = f"{world}\n{cfg.about}"
            bench_report.write_bench(
                folder, rows, link_bytes_per_s=cfg.link_bytes_per_s, config=config, title=title
            )
            print(
                f"\n{bench_report.markdown(rows, cfg.link_bytes_per_s)}\n\nWritten to {folder.resolve()}",
                flush=True,
            )


if __name__ == "__main__":
    main()
