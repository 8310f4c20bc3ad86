"""A machine without some packages: their import fails, in a program and in all programs that it starts."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("hydra", "omegaconf", "wandb", "simplejpeg")
"""What is not needed to train, nor on the machine on which the GPU's half is first tried."""


class Missing(MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}: blocked for this test", name=name)


def block(names: Sequence[str] = OPTIONAL) -> None:
    """From now on their import fails, as where they were never installed."""
    sys.meta_path.insert(0, Missing(names))


def environment_without(folder: Path) -> dict[str, str]:
    """For programs that shall not find them: Python imports `sitecustomize` before anything else."""
    (folder / "sitecustomize.py").write_text("from tests.without import block\n\nblock()\n")
    # pytest's plugins of these packages would not be there either
    return os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
