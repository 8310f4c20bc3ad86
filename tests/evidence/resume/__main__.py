"""Runs killed anywhere, which must resume to the bit: `python -m tests.evidence.resume`; see recipes/records/faults."""

import shutil
from typing import Any

import hydra
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.cli.ranges import CountOrZero, Seed
from recipes.cli.results import config_and_folder
from tests.evidence.faults import table as fault_table
from tests.evidence.resume import trials

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "about": str | None,
    "num_trials": CountOrZero,
    "seed": Seed,
    "own": list[str],
    "run_dir": str,
}


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/resume")
def main(cfg: DictConfig) -> None:
    """Run and resume one run for each trial; print each, write the table. Exit with status 1 where one broke."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
    config, folder = config_and_folder(cfg)
    found = trials.resume_outcomes(folder / "runs", num_trials=cfg.num_trials, seed=cfg.seed, own=cfg.own)
    fault_table.record(found, folder, config=config, title=cfg.about or "Killed runs")
    shutil.rmtree(folder / "runs")


if __name__ == "__main__":
    main()
