"""Benchmark of optimizer updates and whole training steps: `python -m recipes.benchmarks.optimizer`."""

from dataclasses import asdict
from typing import Any

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.benchmarks import training as bench_training
from recipes.benchmarks import updates
from recipes.cli import config_check, launch
from recipes.cli.ranges import Count
from recipes.cli.results import config_and_folder, environment, write_json

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "device": str | None,
    "num_threads": Count | None,
    "about": str | None,
    "updates": updates.UpdateBench | None,
    "training": bench_training.TrainingBench | None,
    "run_dir": str,
}


@hydra.main(version_base="1.3", config_path="../../conf", config_name="benchmarks/optimizer")
def main(cfg: DictConfig) -> None:
    """Measure; print the table; write `bench.json` with every sample, and `table.md`."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        device = launch.device_of(cfg.device)
        update_bench, training_bench = instantiate(cfg.updates), instantiate(cfg.training)
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    rows = [] if update_bench is None else list(update_bench.run(device))
    tables = [] if update_bench is None else [updates.markdown(rows)]
    if rows:
        rate = updates.copy_rate(device)
        tables.append(updates.floor_markdown(rows, rate))
        print("\n\n".join(tables), flush=True)
    steps = [] if training_bench is None else list(training_bench.run(device))
    tables += [bench_training.markdown(steps)] if steps else []
    config, folder = config_and_folder(cfg)
    content = {
        "config": config,
        "environment": {**environment(), "device": str(device), "num_threads": torch.get_num_threads()},
        "copy_bytes_per_s": rate if rows else None,
        "rows": [asdict(row) | {"median_s": row.median_s} for row in rows],
        "training": [asdict(row) for row in steps],
    }
    write_json(folder / "bench.json", content)
    (folder / "table.md").write_text("\n\n".join(tables) + "\n")
    print(f"\n{tables[-1] if steps else ''}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
