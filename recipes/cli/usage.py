"""How a command is called, and the end of one that was called wrongly; no import of Hydra or torch."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1]

EXTRAS = {
    "recipes": ("pydantic", "sklearn", "PIL"),
    "report": ("matplotlib",),
    "search": ("optuna",),
    "study": ("optuna", "scipy"),
}
"""Extras of the distribution that commands need, and what each brings that is asked for."""

EXTRAS_OF = {
    "train": ("recipes",),
    "pack": ("recipes",),
    "search": ("recipes", "report", "search"),
    "study": ("recipes", "study"),
}
"""Extras of commands that draw no pictures; all others need `recipes` and `report`. A callback of `train` draws some,
and says so."""


class UsageError(SystemExit):
    """End of a program for what was given to it: exit code 2. Where it is raised, its message is printed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 2


def refuse_missing_extras(name: str) -> None:
    """Refuse a command for which packages are missing, before anything of it is imported.

    Raises:
        UsageError: One is; it says the line that installs them.
    """
    needed = EXTRAS_OF.get(name, ("recipes", "report"))
    if missing := [each for extra in needed for each in EXTRAS[extra] if find_spec(each) is None]:
        message = (
            f"error: `{name}` needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install 'lightning-hybrid[{','.join(needed)}]'"
        )
        print(message, file=sys.stderr, flush=True)
        raise UsageError(message)


def command(name: str) -> str:
    """Return what a user types for a command, as this one was started: by `lightning-hybrid` or by its file."""
    started_as = getattr(sys.modules["__main__"], "STARTED_AS", None)  # see lightning_hybrid/__main__.py
    if started_as is not None:
        return f"{started_as} {name.replace('_', '-')}"
    path = RECIPES / f"{name}.py"
    return f"python {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
