"""Cost of the orthogonalised momentum: measured among ranks, and planned for GPUs."""

from dataclasses import asdict
from typing import Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.cli.results import config_and_folder, environment, write_json
from tests.evidence.orthogonal_cost import planned, updates

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "about": str | None,
    "clusters": list[str] | None,
    "updates": updates.SharedUpdates | None,
    "run_dir": str,
}


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/orthogonal_cost")
def main(cfg: DictConfig) -> None:
    """Plan, measure, print both tables; write `cost.json` with every sample, and `table.md`."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        of_nodes = list(planned.all_planned(cfg.clusters))
        measured = instantiate(cfg.updates)
    rows = [] if measured is None else list(measured.take())
    tables = [planned.markdown(of_nodes)] if of_nodes else []
    tables += [updates.markdown(rows)] if rows else []
    config, folder = config_and_folder(cfg)
    content = {"config": config, "environment": environment()}
    write_json(folder / "cost.json", content | {"planned": [*map(asdict, of_nodes)], "updates": [*map(asdict, rows)]})
    (folder / "table.md").write_text("\n\n".join(tables) + "\n")
    print("\n\n".join([*tables, f"written to {folder.resolve()}"]), flush=True)


if __name__ == "__main__":
    main()
