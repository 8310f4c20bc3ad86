"""What a checkpoint costs a step, by ways of writing it: `python -m tests.evidence.checkpoint_cost`."""

import json
import os
from pathlib import Path
from typing import Any, cast

# Before torch is imported: one thread for the step, as in a rank that shares the cores with others. Yours wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from recipes.benchmarks import report as bench_report
from recipes.cli import config_check, launch
from tests.evidence.checkpoint_cost import cases as bench_checkpoints

launch.register_resolvers()

KEYS: dict[str, Any] = {"about": str | None, "num_repeats": config_check.Count, "model": nn.Module, "run_dir": str}


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="evidence/checkpoint_cost")
def main(cfg: DictConfig) -> None:
    """Save the state of the network and its optimizer in turns; print the table, write it and every sample."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        checkpoint = bench_checkpoints.state_of(instantiate(cfg.model))
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    folder = Path(config.pop("run_dir"))
    samples = bench_checkpoints.samples(checkpoint, folder / "checkpoints", num_repeats=cfg.num_repeats)
    table = bench_checkpoints.markdown(samples, bench_checkpoints.num_bytes_of(checkpoint))
    told = {"config": config, "environment": bench_report.environment(), "samples": samples}
    (folder / "checkpoint.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "table.md").write_text(table + "\n")
    print(f"{table}\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
