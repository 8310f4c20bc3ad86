"""Benchmark of the input pipeline: `python -m recipes.benchmarks.input`, or with `bench.root=/data/imagenet`."""

import os
from dataclasses import asdict

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: threads decode, each with one of torch's

import hydra
import numpy
import PIL
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.benchmarks import input_cases
from recipes.cli import config_check, launch
from recipes.cli.results import config_and_folder, environment, write_json
from recipes.datasets.images import decode

launch.register_resolvers()

KEYS = {"about": str | None, "bench": input_cases.InputBench, "run_dir": str}


@hydra.main(version_base="1.3", config_path="../../conf", config_name="benchmarks/input")
def main(cfg: DictConfig) -> None:
    """Measure; print the tables; write `bench.json` with every sample, and `table.md`."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        bench = instantiate(cfg.bench)
        speeds = bench.speeds()
        waits = bench.waits(speeds)
    versions = {"numpy": numpy.__version__, "pillow": PIL.__version__}
    versions["simplejpeg"] = getattr(decode.simplejpeg, "__version__", "not installed")
    versions["dali"] = input_cases.dali_version()
    config, folder = config_and_folder(cfg)
    config["bench"].pop("scratch")  # a place on this machine
    content = {
        "config": config,
        "environment": environment() | versions,
        "speeds": [input_cases.as_dict(row) for row in speeds],
        "waits": [asdict(row) for row in waits],
    }
    tables = [input_cases.speed_table(speeds)] + ([input_cases.wait_table(waits)] if waits else [])
    write_json(folder / "bench.json", content)
    (folder / "table.md").write_text("\n\n".join(tables) + "\n")
    print("\n" + "\n\n".join(tables) + f"\n\nwritten to {folder.resolve()}", flush=True)


if __name__ == "__main__":
    main()
