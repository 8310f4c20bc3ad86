"""Start programs in bad environments and read what they say: `python -m tests.evidence.environments`."""

import shutil
import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.cli.results import config_and_folder
from tests.evidence.environments import trials
from tests.evidence.environments.cases import CASES, Case
from tests.evidence.faults import table as fault_table

launch.register_resolvers()

KEYS: dict[str, Any] = {"about": str | None, "only": list[str] | None, "run_dir": str}


def chosen_of(only: list[str] | None) -> list[Case]:
    """Those whose fault is in `only`.

    Raises:
        ValueError: There is no such fault.
    """
    known = dict.fromkeys(case.fault for case in CASES)
    for fault in only or ():
        if fault not in known:
            raise ValueError(
                f"`only` (={fault}) must be faults of {', '.join(known)}. Leave `only` out for all of them."
            )
    return [case for case in CASES if only is None or case.fault in only]


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/environments")
def main(cfg: DictConfig) -> None:
    """One program, or its ranks, for each case; print each as it ends, write the table. Status 1 where one broke."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        cases = chosen_of(cfg.only)
    config, folder = config_and_folder(cfg)
    outcomes = list[fault_table.Outcome]()
    for outcome in trials.outcomes(folder / "runs", cases):
        outcomes.append(outcome)
        print("  ".join(outcome.cells()), flush=True)
        fault_table.write(folder, outcomes, config=config, title=cfg.about or "Bad environments")
    print(f"\n{fault_table.markdown(outcomes)}\n\nwritten to {folder.resolve()}", flush=True)
    if not all(outcome.is_held for outcome in outcomes):
        sys.exit(1)
    shutil.rmtree(folder / "runs", ignore_errors=True)


if __name__ == "__main__":
    main()
