"""Kill runs anywhere and see that they resume to the bit: `python -m tests.evidence.resume`; see recipes/faults."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any, cast

# Before torch is imported: two threads in each of several processes are slower than one. Yours wins if it is set.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hydra
from omegaconf import DictConfig, OmegaConf

from recipes.cli import config_check, launch
from tests.evidence.faults import table as fault_table
from tests.evidence.resume import trials

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "about": str | None,
    "num_trials": config_check.CountOrZero,
    "seed": config_check.Seed,
    "own": list[str],
    "run_dir": str,
}


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/resume")
def main(cfg: DictConfig) -> None:
    """One run and one resumed run for each trial; print each as it ends, write the table. Status 1 where one broke."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    folder = Path(config.pop("run_dir"))
    outcomes = list[fault_table.Outcome]()
    for outcome in trials.outcomes(folder / "runs", num_trials=cfg.num_trials, seed=cfg.seed, own=cfg.own):
        outcomes.append(outcome)
        print("  ".join(outcome.cells()), flush=True)
        fault_table.write(folder, outcomes, config=config, title=cfg.about or "Killed runs, damaged checkpoints")
    print(f"\n{fault_table.markdown(outcomes)}\n\nwritten to {folder.resolve()}", flush=True)
    if not all(outcome.is_held for outcome in outcomes):
        sys.exit(1)
    shutil.rmtree(folder / "runs")


if __name__ == "__main__":
    main()
