"""File locks by which processes that share a search know which trials are still running."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class TrialLocks:
    """File locks that mark running trials, with one byte of the lock file per trial.

    The kernel releases the locks of a process when it exits for any reason.

    Args:
        path: Lock file, which is created if missing. Use one object of this class per process and path, because closing
            the file once releases all locks of the process.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)  # closed when the process ends

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Context manager that lets only one process at a time start a trial, so that no trial runs twice."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0, os.SEEK_SET)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0, os.SEEK_SET)

    def hold(self, number: int) -> None:
        """Acquire the lock that marks a trial as running in this process."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, number + 1, os.SEEK_SET)

    def release(self, number: int) -> None:
        """Release the lock of a trial that has ended."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number + 1, os.SEEK_SET)

    def is_held_elsewhere(self, number: int) -> bool:
        """Return whether another process is running a trial.

        The trial must not be one of this process.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number + 1, os.SEEK_SET)
        except OSError:
            return True
        self.release(number)
        return False
