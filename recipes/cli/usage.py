"""Usage errors and checks for missing packages, without importing Hydra or torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parents[1]

EXTRAS = {
    "recipes": ("hydra", "omegaconf", "pydantic", "sklearn", "PIL"),
    "report": ("matplotlib",),
    "search": ("optuna",),
    "study": ("optuna", "scipy"),
}
"""Extras of the distribution that commands need, with the packages that are checked for each."""

EXTRAS_OF = {
    "train": ("recipes",),
    "pack": ("recipes",),
    "simulate": ("recipes",),
    "search": ("recipes", "report", "search"),
    "study": ("recipes", "study"),
}
"""Extras of each command that draws no figures by default.

All other commands need `recipes` and `report`. A callback of `train`, and `simulate` with `pictures=true`, draw figures
and check for the packages themselves.
"""


class UsageError(SystemExit):
    """Exception for incorrect usage, which ends the program with exit code 2.

    The code that raises it also prints the message.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 2


PACKAGE_NAMES = {"PIL": "Pillow", "hydra": "hydra-core", "sklearn": "scikit-learn"}
"""Names under which packages are installed, if they differ from the names of their modules."""

NEEDED_BY_TARGETS = {
    "recipes.networks.bert": ("text", ("transformers",)),
    "recipes.datasets.text": ("text", ("tokenizers",)),
    "lightning.pytorch.loggers.TensorBoardLogger": ("tensorboard", ("tensorboard",)),
}
"""Extras that parts of a configuration need, by the start of their `_target_`.

Each extra has the packages that are checked.
"""


def missing_line(who: str, extras: Sequence[str], packages: Sequence[str]) -> str:
    """Return a message that names the missing packages, or an empty string if all are installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if not missing:
        return ""
    names = ", ".join(PACKAGE_NAMES.get(package, package) for package in missing)
    return (
        f"{who} needs packages that are not installed ({names}). Install them with: pip install "
        f"'lightning-hybrid[{','.join(extras)}]'"
    )


def missing_extras(name: str) -> str:
    """Return a message that names the missing packages of a command, or an empty string."""
    extras = EXTRAS_OF.get(name, ("recipes", "report"))
    return missing_line(
        f"`{command(name)}`", extras, [package for extra in extras for package in EXTRAS[extra]]
    )


def refuse_missing_extras(name: str) -> None:
    """Exit with an error if packages that a command needs are not installed.

    Call it before the command imports anything.

    Raises:
        UsageError: A package is missing. The message contains the line that installs it.
    """
    line = missing_extras(name)
    if line:
        message = f"error: {line}"
        print(message, file=sys.stderr, flush=True)
        raise UsageError(message)


def refuse_missing_hydra(name: str) -> None:
    """Exit with an error if Hydra or OmegaConf is not installed, because even `--help` needs them.

    Raises:
        UsageError: Hydra or OmegaConf is not installed.
    """
    if find_spec("hydra") is None or find_spec("omegaconf") is None:
        refuse_missing_extras(name)


def missing_packages_of(config: Any) -> str:
    """Return a message that names missing packages of the configured classes, or an empty string."""
    if not isinstance(config, Mapping):
        return ""
    target = str(config.get("_target_", ""))
    for start, (extra, packages) in NEEDED_BY_TARGETS.items():
        if target.startswith(start):
            line = missing_line(f"`{target}`", [extra], packages)
        else:
            line = ""
        if line:
            return line
    for part in config.values():
        line = missing_packages_of(part)
        if line:
            return line
    return ""


def command(name: str) -> str:
    """Return the shell command that starts the command `name`, for use in messages.

    It has the form in which this process was started: `lightning-hybrid <name>` or `python <path>`.
    """
    # see lightning_hybrid/__main__.py
    started_as = getattr(sys.modules["__main__"], "STARTED_AS", None)
    if started_as is not None:
        return f"{started_as} {name.replace('_', '-')}"
    path = RECIPES / f"{name}.py"
    return f"python {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
