"""Plan of a run before renting: `python recipes/simulate.py cluster=p40_roce model=resnet50 num_nodes=256`."""

import _path  # noqa: F401
import hydra
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.cli.results import config_and_folder
from recipes.planning import simulate_report
from recipes.planning.keys import SIMULATE_KEYS
from recipes.planning.run_time import comparison
from recipes.planning.scenario import scenario_of

launch.register_resolvers()


@hydra.main(version_base="1.3", config_path="../conf", config_name="simulate")
def main(cfg: DictConfig) -> None:
    """Simulate; print the answer; write `simulate.json`, `table.md`, a timeline and, if asked for, pictures."""
    with launch.short_errors(cfg):
        config_check.check(cfg, SIMULATE_KEYS)
        if cfg.compare:
            print(comparison(cfg))
            return
        found = simulate_report.SimulationReport.of(scenario_of(cfg), cfg)
    config, folder = config_and_folder(cfg)
    found.write(folder, config)
    print(f"{found.printed()}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
