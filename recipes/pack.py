"""Pack an image set into shards: `python recipes/pack.py root=... out=...`; again after a kill, and it goes on."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: threads pack, each with one of torch's
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `recipes` is not installed

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.datasets.packing import Packed, Packing, check_packed

launch.register_resolvers()

KEYS = {
    "root": str,
    "out": str,
    "short_side": config_check.Count | None,
    "check": bool,
    "packing": Packing,
    "run_dir": str,
}


def line(packed: Packed) -> str:
    """What became of a split, in a sentence."""
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
            print(line(packed), flush=True)


if __name__ == "__main__":
    main()
