"""Time optimizer updates on this machine: `python recipes/bench_step.py`; on a GPU with `device=cuda`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `recipes` is not installed

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from recipes import bench_report, bench_updates, configuration, kinds, launch

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "device": str | None,
    "num_threads": (kinds.COUNT, None),
    "about": str | None,
    "updates": bench_updates.UpdateBench,
    "run_dir": str,
}


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench_step")
def main(cfg: DictConfig) -> None:
    """Measure; print the table; write ``bench.json`` with every sample, and ``table.md``."""
    with launch.short_errors():
        configuration.check(cfg, KEYS)
        device = launch.device_of(cfg.device)
        updates = instantiate(cfg.updates)
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    rows = list(updates.run(device))
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    folder = Path(config.pop("run_dir"))
    told = {
        "config": config,
        "environment": {**bench_report.environment(), "device": str(device), "num_threads": torch.get_num_threads()},
        "rows": [asdict(row) | {"median_s": row.median_s} for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "table.md").write_text(bench_updates.markdown(rows) + "\n")
    print(f"{bench_updates.markdown(rows)}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
