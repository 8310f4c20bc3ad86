"""Command that predicts the duration, cost and memory of a training run.

Run `python recipes/simulate.py cluster=p40_roce model=resnet50 num_nodes=256`.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

import _path  # noqa: F401
import hydra
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from lightning_hybrid.checks import did_you_mean
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.planning.estimates.failures import Failures
from lightning_hybrid.planning.estimates.layers import WithoutValues, flops_per_image, layers_of
from lightning_hybrid.planning.estimates.run_time import PlannedRun, RunTime
from lightning_hybrid.planning.estimates.scenario import PEAK_SHARE, Scenario, Search
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.node_wire import WireName
from lightning_hybrid.planning.model.simulate import Jitter
from lightning_hybrid.planning.report.memory_report import MemorySettings
from lightning_hybrid.planning.report.run_lines import ComparedRun, comparison_table, preset_of
from lightning_hybrid.planning.report.simulate_report import SimulationReport
from recipes.cli import config_check, launch
from recipes.cli.ranges import Count, NotNegative, Positive
from recipes.cli.results import config_and_folder, environment
from recipes.training.gathered_blocks import gathered_alone

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
"""Keys of conf/simulate.yaml and conf/cluster, with the types of their values."""


def network_of(cfg: DictConfig) -> nn.Module:
    """Build the configured network on the meta device, because only its shapes are needed."""
    with WithoutValues():
        network: nn.Module = instantiate(cfg.model)
    return network


def rate_of(cfg: DictConfig, model_name: str, flops: int) -> tuple[float, bool]:
    """Return the images per second of one device, and whether they are estimated from its peak FLOP/s.

    Args:
        cfg: Configuration of the command.
        model_name: Name of the network in `cluster.images_per_s`.
        flops: FLOPs of one image in a training step.

    Raises:
        ValueError: Neither a rate nor a peak is configured.
    """
    rate = cfg.images_per_s
    if rate is None:
        rate = cfg.cluster.images_per_s.get(model_name)
    if rate is not None:
        return float(rate), False
    if cfg.cluster.peak_flops is not None and flops:
        return PEAK_SHARE * cfg.cluster.peak_flops / flops, True
    raise ValueError(
        f"`images_per_s` (=null) is required, because {cfg.cluster.about} has no throughput "
        f"for model={model_name}. Set images_per_s to the number of images that one device "
        "trains per second, or set cluster.peak_flops=<FLOP/s> to estimate it."
    )


def scenario_of(cfg: DictConfig, network: nn.Module) -> Scenario:
    """Create the scenario to simulate from a configuration."""
    layers = tuple(layers_of(network, list(cfg.image_shape)))
    model_name = HydraConfig.get().runtime.choices["model"]
    rate, is_estimated = rate_of(cfg, model_name, flops_per_image(layers))
    return Scenario(
        layers=layers,
        images_per_s=rate,
        is_rate_estimated=is_estimated,
        batch_size_per_rank=cfg.batch_size_per_rank,
        input_images_per_s=cfg.cluster.input_images_per_s,
        update_s=cfg.update_s,
        cluster=instantiate(cfg.cluster.links),
        plan=instantiate(cfg.plan),
        itemsize=cfg.itemsize,
        on_cuda=cfg.cluster.on_cuda,
        algorithm=cfg.algorithm,
        cuts=None if cfg.cuts is None else tuple(cfg.cuts),
        num_columns=cfg.num_columns,
        jitter=instantiate(cfg.jitter),
        num_steps=cfg.num_steps,
        comm_dtype_across_nodes=cfg.comm_dtype_across_nodes,
        sync_across_nodes_every=cfg.sync_across_nodes_every,
    )


def planned_run_of(cfg: DictConfig) -> PlannedRun:
    """Create the description of the planned run, with its length, failure rates and prices."""
    choices = HydraConfig.get().runtime.choices
    return PlannedRun(
        about=f"cluster={choices['cluster']} ({cfg.cluster.about}), model={choices['model']}",
        epochs=cfg.epochs,
        images_per_epoch=cfg.images_per_epoch,
        failures=instantiate(cfg.failures),
        watts_per_node=cfg.cluster.watts_per_node,
        price_per_node_hour=cfg.cluster.price_per_node_hour,
    )


def memory_settings_of(cfg: DictConfig, network: nn.Module) -> MemorySettings:
    """Return the settings that determine the predicted memory of a rank."""
    gathered_numels = []
    for block in gathered_alone(network):
        gathered_numels.append(sum(parameter.numel() for parameter in block.parameters()))
    return MemorySettings(
        precision=cfg.precision,
        optimizer=cfg.optimizer,
        image_shape=list(cfg.image_shape),
        gathered_numels=gathered_numels,
        memory_bytes=cfg.cluster.gpu_memory_bytes,
    )


def given_keys(cfg: DictConfig) -> set[str]:
    """Return the keys set on the command line, and also `images_per_s` if it is configured."""
    keys = {override.lstrip("+").partition("=")[0] for override in HydraConfig.get().overrides.task}
    if cfg.images_per_s is not None:
        keys.add("images_per_s")
    return keys


def report_of(cfg: DictConfig) -> SimulationReport:
    """Simulate the configured run, and return a report with its duration, cost and memory."""
    network = network_of(cfg)
    scenario = scenario_of(cfg, network)
    return SimulationReport.of(
        scenario,
        network,
        planned_run_of(cfg),
        memory_settings_of(cfg, network),
        search=None if cfg.search is None else instantiate(cfg.search),
        scaling_ranks=cfg.scaling_ranks,
        preset=preset_of(scenario, given_keys(cfg)),
    )


def check_clusters(names: Sequence[str]) -> None:
    """Raise if there is no description of a cluster to compare.

    Raises:
        ValueError: The message lists all descriptions.
    """
    choices = GlobalHydra.instance().config_loader().get_group_options("cluster")
    for name in names:
        if name not in choices:
            hint = did_you_mean(name, choices) or " Remove it from the list."
            raise ValueError(
                f"`compare` (={name}) must contain only names of clusters: {', '.join(choices)}.{hint}"
            )


def comparison(cfg: DictConfig) -> str:
    """Simulate a run on several clusters, and return a table with the cheapest cluster first.

    Raises:
        ValueError: There is no such cluster, or the numbers of clusters and prices differ.
    """
    names = list(cfg.compare)
    check_clusters(names)
    prices = list(cfg.prices_per_node_hour or [])
    if prices and len(prices) != len(names):
        raise ValueError(
            f"`prices_per_node_hour` (={prices}) must contain one price for each entry of "
            f"`compare` (={names}), in the same order. Set as many prices, or leave them out."
        )
    differing = ("cluster=", "compare=", "prices_per_node_hour=")
    shared = []
    for override in HydraConfig.get().overrides.task:
        if not override.lstrip("+").startswith(differing):
            shared.append(override)
    compared = []
    for index, name in enumerate(names):
        cluster_cfg = compose("simulate", [*shared, f"cluster={name}"])
        scenario = scenario_of(cluster_cfg, network_of(cluster_cfg))
        planned = planned_run_of(cluster_cfg)
        step_s = scenario.run().step_s
        num_steps = planned.num_steps(scenario.global_batch_size)
        compared.append(
            ComparedRun(
                cluster=name,
                scenario=scenario,
                step_s=step_s,
                run=RunTime.of(scenario, step_s, num_steps, planned.failures),
                price_per_node_hour=prices[index] if prices else planned.price_per_node_hour,
            )
        )
    return comparison_table(compared)


def check_pictures(cfg: DictConfig) -> None:
    """Raise if figures are requested but Matplotlib is not installed.

    Raises:
        ValueError: Matplotlib is not installed.
    """
    if cfg.pictures and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "`pictures` (=true) needs matplotlib, which is not installed. Run pip install "
            "'lightning-hybrid[report]', or leave pictures=true out."
        )


@hydra.main(version_base="1.3", config_path="../conf", config_name="simulate")
def main(cfg: DictConfig) -> None:
    """Simulate the configured run, print a summary, and write the report and optional figures."""
    with launch.short_errors(cfg):
        config_check.check(cfg, KEYS)
        check_pictures(cfg)
        if cfg.compare:
            print(comparison(cfg))
            return
        report = report_of(cfg)
    config, folder = config_and_folder(cfg)
    report.write(folder, config, environment())
    if cfg.pictures:
        # Imported here because importing matplotlib takes a second.
        from lightning_hybrid.planning.report import (
            pictures,
        )

        pictures.draw_simulation(report, folder)
    print(f"{report.printed()}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
