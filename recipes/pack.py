"""Command that packs images or text into shards: `python recipes/pack.py root=... out=...`.

Running the same command again resumes the packing of images.
"""

import _path  # noqa: F401
import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.cli import config_check, launch
from recipes.datasets.packing import Packing
from recipes.datasets.text_packing import TextPacking

launch.register_resolvers()

KEYS = {
    "root": str,
    "out": str,
    "check": bool,
    "packing": Packing | TextPacking,
    "run_dir": str,
}


@hydra.main(version_base="1.3", config_path="../conf", config_name="pack")
def main(cfg: DictConfig) -> None:
    """Pack a dataset into shards, or verify the checksums of existing shards if `check=true`."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        packing = instantiate(cfg.packing)
        if cfg.check:
            packing.check()
            print(f"All shards in {packing.out} are intact.", flush=True)
            return
        for packed in packing.run():
            print(packed, flush=True)


if __name__ == "__main__":
    main()
