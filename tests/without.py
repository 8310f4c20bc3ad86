"""Simulation of a machine without some packages. Their import fails in a program and in all its child processes."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("hydra", "omegaconf", "wandb", "simplejpeg")
"""What is not needed to train, nor on the machine on which the GPU's half is first tried."""


class FinderWithout:
    """Finder of modules that hides some packages: `find_spec` returns None for them, so their import fails."""

    def __init__(self, finder: Any, names: Sequence[str]) -> None:
        self.finder = finder
        self.names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def block(names: Sequence[str] = OPTIONAL) -> None:
    """Make the import of these packages fail from now on, as if they were not installed."""
    sys.meta_path[:] = [FinderWithout(finder, names) for finder in sys.meta_path]


def environment_without(folder: Path, names: Sequence[str] = OPTIONAL) -> dict[str, str]:
    """Return an environment that hides these packages: Python imports `sitecustomize` before anything else."""
    (folder / "sitecustomize.py").write_text(
        f"from tests.without import block\n\nblock({sorted(names)!r})\n"
    )
    # Without autoload, because pytest plugins of the hidden packages could not be imported either.
    return os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
