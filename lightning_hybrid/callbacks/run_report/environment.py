"""Software versions, machine and Git commit of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def environment(code_dir: Path | None = None) -> dict[str, Any]:
    """Return the software versions, the machine and the Git commit of this process.

    Args:
        code_dir: Folder of the code. If it is in a Git repository, `commit` is the current commit,
            followed by `+` if files differ from the commit. Otherwise `commit` is None.

    >>> environment()["torch"] == torch.__version__, environment()["commit"]
    (True, None)
    """
    commit = None
    state = None if code_dir is None else code_state(code_dir)
    if state is not None:
        commit = state["commit"]
        if state["is_dirty"]:
            commit += "+"

    device = platform.machine()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "commit": commit,
        "system": platform.system() + " " + platform.release(),
        "num_cores": os.cpu_count(),
        "device": device,
    }


def code_state(code_dir: Path) -> dict[str, Any] | None:
    """Return the Git commit of a folder, and whether tracked files have uncommitted changes.

    The result has the keys `commit` and `is_dirty`. It is None if there is no repository, if there
    is no commit, or if git is not installed. It is also None if the repository does not track any
    file in the folder, for example if the folder is a virtual environment inside a project.

    >>> code_state(Path("/")) is None
    True
    """
    git = ["git", "-C", str(code_dir)]
    commit = _output_of([*git, "rev-parse", "HEAD"])
    if commit is None or not _output_of([*git, "ls-files", "."]):
        return None
    changes = _output_of([*git, "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "is_dirty": bool(changes)}


def _output_of(command: Sequence[str]) -> str | None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
