"""Measure bytes per parameter: `python -m tests.evidence.memory`; on GPUs with `census.device=cuda`."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any, Literal, cast

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from recipes.benchmarks import report as bench_report
from recipes.cli import config_check, launch
from tests.evidence.memory import census

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "about": str | None,
    "precisions": list[Literal["32-true", "16-mixed", "16-true", "bf16-true"]],
    "optimizers": list[Literal[tuple(census.OPTIMIZERS)]],  # type: ignore[misc]
    "census": census.Census,
    "run_dir": str,
}


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/memory")
def main(cfg: DictConfig) -> None:
    """One short fit for each precision and optimizer; print the table; write ``memory.json`` and ``table.md``."""
    for name in ("lightning.pytorch", "lightning.fabric"):  # lines about devices for every fit
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice about workers and small runs
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        measured = instantiate(cfg.census)
        launch.device_of(cfg.census.device)
    rows = [measured.take(precision, optimizer) for precision in cfg.precisions for optimizer in cfg.optimizers]
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    folder = Path(config.pop("run_dir"))
    told = {"config": config, "environment": bench_report.environment(), "rows": rows}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "table.md").write_text(census.markdown(rows) + "\n")
    print(f"{census.markdown(rows)}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
