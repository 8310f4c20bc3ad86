"""Measurement of links and choice of a plan: `python recipes/tune.py world.devices=4`, or torchrun."""

import logging
from dataclasses import replace
from typing import Any

import _path  # noqa: F401
import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric import Fabric
from omegaconf import DictConfig

from recipes.cli import launch
from recipes.cli.results import config_and_folder
from recipes.planning import tune_report, tune_setup
from recipes.planning.calibration.microbenchmarks import Measurements, measure
from recipes.planning.calibration.overhead_fit import MeasuredSetup

launch.register_resolvers()


def measured(cfg: DictConfig, launched: list[Any]) -> tuple[bool, Measurements, MeasuredSetup]:
    """Return whether this is rank zero, the times, and their setup. Starts or joins the ranks."""
    if cfg.samples is not None:
        return True, *tune_setup.read_measurements(cfg.samples)
    asked = instantiate(cfg.measure)
    tune_setup.end_with_parent()
    fabric = Fabric(strategy=tune_setup.strategy(asked.timeout_s), **cfg.world)
    launched.append(fabric)
    topology = tune_setup.connect(fabric, asked)
    world = tune_setup.world_of(topology, fabric.device, asked, inside=cfg.inside)
    nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes} nodes"
    line = f"{topology.world_size} ranks = {nodes} x {topology.ranks_per_node}"
    fabric.print(f"tune: {line}; measuring for at most {asked.limit_s:g} s", flush=True)
    return fabric.is_global_zero, measure(asked, topology, fabric.device), world


@hydra.main(version_base="1.3", config_path="../conf", config_name="tune")
def main(cfg: DictConfig) -> None:
    """Measure on all ranks; rank zero fits, chooses, prints and writes."""
    with launch.job(cfg) as launched, launch.short_errors(cfg):
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        tune_setup.check_tune_keys(cfg)
        plan, work = instantiate(cfg.plan), tune_setup.configured_work(cfg)
        logged = {} if cfg.nccl_log is None else tune_setup.read_nccl_log(cfg.nccl_log)
        is_first, samples, world = measured(cfg, launched)
        if is_first:
            config, folder = config_and_folder(cfg)
            network = str(HydraConfig.get().runtime.choices["model"])
            found = tune_report.TuneReport.of(samples, replace(world, **logged), work, plan, cfg, network=network)
            found.write(folder, config)
            print(f"\n{found.markdown()}\n\n{found.usage(folder)}", flush=True)


if __name__ == "__main__":
    main()
