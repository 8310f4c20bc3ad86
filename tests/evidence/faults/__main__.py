"""Inject faults into short runs and see that every promise holds: `python -m tests.evidence.faults`."""

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

# Before torch is imported: two threads in each of several processes are slower than one. Yours wins if it is set.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from recipes.cli import config_check, launch
from tests.evidence.faults import case as fault_case
from tests.evidence.faults import comm_cases, numerics_cases, replica_cases
from tests.evidence.faults import table as fault_table
from tests.evidence.faults.world import OneHost

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "about": str | None,
    "only": list[str] | None,
    "at_once": config_check.Count,
    "world": OneHost,
    "run_dir": str,
}


def chosen_of(cases: list[fault_case.Case], only: list[str] | None) -> list[fault_case.Case]:
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


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/faults")
def main(cfg: DictConfig) -> None:
    """One short run for each case; print each as it ends, write the table. Ends with status 1 where one broke."""
    launch.quieten()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks that were stopped do not outlive this
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        made: list[OneHost] = [instantiate(cfg.world) for _ in range(cfg.at_once)]
    outcomes: list[fault_table.Outcome] = []
    with ExitStack() as entered:
        worlds = [entered.enter_context(one) for one in made]
        num_ranks = worlds[0].num_ranks
        found = comm_cases.cases(num_ranks, worlds[0].ranks_per_host)
        found += numerics_cases.cases(num_ranks) + replica_cases.cases(num_ranks)
        found += comm_cases.cases_of_links(num_ranks) if worlds[0].has_links else []
        with launch.short_errors():
            chosen = chosen_of(found, cfg.only)

        def note(outcome: fault_table.Outcome) -> None:
            outcomes.append(outcome)
            print("  ".join(outcome.cells()), flush=True)

        fault_case.run_all(chosen, worlds, on_outcome=note)
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    folder = Path(config.pop("run_dir"))
    fault_table.write(folder, outcomes, config=config, title=cfg.about or "Injected faults")
    print(f"\n{fault_table.markdown(outcomes)}\n\nwritten to {folder.resolve()}", flush=True)
    if not all(outcome.is_held for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
