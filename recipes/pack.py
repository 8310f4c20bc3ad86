"""Packing of an image set into shards: `python recipes/pack.py root=... out=...`; the same again resumes it."""

from pathlib import Path

import _path  # noqa: F401
import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.cli.ranges import Count
from recipes.datasets.packing import Packed, Packing, check_packed

launch.register_resolvers()

KEYS = {
    "root": str,
    "out": str,
    "short_side": Count | None,
    "check": bool,
    "packing": Packing,
    "run_dir": str,
}


def summary_of(packed: Packed) -> str:
    """Format the result of a split in a sentence."""
    return (
        f"{packed.split}: {packed.num_images:,} images in {packed.num_shards:,} shards, {packed.num_bytes / 1e9:.3f} GB"
        f", {packed.num_corrupt:,} left out as corrupt, {packed.seconds:.0f} s"
    )


@hydra.main(version_base="1.3", config_path="../conf", config_name="pack")
def main(cfg: DictConfig) -> None:
    """Pack, or with `check=true` read every byte of what was packed."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        packing = instantiate(cfg.packing)
        if cfg.check:
            check_packed(Path(packing.out), packing.splits)
            print(f"every shard in {packing.out} is what was packed", flush=True)
            return
        for packed in packing.run():
            print(summary_of(packed), flush=True)


if __name__ == "__main__":
    main()
