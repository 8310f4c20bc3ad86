"""Work that is done in order by a thread beside training, and whose errors are not lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Background:
    """Does jobs one after the other in a thread that lives as long as there are some.

    The process does not end before they are done. The first error is kept until somebody takes it; jobs that were
    handed over with `needs_success` are left out after an error, until a job has succeeded again.

    Args:
        max_jobs: Being done or waiting; who hands over more waits.
        name: Of the thread.

    >>> done = []
    >>> background = Background(max_jobs=2, name="example")
    >>> for number in range(4):
    ...     background.put(lambda number=number: done.append(number), limit_s=5)
    True
    True
    True
    True
    >>> background.wait(limit_s=5), done
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
        """Without its jobs: strategies are pickled before anything runs."""
        return {"max_jobs": self.max_jobs, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def put(self, job: Callable[[], None], *, limit_s: float, needs_success: bool = False) -> bool:
        """Hand a job over; False if for so long there was no place for it.

        Args:
            job: Called in the thread.
            limit_s: How long to wait for a place.
            needs_success: Leave the job out if the latest other one failed.
        """
        with self._changed:
            if not needs_success and not self.wait_for_place(limit_s=limit_s):
                return False
            self._jobs.append((job, needs_success))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name)
                self._thread.start()
        return True

    def wait_for_place(self, *, limit_s: float) -> bool:
        """Until one more can be handed over; False if none can by then."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._jobs) < self.max_jobs, limit_s)

    def wait(self, *, limit_s: float) -> bool:
        """Until all is done; False if it is not by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, limit_s)

    @property
    def num_jobs(self) -> int:
        """Being done or waiting."""
        with self._changed:
            return len(self._jobs)

    def take_error(self) -> BaseException | None:
        """The first error since the last time; None if there was none."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                job, needs_success = self._jobs[0]
            if not (needs_success and self._has_failed):
                self._do(job, is_told=not needs_success)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _do(self, job: Callable[[], None], *, is_told: bool) -> None:
        try:
            job()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._has_failed = self._has_failed or is_told
        else:
            self._has_failed = self._has_failed and not is_told
