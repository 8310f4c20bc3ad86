"""A program of this folder as a test starts it."""

import json
from pathlib import Path
from typing import Any

from tests.checkout import ROOT
from tests.programs import run_program


def ran(name: str, folder: Path, *overrides: str, file: str) -> Any:
    """What `tests.evidence.<name>` writes into a file of its folder."""
    done = run_program("-m", f"tests.evidence.{name}", *overrides, f"hydra.run.dir={folder}", cwd=ROOT, timeout_s=560)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return json.loads((folder / file).read_text())


def outcomes_of(name: str, folder: Path, *overrides: str) -> list[bool]:
    """Whether each promise was held."""
    return [each["is_held"] for each in ran(name, folder, *overrides, file="faults.json")["outcomes"]]
