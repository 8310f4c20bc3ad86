"""What a program writes when it ends: its configuration, versions and machine, JSON files, sizes and times in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lightning_hybrid.callbacks.run_report.environment import environment as environment_of

KIB, MIB = 2**10, 2**20


def size(num_bytes: int) -> str:
    """Format a number of bytes: 4 KiB, 8 MiB, 97.5 MiB, 1000 B.

    >>> size(4096), size(8 * MIB), size(102_228_128), size(1000)
    ('4 KiB', '8 MiB', '97.5 MiB', '1000 B')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


def time_text(seconds: float) -> str:
    """Format a time in the unit that suits it.

    >>> [time_text(seconds) for seconds in (0.0, 3.2e-4, 0.065, 11.0, 400.0, 8100.0)]
    ['0 ms', '0.32 ms', '65 ms', '11 s', '6.67 min', '2.25 h']
    """
    limits = ((1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"))
    factor, unit = next(((factor, unit) for limit, factor, unit in limits if seconds < limit), (1 / 3600, "h"))
    return f"{factor * seconds:,.3g} {unit}" if factor * seconds < 1000 else f"{factor * seconds:,.0f} {unit}"


def environment() -> dict[str, Any]:
    """Return versions and machine; `commit` where this is a checkout, with a `+` where files differ from it."""
    return environment_of(Path(__file__).parent)


def config_and_folder(cfg: DictConfig) -> tuple[dict[str, Any], Path]:
    """Return the configuration, resolved and without `run_dir`, and that directory."""
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    return config, Path(config.pop("run_dir"))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, one value a line; make its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
