"""Program that injects faults into short runs and checks every promise: `python -m tests.evidence.faults`."""

import signal
import sys
from contextlib import ExitStack, closing
from typing import Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.cli.ranges import Count
from recipes.cli.results import config_and_folder
from tests.evidence.faults import case as fault_case
from tests.evidence.faults import comm_cases
from tests.evidence.faults import table as fault_table
from tests.evidence.faults.world import OneHost

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "about": str | None,
    "only": list[str] | None,
    "part": str | None,
    "at_once": Count,
    "comm_dtype_across_nodes": str | None,
    "world": OneHost,
    "run_dir": str,
}


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/faults")
def main(cfg: DictConfig) -> None:
    """Run each case, print its outcome and write the table. Exit with status 1 if a promise was broken."""
    launch.ignore_lightning_warnings()
    # Makes sure that stopped ranks do not outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        instances: list[OneHost] = [instantiate(cfg.world) for _ in range(cfg.at_once)]
    with ExitStack() as entered:
        worlds = [entered.enter_context(world) for world in instances]
        num_ranks = worlds[0].num_ranks
        cases = comm_cases.cases(num_ranks, worlds[0].ranks_per_host)
        if worlds[0].has_links:
            cases += comm_cases.cases_of_links(num_ranks)
        with launch.short_errors():
            chosen = fault_table.chosen_of(cases, cfg.only, cfg.part)
        config, folder = config_and_folder(cfg)
        ran = fault_case.run_cases(
            chosen, worlds, comm_dtype_across_nodes=cfg.comm_dtype_across_nodes
        )
        result = entered.enter_context(closing(ran))
        fault_table.record(result, folder, config=config, title=cfg.about or "Injected faults")


if __name__ == "__main__":
    main()
