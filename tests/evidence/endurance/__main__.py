"""Train for long and see whether anything grows: `python -m tests.evidence.endurance`."""

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import hydra
from omegaconf import DictConfig, OmegaConf

from recipes.benchmarks import report as bench_report
from recipes.cli import config_check, launch
from tests.evidence.endurance import growth_report

launch.register_resolvers()

TRAIN = Path(__file__).resolve().parents[3] / "recipes" / "train.py"
KEYS: dict[str, Any] = {
    "about": str | None,
    "warmup_steps": config_check.CountOrZero,
    "samples": str | None,
    "train": list[str],
    "run_dir": str,
}


def train(overrides: list[str], folder: Path) -> Path:
    """Run `recipes/train.py` in processes of its own; the folder of its samples.

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
    """Train, or take the samples of a run; write ``endurance.json``, ``table.md``, ``endurance.png``."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
        folder = Path(config.pop("run_dir"))
        where = train(config["train"], folder / "train") if config["samples"] is None else Path(config["samples"])
        told = {"config": config, "environment": bench_report.environment()}
        samples = growth_report.read(where)
        table = growth_report.write(folder, samples, warmup_steps=cfg.warmup_steps, told=told)
    print(f"{table}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
