"""Plan before renting: `python recipes/simulate.py cluster=p40_roce model=resnet50 num_nodes=256`."""

import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `recipes` is not installed

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from recipes.cli import config_check, launch
from recipes.planning import simulate_report
from recipes.planning.keys import SIMULATE_KEYS
from recipes.planning.layers import layers_of, measured_work
from recipes.planning.scenario import Scenario

launch.register_resolvers()


def rate_of(cfg: DictConfig, model_name: str) -> float:
    """Images per second of one device alone.

    Raises:
        ValueError: It is nowhere given.
    """
    rate = cfg.images_per_s if cfg.images_per_s is not None else cfg.cluster.images_per_s.get(model_name)
    if rate is None:
        raise ValueError(
            f"`images_per_s` (=null) must be given: {cfg.cluster.about} has no rate for model={model_name}. It is what "
            "one device alone trains per second: measure it, or look it up, and give images_per_s=<rate>."
        )
    return float(rate)


def scenario_of(cfg: DictConfig) -> Scenario:
    """What the configuration describes."""
    measured = None
    if cfg.profile is not None:
        measured = measured_work(Path(cfg.profile), batch_size=cfg.batch_size_per_rank)
    rate = 0.0 if measured else rate_of(cfg, HydraConfig.get().runtime.choices["model"])
    with torch.device("meta"):
        model = instantiate(cfg.model)
    return Scenario(
        layers=tuple(layers_of(model, list(cfg.image_shape))),
        images_per_s=rate,
        measured=measured,
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
    )


@hydra.main(version_base="1.3", config_path="../conf", config_name="simulate")
def main(cfg: DictConfig) -> None:
    """Simulate; print the tables; write ``simulate.json``, ``table.md``, ``simulate.png`` and ``trace/rank-0.json``."""
    with launch.short_errors():
        config_check.check(cfg, SIMULATE_KEYS)
        scenario = scenario_of(cfg)
        found = simulate_report.Report.of(scenario, cfg)
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    folder = Path(config.pop("run_dir"))
    found.write(folder, config)
    print(f"{found.markdown()}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
