"""Command that measures the links between ranks and chooses a communication plan.

Run `python recipes/tune.py world.devices=4`, or use torchrun.
"""

import logging
import os
import tempfile
import threading
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import _path  # noqa: F401
import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from omegaconf import DictConfig
from torch import nn

from lightning_hybrid.checks import first_line
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.formatting import counted
from lightning_hybrid.planning.calibration.measured_setup import (
    check_same_on_all_ranks,
    read_measurements,
    read_nccl_log,
    world_of,
)
from lightning_hybrid.planning.calibration.microbenchmarks import (
    Measurement,
    Measurements,
    measure,
    validate,
)
from lightning_hybrid.planning.calibration.overhead_fit import MeasuredSetup
from lightning_hybrid.planning.estimates.layers import layers_of, work_of
from lightning_hybrid.planning.model.workload import StepWorkload
from lightning_hybrid.planning.report import pictures
from lightning_hybrid.planning.report.tune_report import TuneReport, TuneWords
from recipes.cli import config_check, launch
from recipes.cli.ranges import Count, Positive, Ranks
from recipes.cli.results import config_and_folder, environment
from recipes.cli.usage import command
from recipes.cli.world import num_ranks

launch.register_resolvers()


KEYS: dict[str, Any] = {
    "world.accelerator": str,
    "world.devices": Ranks | list[int] | str,
    "world.num_nodes": Ranks,
    "name": str,
    "about": str | None,
    "measure": Measurement,
    "samples": str | None,
    "inside": Literal["nvlink", "pci"],
    "nccl_log": str | None,
    "image_shape": list[Count],
    "batch_size_per_rank": Count,
    "images_per_s": Positive | None,
    "plan": CommPlan,
    "num_shown": Count,
    "run_dir": str,
    "model": nn.Module,
}


def check_tune_keys(cfg: DictConfig) -> None:
    """Raise if the configuration does not allow a measurement, before any ranks are started.

    Raises:
        ValueError: A value is missing or invalid, there is only one rank, or the folder is not writable.
    """
    config_check.check(cfg, KEYS)
    if (
        cfg.samples is None
        and num_ranks(cfg.world.devices, cfg.world.num_nodes, cfg.world.accelerator) == 1
    ):
        raise ValueError(
            f"`world.devices` (={cfg.world.devices}) and `world.num_nodes` "
            f"(={cfg.world.num_nodes}) must give at least two ranks, because links between ranks "
            "are measured. Set world.devices=<ranks of a node>, or start the command with "
            "torchrun on several nodes."
        )
    if not str(cfg.name).isidentifier():
        raise ValueError(
            f"`name` (={cfg.name}) must consist of letters, digits and _, because it is used as "
            "cluster=<name>. Set name=my_cluster, for example."
        )
    folder = Path(cfg.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Checked before the ranks start, because they measure for minutes.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"`hydra.run.dir` (={folder}) cannot be written to: {error.strerror}. Set "
            "hydra.run.dir=<folder> to a writable folder for the measurements."
        ) from error


def configured_work(cfg: DictConfig) -> StepWorkload:
    """Return the workload of one training step, as input for the communication planner.

    Without `images_per_s`, all gradients are ready at once, and no computation hides the communication.
    """
    with torch.device("meta"):
        model = instantiate(cfg.model)
    layers = layers_of(model, list(cfg.image_shape))
    if cfg.images_per_s is not None:
        return work_of(layers, batch_size=cfg.batch_size_per_rank, images_per_s=cfg.images_per_s)
    numels = (numel for layer in reversed(layers) for numel in reversed(layer.numels))
    return StepWorkload(forward_s=0.0, gradients=tuple((numel, 0.0) for numel in numels))


def connecting_strategy(timeout_s: float) -> DDPStrategy:
    """Create the DDP strategy with which Fabric connects the ranks, with a timeout in seconds."""
    return DDPStrategy(timeout=timedelta(seconds=timeout_s))


def end_with_parent() -> None:
    """Start a thread that ends this process within a second after its parent process has ended.

    Otherwise the rank would keep waiting for ranks that no longer exist. Local rank zero starts no thread.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def connect(fabric: Fabric, asked: Measurement) -> Topology:
    """Start or join all ranks, check that they have the same options, and return the topology.

    Collective: every rank must call it.

    Raises:
        ValueError: The ranks cannot connect, have different configurations, or nodes have different numbers of ranks.
    """
    try:
        fabric.launch()
        topology = Topology.discover()
        answers: list[Any] = [None] * topology.world_size
        dist.all_gather_object(answers, asdict(asked))
    except RuntimeError as error:
        raise ValueError(
            f"`world` (={fabric.world_size} ranks) cannot connect: {first_line(error)}. "
            f"Start all ranks within measure.timeout_s={asked.timeout_s:g} s of each other. Check "
            "that they reach each other over the network interface in GLOO_SOCKET_IFNAME "
            "(NCCL_SOCKET_IFNAME on GPUs). If it is unset, the interface of the host name is used."
        ) from error
    check_same_on_all_ranks(answers)
    validate(topology)
    return topology


def words_of(cfg: DictConfig, network: str) -> TuneWords:
    """Extract the names and settings that the report shows from the configuration."""
    return TuneWords(name=cfg.name, network=network, about=cfg.about, num_shown=cfg.num_shown)


def usage_lines(folder: Path, name: str) -> str:
    """Format example commands that use the files written by this command."""
    return "\n".join(
        [
            f"Written to {folder.resolve()}. Use it with:",
            f"  {command('simulate')} --config-dir={folder} cluster={name} num_nodes=<nodes>",
            f"  {command('train')} strategy.comm.plan={folder / 'plan.json'}",
        ]
    )


def measured(cfg: DictConfig, launched: list[Any]) -> tuple[bool, Measurements, MeasuredSetup]:
    """Measure the links on all ranks, or read earlier measurements if `samples` names a file.

    Returns whether this is rank zero, the measured times and their setup.
    """
    if cfg.samples is not None:
        return True, *read_measurements(cfg.samples)
    asked = instantiate(cfg.measure)
    end_with_parent()
    fabric = Fabric(strategy=connecting_strategy(asked.timeout_s), **cfg.world)
    launched.append(fabric)
    topology = connect(fabric, asked)
    world = world_of(topology, fabric.device, asked, inside=cfg.inside)
    nodes = counted(topology.num_nodes, "node")
    line = f"{counted(topology.world_size, 'rank')} = {nodes} x {topology.ranks_per_node}"
    fabric.print(f"tune: {line}; measuring for at most {asked.limit_s:g} s", flush=True)
    return fabric.is_global_zero, measure(asked, topology, fabric.device), world


@hydra.main(version_base="1.3", config_path="../conf", config_name="tune")
def main(cfg: DictConfig) -> None:
    """Measure the links on all ranks, choose a plan, and write the report on rank zero."""
    with launch.job(cfg) as launched, launch.short_errors(cfg):
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        check_tune_keys(cfg)
        plan = instantiate(cfg.plan)
        work = configured_work(cfg)
        if cfg.nccl_log is None:
            logged = {}
        else:
            logged = read_nccl_log(cfg.nccl_log)
        is_first, samples, world = measured(cfg, launched)
        if is_first:
            config, folder = config_and_folder(cfg)
            words = words_of(cfg, str(HydraConfig.get().runtime.choices["model"]))
            report = TuneReport.of(samples, replace(world, **logged), work, plan, words)
            report.write(folder, config, environment())
            pictures.draw_links(report, folder)
            print(f"\n{report.markdown()}\n\n{usage_lines(folder, cfg.name)}", flush=True)


if __name__ == "__main__":
    main()
