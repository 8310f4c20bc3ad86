"""How a command is called, and the end of one that was called wrongly; no import of Hydra or torch."""

from __future__ import annotations

import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1]


class UsageError(SystemExit):
    """End of a program for what was given to it: exit code 2. Where it is raised, its message is printed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 2


def command(name: str) -> str:
    """Return what a user types for a command, as this one was started: by `lightning-hybrid` or by its file."""
    started_as = getattr(sys.modules["__main__"], "STARTED_AS", None)  # see lightning_hybrid/__main__.py
    if started_as is not None:
        return f"{started_as} {name.replace('_', '-')}"
    path = RECIPES / f"{name}.py"
    return f"python {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
