"""Programs in bad environments, and what they report: `python -m tests.evidence.environments`."""

import shutil
from typing import Any

import hydra
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.cli.results import config_and_folder
from tests.evidence.environments import trials
from tests.evidence.environments.cases import CASES
from tests.evidence.faults import table as fault_table

launch.register_resolvers()

KEYS: dict[str, Any] = {"about": str | None, "only": list[str] | None, "part": str | None, "run_dir": str}


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/environments")
def main(cfg: DictConfig) -> None:
    """Run one program, or its ranks, for each case; print each, write the table. Exit with 1 where one broke."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        cases = fault_table.chosen_of(CASES, cfg.only, cfg.part)
    config, folder = config_and_folder(cfg)
    found = trials.environment_outcomes(folder / "runs", cases)
    fault_table.record(found, folder, config=config, title=cfg.about or "Bad environments")
    shutil.rmtree(folder / "runs", ignore_errors=True)


if __name__ == "__main__":
    main()
