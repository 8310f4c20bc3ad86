"""Command that compares training runs: `python recipes/report.py runs=[outputs/a,outputs/b]`."""

from pathlib import Path

import _path  # noqa: F401
import hydra
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.training import compare_runs

launch.register_resolvers()

KEYS = {"runs": list[str], "names": list[str] | None, "title": str, "run_dir": str}


@hydra.main(version_base="1.3", config_path="../conf", config_name="report")
def main(cfg: DictConfig) -> None:
    """Read the given runs, print their final metrics, and write `report.html` and `report.json`."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        runs = compare_runs.read_runs([Path(run) for run in cfg.runs], names=cfg.names)
    folder = Path(cfg.run_dir)
    compare_runs.write_comparison(folder, runs, title=cfg.title)
    print(
        f"{compare_runs.text_table(runs)}\n\nWritten to {folder.resolve() / 'report.html'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
