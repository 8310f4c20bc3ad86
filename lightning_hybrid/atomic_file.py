"""Atomic replacement of files by writing a temporary file and renaming it."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# Errors of file systems that do not support syncing a directory.
_CANNOT_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def atomic_path(path: Path, *, has_rivals: bool = False) -> Iterator[Path]:
    """Yield a temporary path and rename it to `path` if the `with` block ends without an error.

    The temporary path is in the same folder. Even if the process is killed, `path` contains either the old or the new
    content. After an error, the temporary file is deleted. If the content must survive a power failure, call `sync` in
    the block and `sync_directory` after it.

    Args:
        path: File to replace or create. Its folder must exist.
        has_rivals: Whether several processes may write this file at the same time. If so, each process uses its own
            temporary name.

    >>> path = Path(tempfile.mkdtemp()) / "some.txt"
    >>> with atomic_path(path) as part:
    ...     _ = part.write_text("whole")
    >>> path.read_text(), os.listdir(path.parent)
    ('whole', ['some.txt'])
    """
    # The name is fixed, so that the next write overwrites a temporary file left behind by a killed process.
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
    """Return the path of the temporary file that `atomic_path` later renames to `path`."""
    return path.with_name(f".{path.name}.part")


def sync(file: IO[Any]) -> None:
    """Flush an open file and wait until its content is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(folder: Path) -> None:
    """Sync a directory to disk, so that renames in it survive a power failure.

    If directories cannot be opened, as on Windows, or cannot be synced, as on some network and FUSE file systems, the
    function does nothing.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def remove_quietly(path: Path) -> None:
    """Remove a file, ignoring errors such as a missing file."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
