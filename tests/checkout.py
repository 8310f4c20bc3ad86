"""Files of the checkout that git tracks. Virtual environments, outputs of runs and drafts are ignored.

    tracked_files("lightning_hybrid/*.py")   # at any depth, as `git ls-files` reads the pattern
    tracked_in(ROOT / "recipes", "[!_]*.py")  # in one folder

If the folder is no git repository, for example an unpacked source archive, all files count that such an archive
contains.
"""

import os
import subprocess
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".github", "conf", "docs", "lightning_hybrid", "recipes", "tests")


@cache
def _names(root: Path) -> tuple[str, ...]:
    """Return the sorted paths below the root, with `/` as separator and without tracked files that were deleted."""
    # Inside a git hook, these variables point to the repository and index of the hook.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        command = ["git", "-C", str(root), "ls-files", "-z"]
        listed = os.fsdecode(
            subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        )
    except (OSError, subprocess.CalledProcessError):  # git or its repository is missing
        listed = ""
    paths = [root / name for name in listed.split("\0") if name]
    if not paths:
        below = [
            path
            for folder in FOLDERS
            for path in (root / folder).rglob("*")
            if "__pycache__" not in path.parts
        ]
        paths = [*root.iterdir(), *below]
    return tuple(sorted(path.relative_to(root).as_posix() for path in paths if path.is_file()))


def tracked_files(pattern: str, root: Path = ROOT) -> list[Path]:
    """Return the tracked files whose path relative to the root matches the pattern. `*` also matches `/`."""
    return [root / name for name in _names(root) if fnmatchcase(name, pattern)]


def tracked_in(folder: Path, pattern: str) -> list[Path]:
    """Return the tracked files directly in a folder whose names match the pattern."""
    return [
        path
        for path in tracked_files("*")
        if path.parent == folder and fnmatchcase(path.name, pattern)
    ]
