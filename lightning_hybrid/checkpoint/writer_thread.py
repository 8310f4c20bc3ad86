"""A thread that does jobs in order while training continues, and does not lose their errors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class WriterThread:
    """A queue of jobs and a thread that does them one after the other; it ends when there are none.

    The process does not end before all jobs are done. The first error is stored until `take_error`; jobs that were put
    with `needs_success` are left out after an error, until a job has succeeded again.

    Args:
        max_jobs: Jobs in progress or waiting; `put` waits while there are more.
        name: Name of the thread.

    >>> done = []
    >>> writer = WriterThread(max_jobs=2, name="example")
    >>> [writer.put(lambda number=number: done.append(number), limit_s=5) for number in range(4)]
    [True, True, True, True]
    >>> writer.wait(limit_s=5), done
    (True, [0, 1, 2, 3])
    """

    def __init__(self, *, max_jobs: int, name: str) -> None:
        self.max_jobs, self.name = max_jobs, name
        self._jobs: deque[tuple[Callable[[], None], bool]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_failed = False

    def __getstate__(self) -> dict[str, Any]:
        # Strategies are pickled (spawn) before anything runs: there is no queue to take along, and a lock cannot be.
        return {"max_jobs": self.max_jobs, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def put(self, job: Callable[[], None], *, limit_s: float, needs_success: bool = False) -> bool:
        """Put a job into the queue; return False if there was no place for it until the time limit.

        Args:
            job: Called in the thread.
            limit_s: How long to wait for a place.
            needs_success: Leave the job out if the latest other one failed.
        """
        with self._changed:
            # A removal holds no memory, so it needs no place. The condition's lock is re-entrant.
            if not needs_success and not self.wait_for_place(limit_s=limit_s):
                return False
            self._jobs.append((job, needs_success))
            if self._thread is None:
                # No daemon: Python waits for it at exit, so what was put is written. It is started under the lock under
                # which it decides to end, so no job is left without a thread.
                self._thread = threading.Thread(target=self._work, name=self.name)
                self._thread.start()
        return True

    def wait_for_place(self, *, limit_s: float) -> bool:
        """Wait until the queue has a place; return False if it has none by then."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._jobs) < self.max_jobs, limit_s)

    def wait(self, *, limit_s: float) -> bool:
        """Wait until all jobs are done; return False if they are not by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, limit_s)

    @property
    def num_jobs(self) -> int:
        """Number of jobs in progress or waiting."""
        with self._changed:
            return len(self._jobs)

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call; None if there was none."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                # It stays in the queue while it runs: `wait` and `num_jobs` count it.
                job, needs_success = self._jobs[0]
            if not (needs_success and self._has_failed):
                self._do(job, counts=not needs_success)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _do(self, job: Callable[[], None], *, counts: bool) -> None:
        # A removal (needs_success) neither counts as a failed write nor lifts one.
        try:
            job()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._has_failed = self._has_failed or counts
        else:
            self._has_failed = self._has_failed and not counts
