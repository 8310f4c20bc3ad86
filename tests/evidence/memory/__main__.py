"""Measurement of bytes per parameter: `python -m tests.evidence.memory`; on GPUs with `census.device=cuda`."""

import logging
import warnings
from typing import Any, Literal

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.cli.results import config_and_folder, environment, write_json
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
    """Fit shortly for each precision and optimizer; print the table; write `memory.json` and `table.md`."""
    for name in ("lightning.pytorch", "lightning.fabric"):  # lines about devices for every fit
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice about workers and small runs
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        measured = instantiate(cfg.census)
        launch.device_of(cfg.census.device)
    rows = [measured.take(precision, optimizer) for precision in cfg.precisions for optimizer in cfg.optimizers]
    config, folder = config_and_folder(cfg)
    write_json(folder / "memory.json", {"config": config, "environment": environment(), "rows": rows})
    (folder / "table.md").write_text(census.markdown(rows) + "\n")
    print(f"{census.markdown(rows)}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
