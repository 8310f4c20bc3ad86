"""The files of the checkout: those that git tracks. An environment, a run's output or a draft beside them are none.

    tracked_files("lightning_hybrid/*.py")   # at any depth, as `git ls-files` reads it
    tracked_in(ROOT / "recipes", "[!_]*.py")  # of one folder

Where git knows nothing of the folder, as in an unpacked source archive, they are what such an archive holds.
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
    """Paths below the root with `/`, sorted. Of tracked files those that are still there."""
    # Within a hook of git these name its own repository and index.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        command = ["git", "-C", str(root), "ls-files", "-z"]
        listed = os.fsdecode(
            subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
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
    """Tracked files whose path below the root matches. `*` matches `/` too."""
    return [root / name for name in _names(root) if fnmatchcase(name, pattern)]


def tracked_in(folder: Path, pattern: str) -> list[Path]:
    """Tracked files of one folder of the checkout, by name."""
    return [
        path
        for path in tracked_files("*")
        if path.parent == folder and fnmatchcase(path.name, pattern)
    ]
