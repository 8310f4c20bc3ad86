"""Files that a command writes when it ends: its configuration, versions and machine, and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lightning_hybrid.callbacks.run_report.environment import environment as environment_of


def environment() -> dict[str, Any]:
    """Return versions and machine. `commit` where this is a checkout, with a `+` where files differ from it."""
    return environment_of(Path(__file__).parent)


def config_and_folder(cfg: DictConfig) -> tuple[dict[str, Any], Path]:
    """Return the configuration, resolved and without `run_dir`, and that directory."""
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    return config, Path(config.pop("run_dir"))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, one value a line. Make its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
