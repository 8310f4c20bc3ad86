"""Inject faults into short runs and see that every promise holds: `python recipes/faults.py`; see recipes/faults."""

import os
import sys
from pathlib import Path
from typing import Any, cast

# Before torch is imported: two threads in each of several processes are slower than one. Yours wins if it is set.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `recipes` is not installed

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from recipes import configuration, fault_table, faults_comm, faults_numbers, launch
from recipes.faults_world import OneHost

launch.register_resolvers()

KEYS: dict[str, Any] = {"about": str | None, "only": list[str] | None, "world": OneHost, "run_dir": str}


def chosen_of(cases: list[faults_comm.Case], only: list[str] | None) -> list[faults_comm.Case]:
    """Those whose fault is in `only`, and the run that nothing happens to.

    Raises:
        ValueError: There is no such fault.
    """
    known = dict.fromkeys(case.fault for case in cases)
    for fault in only or ():
        if fault not in known:
            raise ValueError(
                f"`only` (={fault}) must be faults of {', '.join(known)}. Leave `only` out for all of them."
            )
    return [case for case in cases if only is None or case.fault in ("none", *only)]


@hydra.main(version_base="1.3", config_path="../conf", config_name="faults")
def main(cfg: DictConfig) -> None:
    """One short run for each case; print each as it ends, write the table. Ends with status 1 where one broke."""
    launch.quieten()
    with launch.short_errors():
        configuration.check(cfg, KEYS)
        made = instantiate(cfg.world)
    with made as world:
        chosen = faults_comm.cases(world.num_ranks) + faults_numbers.cases(world.num_ranks)
        if world.has_links:
            chosen += faults_comm.cases_of_links(world.num_ranks)
        with launch.short_errors():
            chosen = chosen_of(chosen, cfg.only)
        outcomes, weights = list[fault_table.Outcome](), None
        for case in chosen:
            outcome, found = faults_comm.run_case(case, world, weights)
            weights = found if case.fault == "none" else weights
            outcomes.append(outcome)
            print("  ".join(outcome.cells()), flush=True)
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    folder = Path(config.pop("run_dir"))
    fault_table.write(folder, outcomes, config=config, title=cfg.about or "Injected faults")
    print(f"\n{fault_table.markdown(outcomes)}\n\nwritten to {folder.resolve()}", flush=True)
    if not all(outcome.is_held for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
