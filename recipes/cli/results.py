"""Helpers that write results as JSON, with the configuration, library versions and a machine description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lightning_hybrid.callbacks.run_report.environment import environment as environment_of


def environment() -> dict[str, Any]:
    """Return library versions and a description of the machine.

    In a git checkout it includes `commit`, which ends with a `+` if files were modified.
    """
    return environment_of(Path(__file__).parent)


def config_and_folder(cfg: DictConfig) -> tuple[dict[str, Any], Path]:
    """Return the resolved configuration without `run_dir`, and the run directory."""
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    return config, Path(config.pop("run_dir"))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file with one value per line, creating its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
