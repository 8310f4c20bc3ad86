"""Files that are whole or not there: written next to their place, then renamed over it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_path(path: Path, *, has_rivals: bool = False) -> Iterator[Path]:
    """Give a path next to `path` to write to, and rename it to `path` when the block ends without an error.

    After a kill at any moment `path` holds the old content or the new one. After an error no other file is left.
    Content that must survive a power failure needs `sync` within the block, and `sync_directory` after it.

    Args:
        path: The file to replace or create. Its folder must exist.
        has_rivals: Several processes may write this file at once: each writes to a name of its own.

    >>> path = Path(tempfile.mkdtemp()) / "some.txt"
    >>> with atomic_path(path) as part:
    ...     _ = part.write_text("whole")
    >>> path.read_text(), os.listdir(path.parent)
    ('whole', ['some.txt'])
    """
    # One fixed name: what a kill leaves there is written over the next time.
    part = part_path(path)
    if has_rivals:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        part = Path(name)
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        remove_quietly(part)
        raise


def part_path(path: Path) -> Path:
    """Return where the content of `path` is while it is being written."""
    return path.with_name(f".{path.name}.part")


def sync(file: IO[Any]) -> None:
    """Wait until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(folder: Path) -> None:
    """Make renames in `folder` durable. Where directories cannot be opened, as on Windows, there is nothing to do."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_quietly(path: Path) -> None:
    """Remove a file, if it is there and can be removed."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
