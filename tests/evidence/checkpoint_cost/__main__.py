"""Cost of a checkpoint to a step, by ways of writing it: `python -m tests.evidence.checkpoint_cost`."""

from typing import Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from recipes.cli import config_check, launch
from recipes.cli.ranges import Count
from recipes.cli.results import config_and_folder, environment, write_json
from tests.evidence.checkpoint_cost import cases as bench_checkpoints

launch.register_resolvers()

KEYS: dict[str, Any] = {"about": str | None, "num_repeats": Count, "model": nn.Module, "run_dir": str}


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/checkpoint_cost")
def main(cfg: DictConfig) -> None:
    """Save the state of the network and its optimizer in turns; print the table, write it and every sample."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        checkpoint = bench_checkpoints.training_state(instantiate(cfg.model))
    config, folder = config_and_folder(cfg)
    samples = bench_checkpoints.samples(checkpoint, folder / "checkpoints", num_repeats=cfg.num_repeats)
    table = bench_checkpoints.markdown(samples, bench_checkpoints.num_bytes_of(checkpoint))
    write_json(folder / "checkpoint.json", {"config": config, "environment": environment(), "samples": samples})
    (folder / "table.md").write_text(table + "\n")
    print(f"{table}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
