"""Command that runs a study to compare training methods.

Run `python recipes/study.py hydra.run.dir=studies/fashion`. See comparison/README.md.
"""

from pathlib import Path
from typing import Any, cast

import _path  # noqa: F401
import hydra
from omegaconf import DictConfig, OmegaConf

from recipes.cli import config_check, launch
from recipes.cli.ranges import Count
from recipes.comparison.arms import Cell, StudyPlan
from recipes.comparison.fits import FitPool, FitRequest, check
from recipes.comparison.journal import CellResult, StudyJournal, only_user_of
from recipes.comparison.table import table_of

launch.register_resolvers()

KEYS: dict[str, Any] = {"study": dict, "num_workers": Count, "run_dir": str}


def requests_to_check(plan: StudyPlan, folder: Path) -> list[FitRequest]:
    """Return a tuning run and a final run for each variant and batch size, to validate them in advance."""
    requests = []
    for cell in plan.cells:
        point = plan.points(cell)[0]
        testing = plan.testing_overrides(cell, point)
        tuning = plan.tuning_overrides(cell)
        requests.append(FitRequest(overrides=testing, run_dir=str(folder), stage="test"))
        requests.append(FitRequest(overrides=tuning, run_dir=str(folder), stage="validate"))
    return requests


def say(line: str) -> None:
    """Print a line immediately, by flushing the output."""
    print(line, flush=True)


@hydra.main(version_base="1.3", config_path="../conf", config_name="study")
def main(cfg: DictConfig) -> None:
    """Execute the remaining training runs of the study, and update `table.md` after each variant."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        container = OmegaConf.to_container(cfg, resolve=True)
        config = cast(dict[str, Any], container)
        plan = config_check.made(StudyPlan, config["study"], "study")
        folder = Path(config["run_dir"]).resolve()
        with only_user_of(folder), FitPool(config["num_workers"]) as pool:
            journal = StudyJournal(folder, plan, pool, tell=say)
            journal.check()
            requests = requests_to_check(plan, folder)
            pool.call(check, requests)
            tested: dict[Cell, CellResult] = {}
            for cell in plan.cells:
                point = journal.tune(cell)
                result = journal.test(cell, point)
                tested[cell] = result
                core_hours = result.core_s / 3600
                say(f"{cell.name} took {core_hours:.2f} core hours.")
                table = table_of(plan, tested)
                (folder / "table.md").write_text(f"{table}\n")
    table = table_of(plan, tested)
    say(f"\n{table}\n\nWritten to {folder}")


if __name__ == "__main__":
    main()
