"""Long training that shows whether anything grows: `python -m tests.evidence.endurance`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.cli.ranges import CountOrZero
from recipes.cli.results import config_and_folder, environment
from tests.evidence.endurance import growth_report

launch.register_resolvers()

TRAIN = Path(__file__).resolve().parents[3] / "recipes" / "train.py"
KEYS: dict[str, Any] = {
    "about": str | None,
    "warmup_steps": CountOrZero,
    "samples": str | None,
    "train": list[str],
    "run_dir": str,
}


def train(overrides: list[str], folder: Path) -> Path:
    """Run `recipes/train.py` in processes of its own; return the folder of its samples.

    Raises:
        ValueError: It failed.
    """
    command = [sys.executable, str(TRAIN), *overrides, f'hydra.run.dir="{folder}"']
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise ValueError(f"`train` (={overrides}) must be a run that ends well: exit code {done.returncode}.")
    return folder / "endurance"


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/endurance")
def main(cfg: DictConfig) -> None:
    """Train, or take the samples of a run; write `endurance.json`, `table.md`."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        config, folder = config_and_folder(cfg)
        where = train(config["train"], folder / "train") if config["samples"] is None else Path(config["samples"])
        head = {"config": config, "environment": environment()}
        samples = growth_report.read_samples(where)
        table = growth_report.write_report(folder, samples, warmup_steps=cfg.warmup_steps, head=head)
    print(f"{table}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
