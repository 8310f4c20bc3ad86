"""The environment of a run: versions, machine, commit."""

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
    """Return versions and machine; `commit` where `code_dir` is in a checkout, with a `+` where files differ from it.

    >>> environment()["torch"] == torch.__version__, environment()["commit"]
    (True, None)
    """
    state = None if code_dir is None else code_state(code_dir)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "commit": None if state is None else state["commit"] + ("+" if state["is_dirty"] else ""),
        "system": platform.system() + " " + platform.release(),
        "num_cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
    }


def code_state(code_dir: Path) -> dict[str, Any] | None:
    """Return `commit` of the repository around a folder, and `is_dirty`: whether a file that it tracks differs.

    None where there is no repository, no commit, or no git; also where the repository knows no file of the folder, such
    as an environment inside of a project.

    >>> code_state(Path("/")) is None
    True
    """
    git = ["git", "-C", str(code_dir)]
    commit = _output([*git, "rev-parse", "HEAD"])
    if commit is None or not _output([*git, "ls-files", "."]):
        return None
    return {
        "commit": commit,
        "is_dirty": bool(_output([*git, "status", "--porcelain", "--untracked-files=no"])),
    }


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
